"""Which parts of a run can be trained again, and which of them are: drawn by seed, so that who trains cannot know what will be asked."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from mem_core.core.audit.line import Commit, Told
from mem_core.domain.results.audit import AuditCoverage

MOST_NAMED = 6
FRESH: Literal["fresh weights"] = "fresh weights"
KEPT: Literal["checkpoint"] = "checkpoint"


@dataclass(frozen=True)
class Stretch:
    """From a state that is there to the next commit that the journal names. `begins_with`: a checkpoint, or the weights of step 0."""

    from_step: int
    commit: Commit
    begins_with: Literal["checkpoint", "fresh weights"] = KEPT

    @property
    def to_step(self) -> int:
        """The step of the commit that it ends at."""
        return self.commit.step

    @property
    def num_steps(self) -> int:
        """Applied updates."""
        return self.to_step - self.from_step


def stretches_of(told: Told, kept: Collection[int]) -> tuple[Stretch, ...]:
    """Every stretch that can be trained again, ascending. `kept`: steps of validated checkpoints that are there.

    A run that began with its own fresh weights, and has the shape that it began with, can be trained from step 0 too.
    """
    named = {commit.step for commit in told.commits}
    found: list[Stretch] = []
    if told.first_step == 0 and told.commits and not told.reshaped:
        found.append(Stretch(0, told.commits[0], FRESH))
    for step in sorted(named.intersection(kept)):
        following = next((commit for commit in told.commits if commit.step > step), None)
        if following is not None:
            found.append(Stretch(step, following))
    return tuple(found)


def drawn(stretches: Sequence[Stretch], number: int, seed: int) -> tuple[Stretch, ...]:
    """`number` of them by `seed`, all where there are no more; ascending. The same seed draws the same from the same."""
    chosen = random.Random(seed).sample(range(len(stretches)), min(number, len(stretches)))
    return tuple(stretches[index] for index in sorted(chosen))


def coverage_of(told: Told, possible: Sequence[Stretch], redone: Sequence[Stretch]) -> AuditCoverage:
    """How much was, and how much could have been, trained again."""
    last = told.commits[-1].step if told.commits else told.first_step
    return AuditCoverage(
        committed_steps=last - told.first_step,
        possible_segments=len(possible),
        possible_steps=sum(stretch.num_steps for stretch in possible),
        redone_steps=sum(stretch.num_steps for stretch in redone),
    )


def out_of_reach(told: Told, possible: Sequence[Stretch], known_step: int) -> tuple[str, ...]:
    """Steps that no stretch covers, with why, for people; the first few one by one. `known_step`: until there a checkpoint says how the run
    went on."""
    gaps: list[tuple[int, int]] = []
    at = told.first_step
    for stretch in possible:
        if stretch.from_step > at:
            gaps.append((at, stretch.from_step))
        at = max(at, stretch.to_step)
    last = told.commits[-1].step if told.commits else told.first_step
    if last > at:
        gaps.append((at, last))
    words = [f"steps {first + 1:,} to {until:,}: {_why(first, until, told, known_step)}" for first, until in gaps[:MOST_NAMED]]
    rest = gaps[MOST_NAMED:]
    if rest:
        steps = sum(until - first for first, until in rest)
        words.append(f"{steps:,} more steps in {len(rest)} other places")
    return tuple(words)


def _why(first: int, until: int, told: Told, known_step: int) -> str:
    if first == 0 and told.reshaped:
        return "the run has taken another number of ranks or another ZeRO stage since, and nothing says which it began with"
    if until > known_step:
        return "no checkpoint after them is there to say under which values they ran"
    return "no proven checkpoint is kept at their beginning (checkpoint.keep_every_steps keeps more)"


def not_named(told: Told, kept: Collection[int]) -> tuple[int, ...]:
    """Kept checkpoints that the journal does not name in the line of work that counts, ascending."""
    named = {commit.step for commit in told.commits}
    return tuple(sorted(step for step in kept if step not in named))
