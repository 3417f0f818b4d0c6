"""How long a phase may be silent before it counts as hung: observed × factor, never below what a busy machine can cause. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from mem_core.domain.segment import Phase

MINIMUM_S: dict[Phase, float] = {
    "start": 120.0,
    "op_build": 900.0,
    "restore": 120.0,
    "first_step": 180.0,
    "forward": 3.0,
    "backward": 3.0,
    "step": 3.0,
    "save": 60.0,
    "evaluate": 60.0,
    "sample": 60.0,
    "idle": 60.0,
    "data": 600.0,
    "calibrate": 180.0,
    "validate": 120.0,
}
BUSY_ALLOWANCE = 10.0
BUSY_SHARE = 0.02


class PhaseTimes:
    """The longest silence of each phase that turned out well in this run; deadlines are learned from it over all tries."""

    def __init__(self, slowest_s: dict[Phase, float] | None = None) -> None:
        self._slowest_s: dict[Phase, float] = dict(slowest_s or {})

    def observe(self, phase: Phase, duration_s: float) -> None:
        """A phase was silent for so long and went on."""
        self._slowest_s[phase] = max(self._slowest_s.get(phase, 0.0), duration_s)

    def allowed_s(self, phase: Phase, hang_factor: float) -> float:
        """Seconds without a heartbeat after which a rank in `phase` is suspected of hanging."""
        return silence_allowed_s(phase, self._slowest_s.get(phase, 0.0), hang_factor)


def silence_allowed_s(phase: Phase, slowest_s: float, hang_factor: float) -> float:
    """As `PhaseTimes.allowed_s`; `slowest_s` is the slowest of that phase seen so far in this run (0 when none was seen)."""
    return max(MINIMUM_S[phase], slowest_s * hang_factor)


@dataclass(frozen=True)
class RankSign:
    """What is known from outside about a rank that owes an answer.

    `cpu_used_s` is what its process has used of a core, or waited for one, since it fell silent; `stopped` that the kernel shows
    it as stopped.
    """

    rank: int
    silent_s: float
    allowed_s: float
    cpu_used_s: float
    stopped: bool = False
    runnable: bool = False

    @property
    def overdue(self) -> bool:
        """Silent for longer than its phase may be."""
        return self.silent_s >= self.allowed_s

    @property
    def busy(self) -> bool:
        """Its process computes, or would if it got a core."""
        return self.runnable or self.cpu_used_s > BUSY_SHARE * self.silent_s


def is_hung(silent_s: float, allowed_s: float, cpu_used_s: float) -> bool:
    """Whether a rank that stands alone is hung (see `find_hung`)."""
    return find_hung((RankSign(0, silent_s, allowed_s, cpu_used_s),)) is not None


def find_hung(signs: Sequence[RankSign]) -> RankSign | None:
    """The rank that holds the group up, or None.

    A stopped process is never just slow: it is named as soon as it is overdue. Otherwise a rank that computes on a starved
    machine is slow, and its peers, who wait for it in a collective without using time, are not hung either: while any of them
    is busy, all get `BUSY_ALLOWANCE` times as long. When none is, the group is dead-locked and is found at once.
    """
    overdue = [sign for sign in signs if sign.overdue]
    if not overdue:
        return None
    stopped = [sign for sign in overdue if sign.stopped]
    if stopped:
        return stopped[0]
    longest = max(overdue, key=lambda sign: sign.silent_s / sign.allowed_s)
    if any(sign.busy for sign in signs) and longest.silent_s < longest.allowed_s * BUSY_ALLOWANCE:
        return None
    return longest
