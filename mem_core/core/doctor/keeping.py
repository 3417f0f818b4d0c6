"""How many checkpoints a run will hold at the same time, those that `checkpoint.keep_every_steps` adds up over its length included. Pure.

A checkpoint is made where a segment ends: at every multiple of the segment's length, where an evaluation cuts a segment, and at the last
step. Only those of them that are a multiple of `keep_every_steps` stay for ever.
"""

from math import lcm

from mem_core.domain.environment import Finding
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.units import format_bytes

BESIDE_THE_LAST = 2  # one that is staged, and one that is not judged yet


def num_kept_for_ever(request: RuntimeRequest, after_step: int = 0) -> int:
    """Multiples of `keep_every_steps` beyond `after_step` at which a segment ends; 0 where nothing asks for them, or where the run's length
    is not known yet (`training.epochs`)."""
    every_steps, last = request.checkpoint.keep_every_steps, request.training.max_steps
    if every_steps is None or request.training.epochs is not None or after_step >= last:
        return 0
    ends = [lcm(every_steps, steps) for steps in _cuts(request)]
    both = lcm(*ends)
    found = sum(last // end - after_step // end for end in ends)
    if len(ends) > 1:
        found -= last // both - after_step // both
    at_the_end = last % every_steps == 0 and all(last % end for end in ends)
    return found + at_the_end


def num_held(request: RuntimeRequest, saved_step: int | None) -> int:
    """Checkpoints that need room: of a run that begins all that will ever lie there at once, of one that goes on (`saved_step`) those
    that come on top of what lies there already."""
    now = BESIDE_THE_LAST if saved_step is not None else request.checkpoint.keep_last + BESIDE_THE_LAST
    return now + num_kept_for_ever(request, saved_step or 0)


def kept_words(request: RuntimeRequest, saved_step: int | None, one_bytes: int) -> str:
    """What of the room is for those that stay for ever, for people; empty where none are."""
    number = num_kept_for_ever(request, saved_step or 0)
    every_steps = request.checkpoint.keep_every_steps
    if every_steps is not None and request.training.epochs is not None:
        return f" and one more every {every_steps} steps (checkpoint.keep_every_steps); how many follows from the data"
    return f", {number} of them ({format_bytes(number * one_bytes)}) by checkpoint.keep_every_steps over the run" if number else ""


def keeping_findings(request: RuntimeRequest) -> tuple[Finding, ...]:
    """Steps that were asked for and at which no checkpoint will be."""
    every_steps = request.checkpoint.keep_every_steps
    if every_steps is None or any(every_steps % steps == 0 for steps in _cuts(request)):
        return ()
    segment_steps = request.effective_segment_steps
    met = min(lcm(every_steps, steps) for steps in _cuts(request))
    return (
        Finding(
            check="checkpoint.keep_every_steps",
            severity="notice",
            observed=f"segments end every {segment_steps} steps, so that of the multiples of {every_steps} only those of {met} have a "
            "checkpoint that can be kept",
            remedy=f"Set checkpoint.keep_every_steps to a multiple of {segment_steps}, or training.segment_steps to a divisor of "
            f"{every_steps}.",
        ),
    )


def _cuts(request: RuntimeRequest) -> tuple[int, ...]:
    """Every how many steps a segment ends for sure."""
    evaluated = request.effective_evaluation_steps
    return (request.effective_segment_steps, *(() if evaluated is None else (evaluated,)))
