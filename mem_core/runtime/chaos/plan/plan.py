"""Chaos is a value: seed -> plan. Pure; the same arguments give the same faults at the same steps for ever."""

import random
from dataclasses import dataclass

from mem_core.domain.capabilities import refusal
from mem_core.domain.errors import RequestError
from mem_core.domain.fault_kinds import FAULT_KINDS
from mem_core.domain.request import ChaosSection

FIRST_SHARE, LAST_SHARE = 0.02, 0.9
MAX_FAULTS = 10_000
SEGMENTS_PER_FAULT = 2


@dataclass(frozen=True)
class PlannedFault:
    """One fault to come: at an applied step, or some seconds after training began. `salt` seeds its own choices (rank, byte, bit)."""

    number: int
    kind: str
    at_step: int | None = None
    at_s: float | None = None
    salt: int = 0


def plan_faults(seed: int, section: ChaosSection, max_steps: int, kinds: tuple[str, ...]) -> tuple[PlannedFault, ...]:
    """The faults of a drill, in the order in which they are due.

    `section.at_steps` gives the moments; else `section.every_s` the mean gap in seconds (exponential, as independent failures
    come), filling `MAX_FAULTS` at most; else one fault of each kind is spread evenly over the run. Kinds come in shuffled
    rounds, so that each is met before any is met twice.

    Raises:
        RequestError: an unknown kind, no kind at all, or a step beyond the run.
    """
    _check(section, max_steps, kinds)
    rng = random.Random(seed)
    moments: list[tuple[int | None, float | None]]
    if section.at_steps is not None:
        moments = [(step, None) for step in sorted(section.at_steps)]
    elif section.every_s is not None:
        moments = [(None, at_s) for at_s in _poisson(rng, section.every_s)]
    else:
        moments = [(step, None) for step in _even(rng, len(kinds), max_steps)]
    chosen = _rounds(rng, kinds, len(moments))
    return tuple(
        PlannedFault(number, kind, step, at_s, rng.randrange(2**32))
        for number, (kind, (step, at_s)) in enumerate(zip(chosen, moments, strict=True), start=1)
    )


def kinds_that_fit(seed: int, kinds: tuple[str, ...], num_segments: int, *, asked: bool) -> tuple[str, ...]:
    """As many kinds as a run of this many segments has room for, one fault of each: all, or a seeded choice in the table's order.

    A fault waits until something newer than the one before it is proven, which takes about two segments.

    Raises:
        RequestError: the kinds were asked for by name and do not all fit.
    """
    room = max(1, num_segments // SEGMENTS_PER_FAULT)
    if len(kinds) <= room:
        return kinds
    if asked:
        raise RequestError(
            "the run has too few segments for these kinds of fault", field="chaos.kinds", value=len(kinds),
            bound=f"{room} in {num_segments} segments, {SEGMENTS_PER_FAULT} for each",
            remedy="Raise training.max_steps, lower training.segment_steps, or give the moments in chaos.at_steps.",
        )  # fmt: skip
    chosen = set(random.Random(seed).sample(kinds, room))
    return tuple(kind for kind in kinds if kind in chosen)


def spread_steps(seed: int, count: int, max_steps: int) -> tuple[int, ...]:
    """`count` steps for `ChaosSection.at_steps`: even over the run, jittered."""
    return tuple(_even(random.Random(seed), count, max_steps))


def _check(section: ChaosSection, max_steps: int, kinds: tuple[str, ...]) -> None:
    unknown = sorted(set(kinds) - FAULT_KINDS.keys())
    if unknown:
        raise refusal("fault_kinds", "chaos.kinds", ", ".join(unknown))
    if not kinds:
        raise RequestError(
            "no kind of fault is left", field="chaos.kinds", bound=", ".join(FAULT_KINDS), remedy="Name kinds from the list."
        )
    late = [step for step in section.at_steps or () if step >= max_steps]
    if late:
        raise RequestError(
            "a fault is planned after the end of the run",
            field="chaos.at_steps", value=late[0], bound=f"below training.max_steps {max_steps}", remedy="Plan it earlier.",
        )  # fmt: skip


def _even(rng: random.Random, count: int, max_steps: int) -> list[int]:
    first, last = max_steps * FIRST_SHARE, max_steps * LAST_SHARE
    gap = (last - first) / max(1, count)
    return sorted(int(first + gap * (index + 0.2 + 0.6 * rng.random())) for index in range(count))


def _poisson(rng: random.Random, mean_s: float) -> list[float]:
    moments: list[float] = []
    at_s = 0.0
    for _ in range(MAX_FAULTS):
        at_s += rng.expovariate(1 / mean_s)
        moments.append(at_s)
    return moments


def _rounds(rng: random.Random, kinds: tuple[str, ...], count: int) -> list[str]:
    chosen: list[str] = []
    while len(chosen) < count:
        one_round = list(kinds)
        rng.shuffle(one_round)
        chosen.extend(one_round)
    return chosen[:count]
