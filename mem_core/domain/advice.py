"""What a planner is shown and how it is asked. The summary is bounded and can hold no secret: numbers and one lane name."""

import math
from typing import Annotated, Any, Protocol

from pydantic import BeforeValidator, Field

from mem_core.domain.directive import Refusal
from mem_core.domain.plan import Hyperparams
from mem_core.domain.policy import LaneBounds
from mem_core.domain.units import Value

SUMMARY_SEGMENTS = 32


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _newest(values: Any) -> Any:
    return tuple(values)[-SUMMARY_SEGMENTS:] if isinstance(values, list | tuple) else values  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


MaybeFinite = Annotated[float | None, BeforeValidator(_finite_or_none)]
Series = Annotated[tuple[MaybeFinite, ...], BeforeValidator(_newest)]


class TrainingTelemetry(Value):
    """What the committed trajectory says, the same in a killed and resumed run as in an undisturbed one: no timing, no memory.

    Series hold one number per segment, oldest first, the newest `SUMMARY_SEGMENTS` of them; a number that is not finite is None.
    """

    segment_index: int = Field(ge=0, description="The segment that advice is wanted for.")
    applied_steps: int = Field(ge=0)
    max_steps: int = Field(ge=1)
    losses: Series = ()
    gradient_norms: Series = ()
    skipped_steps: int = Field(default=0, ge=0, description="Skipped updates in the last segment.")
    non_finite: bool = False
    segments_since_change: int | None = Field(default=None, ge=0, description="Segments since applied values last changed.")
    learning_rate: MaybeFinite = Field(default=None, description="Learning rate of the last step.")
    current: Hyperparams = Field(description="Values in force.")
    base: Hyperparams = Field(description="The request's own values.")
    bounds: LaneBounds


class TelemetrySummary(TrainingTelemetry):
    """All that a planner is told: the trajectory, and how the machine is doing."""

    validation_loss: MaybeFinite = None
    memory_headroom_fraction: MaybeFinite = Field(default=None, description="Free part of the binding memory budget.")
    ooms_absorbed: int = Field(default=0, ge=0)
    tokens_per_s: MaybeFinite = None

    def trajectory(self) -> TrainingTelemetry:
        """The deterministic part alone."""
        return TrainingTelemetry(**{name: getattr(self, name) for name in TrainingTelemetry.model_fields})


class Planner(Protocol):
    """Someone who may propose hyper-parameters for the next segment."""

    def advise(self, summary: TelemetrySummary) -> bytes | Refusal | None:
        """The reply as received, still to be parsed; None for no advice; a `Refusal` where there is no usable reply.

        Never raises. Returns within the time limit that the planner was built with.
        """
        ...
