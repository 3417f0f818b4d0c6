"""What an outside planner asks for. Never executed as it is: only `LocalPolicyEngine` turns it into applied values."""

import sys
from typing import Literal

from pydantic import Field, field_validator

from mem_core.domain.units import Value

DIRECTIVE_SIZE_LIMIT_BYTES = 65_536

RefusalReason = Literal[
    "busy",
    "bad_reply",
    "broken_json",
    "dropped",
    "duplicate_key",
    "http_error",
    "late",
    "nested",
    "no_object",
    "not_one_object",
    "non_finite",
    "not_text",
    "not_utf8",
    "planner_failed",
    "redirected",
    "too_large",
    "unknown_key",
    "unreachable",
    "wrong_type",
]


class ExecutiveDirective(Value):
    """Proposed hyper-parameters for the next segment; absent fields mean "no change from the request".

    `lr_multiplier` scales the base schedule, `gradient_clip_norm` is the global gradient norm,
    `loss_scale_initial_power` is log2 of the first loss scale (float16 only).
    """

    lr_multiplier: float | None = Field(default=None, allow_inf_nan=False, strict=True)
    gradient_clip_norm: float | None = Field(default=None, allow_inf_nan=False, strict=True)
    loss_scale_initial_power: int | None = Field(default=None, strict=True)

    @field_validator("loss_scale_initial_power")
    @classmethod
    def _finite(cls, value: int | None) -> int | None:
        """An integer beyond the range of a float counts as infinite; it could be neither compared nor written down."""
        if value is not None and abs(value) > sys.float_info.max:
            raise ValueError("loss_scale_initial_power is too large to be a finite number")
        return value


class Refusal(Value):
    """Why a reply, or the lack of one, was refused as a whole. `reason` is a stable word, `detail` is for people."""

    reason: RefusalReason
    detail: str = Field(default="", max_length=500)
