"""How long a run is: steps that follow from epochs and from a share for warm-up, once the data are known. Pure.

From here on a run speaks steps and nothing else: the request that trains has `max_steps` and `warmup_steps`, and neither `epochs` nor
`warmup_ratio`. What they were found from stays in the run's record, so that a later request may ask in epochs again.
"""

import math
from collections.abc import Collection
from fractions import Fraction

from pydantic import Field

from mem_core.domain.errors import RequestError
from mem_core.domain.request import RuntimeRequest, TrainingSection
from mem_core.domain.units import Value

WARMUP = "training.warmup_steps"


class RunLength(Value):
    """What the steps of a run follow from. `num_rows` is None in records of older versions."""

    epochs: float | None = Field(default=None, description="As asked for last; None where steps were asked for.")
    warmup_ratio: float | None = Field(default=None, description="As asked for when the run was born.")
    num_rows: int | None = Field(default=None, description="Training rows of one epoch.")


def steps_of(epochs: float, num_rows: int, global_batch_size: int) -> int:
    """Updates that see every row `epochs` times, in whole batches: the last one is filled with rows of the next epoch.

    By decimal digits and not by bits: a tenth of 100 rows is 10 rows.
    """
    return max(1, math.ceil(Fraction(str(epochs)) * num_rows / global_batch_size))


def epochs_of(steps: int, num_rows: int, global_batch_size: int) -> float:
    """How often `steps` updates have seen every row."""
    return steps * global_batch_size / num_rows if num_rows else 0.0


def asks_for_length(request: RuntimeRequest) -> bool:
    """Whether steps are still to be found."""
    return request.training.epochs is not None or request.training.warmup_ratio is not None


def length_of(request: RuntimeRequest, num_rows: int, before: RunLength | None = None) -> RunLength:
    """What a record keeps of `request`, as it was asked. `before`: of a run that goes on, whose warm-up stays as it was born."""
    training = request.training
    ratio = training.warmup_ratio if before is None else before.warmup_ratio
    return RunLength(epochs=training.epochs, warmup_ratio=ratio, num_rows=num_rows)


def in_steps(request: RuntimeRequest, num_rows: int) -> RuntimeRequest:
    """The request of a run that is being born, in steps. One that asks for steps comes back as it is.

    Raises:
        RequestError: the epochs make more steps than `training.max_steps_limit`.
    """
    if not asks_for_length(request):
        return request
    training = _with_steps(request.training, num_rows)
    if training.warmup_ratio is not None:
        horizon = training.schedule_steps or training.max_steps
        warmup_steps = math.ceil(Fraction(str(training.warmup_ratio)) * horizon)
        training = training.model_copy(update={"warmup_steps": warmup_steps, "warmup_ratio": None})
    return request.model_copy(update={"training": training})


def going_on_in_steps(length: RunLength, stored: RuntimeRequest, asked: RuntimeRequest, as_born: Collection[str] = ()) -> RuntimeRequest:
    """The request of a run that goes on, in steps: more epochs are more steps, and the warm-up stays what it was at birth.

    `as_born`: see `reconcile`; a share for warm-up that nobody asked for is left out.

    Raises:
        RequestError: another share for warm-up, or epochs of a run whose record does not say how many rows an epoch has.
    """
    if not asks_for_length(asked):
        return asked
    training = asked.training
    ratio = training.warmup_ratio
    if ratio is not None:
        if ratio != length.warmup_ratio and WARMUP not in as_born:
            raise RequestError(
                f"run {stored.run_id} was born with {_birth_words(length, stored)} and cannot change it on resume",
                field="training.warmup_ratio", value=ratio, bound="the warm-up of a run stays what it was at birth",
                remedy="Ask for what it was born with, or use a new run_id.",
            )  # fmt: skip
        training = training.model_copy(update={"warmup_steps": stored.training.warmup_steps, "warmup_ratio": None})
    if training.epochs is not None:
        if length.num_rows is None:
            raise RequestError(
                f"the record of run {stored.run_id} is of a version that did not keep how many rows an epoch has",
                field="training.epochs", value=training.epochs, remedy="Ask for training.max_steps instead.",
            )  # fmt: skip
        training = _with_steps(training, length.num_rows)
    return asked.model_copy(update={"training": training})


def refuse_epochs(request: RuntimeRequest, who: str) -> None:
    """For what plans over the steps of a run before its data are prepared. Raises RequestError."""
    if request.training.epochs is not None:
        raise RequestError(
            f"{who} plans over steps, and how many these epochs make is known only once the data are prepared",
            field="training.epochs", value=request.training.epochs, bound="training.max_steps",
            remedy="Ask for training.max_steps instead.",
        )  # fmt: skip


def length_words(length: RunLength, request: RuntimeRequest) -> str:
    """What followed from epochs, for people; empty where steps were asked for. `request` speaks steps."""
    if length.epochs is None or length.num_rows is None:
        return ""
    training, times = request.training, f"{length.epochs:g} epoch{'' if length.epochs == 1 else 's'}"
    return (
        f"{times} of {length.num_rows:,} rows are {training.max_steps:,} steps of {training.global_batch_size} rows, "
        f"{training.warmup_steps:,} of them warm-up"
    )


def _with_steps(training: TrainingSection, num_rows: int) -> TrainingSection:
    if training.epochs is None:
        return training
    steps = steps_of(training.epochs, num_rows, training.global_batch_size)
    if steps > training.max_steps_limit:
        raise RequestError(
            f"these epochs of {num_rows} rows are {steps} steps", field="training.epochs", value=training.epochs,
            bound=f"training.max_steps_limit {training.max_steps_limit}",
            remedy="Ask for fewer, or raise training.max_steps_limit if you mean it.",
        )  # fmt: skip
    return training.model_copy(update={"max_steps": steps, "epochs": None})


def _birth_words(length: RunLength, stored: RuntimeRequest) -> str:
    if length.warmup_ratio is not None:
        return f"training.warmup_ratio {length.warmup_ratio:g}"
    return f"{WARMUP} {stored.training.warmup_steps}"
