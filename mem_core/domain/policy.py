"""What the policy engine decided, and why."""

from typing import Any

from mem_core.domain.plan import Hyperparams
from mem_core.domain.units import Value


class Clamp(Value):
    """One proposed value that was not taken as it was."""

    field: str
    proposed: float
    applied: float
    bound: str
    reason: str


class PolicyDecision(Value):
    """Allow or refuse, the lane, and what reaches the engine. The same input always gives the same decision.

    `allow` is False when the directive (or the request, e.g. `cuda_unavailable`) was refused; then `applied_hyperparams`
    are the deterministic defaults of the request. `reason` is a stable word; `detail` is for people.
    """

    allow: bool
    reason: str
    detail: str = ""
    lane: str
    applied_hyperparams: Hyperparams
    clamps: tuple[Clamp, ...] = ()
    not_applicable: tuple[str, ...] = ()
    directive: dict[str, Any] | None = None
