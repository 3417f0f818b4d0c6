"""Where a run stands when something is to be decided, and what may follow: values only."""

from dataclasses import dataclass

from mem_core.domain.errors import MemError
from mem_core.domain.units import Value


class Progress(Value):
    """Where the run stands, as far as the next action depends on it.

    `failures_without_progress` counts failed tries since the validated step last advanced, this one included (I8);
    `same_batch_failures` those of them that failed at one and the same batch in the same way. `sample_ids` are those of the batch
    that failed last, `skipped_batches` how many the user's choice has left out so far. `stop_by`: who asks for an end, in words.
    `failed_loads`: how often the checkpoint that was being loaded has failed in a row; `can_fall_back`: there is an older proven one;
    `passed_over`: newer ones that failed before it.
    `same_errors`: how often in a row a fresh process met the same error before any step, at `same_error_batches` different batches.
    `has_stepped`: whether any process of this attempt applied a step; until then a failing batch says nothing about its samples.
    `is_evaluated`: whether the held-out rows were looked at after `applied_steps`; `stops_early`: what they said ends the run here;
    `is_sampled`: whether the prompts were answered there, where there are any.
    """

    applied_steps: int
    validated_step: int | None
    failures_without_progress: int = 0
    same_batch_failures: int = 0
    can_shrink: bool = True
    can_defragment: bool = False
    sample_ids: tuple[int, ...] = ()
    skipped_batches: int = 0
    stop_by: str = ""
    failed_loads: int = 0
    can_fall_back: bool = False
    passed_over: tuple[int, ...] = ()
    same_errors: int = 0
    same_error_batches: int = 0
    has_stepped: bool = True
    is_evaluated: bool = True
    is_sampled: bool = True
    stops_early: bool = False


@dataclass(frozen=True)
class Train:
    """Train one segment."""

    segment_index: int
    from_step: int
    until_step: int


@dataclass(frozen=True)
class Retry:
    """Replace the workers, go back to the last validated step, shrink first where memory was the cause.

    `defragment` asks for another setting of the device's allocator instead: memory was in pieces, not too little.
    `skip_batch` leaves a batch out for good, recorded before the next try; `lower_lr` asks the policy engine for less.
    `set_aside_step`: try an older checkpoint than this one, and set this one aside once the older one is loaded.
    """

    delay_s: float
    reason: str
    shrink: bool = False
    defragment: bool = False
    skip_batch: int | None = None
    lower_lr: bool = False
    set_aside_step: int | None = None


@dataclass(frozen=True)
class Evaluate:
    """Look at the held-out rows, and answer the prompts, with the weights as they are after `step`; at step 0 the prompts alone."""

    step: int


@dataclass(frozen=True)
class Finish:
    """All steps are applied, or patience is at its end."""


@dataclass(frozen=True)
class Pause:
    """Interrupted on purpose; the same command goes on."""

    by: str


@dataclass(frozen=True)
class GiveUp:
    """End with this error."""

    error: MemError


Action = Train | Evaluate | Retry | Finish | Pause | GiveUp
