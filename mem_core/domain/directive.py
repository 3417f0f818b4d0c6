"""What an outside planner asks for. Never executed as it is: only `LocalPolicyEngine` turns it into applied values."""

from pydantic import Field

from mem_core.domain.units import Value


class ExecutiveDirective(Value):
    """Proposed hyper-parameters for the next segment; absent fields mean "no change from the request".

    `lr_multiplier` scales the base schedule, `gradient_clip_norm` is the global gradient norm,
    `loss_scale_initial_power` is log2 of the first loss scale (float16 only).
    """

    lr_multiplier: float | None = Field(None, allow_inf_nan=False, strict=True)
    gradient_clip_norm: float | None = Field(None, allow_inf_nan=False, strict=True)
    loss_scale_initial_power: int | None = Field(None, strict=True)
