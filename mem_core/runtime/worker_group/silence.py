"""Watches the ranks' heartbeats for silence. The judgement is pure (`find_hung`); here the facts are gathered."""

from collections.abc import Sequence, Set
from pathlib import Path
from typing import cast

from mem_core.core.deadlines import MINIMUM_S, PhaseTimes, RankSign, find_hung
from mem_core.domain.segment import Phase
from mem_core.infrastructure.process_facts import cpu_seconds
from mem_core.runtime.worker.heartbeat import Heartbeat, HeartbeatReader

QUIET_S = 0.5  # younger beats are no silence, and /proc is not asked
STEP_PHASES = ("forward", "backward", "step")


class SilenceWatch:
    """One for a try. `look` is called some times a second while answers are due."""

    def __init__(self, readers: Sequence[HeartbeatReader], times: PhaseTimes, hang_factor: float) -> None:
        self._readers = readers
        self._times = times
        self._hang_factor = hang_factor
        self._last: dict[int, Heartbeat] = {}
        self._cpu_at_s: dict[int, tuple[float, float]] = {}

    def look(self, now_s: float, asked_s: float, pids: Sequence[int | None], answered: Set[int]) -> RankSign | None:
        """The rank that holds the group up, or None. `asked_s` is when the command was given; answered ranks owe nothing."""
        signs = [
            sign
            for rank, reader in enumerate(self._readers)
            if rank not in answered and (sign := self._sign(rank, reader.read(), now_s, asked_s, pids[rank])) is not None
        ]
        return find_hung(signs)

    def phase(self, rank: int) -> Phase:
        """The phase that a rank was last seen in."""
        return _phase(self._last.get(rank, Heartbeat()))

    def _sign(self, rank: int, beat: Heartbeat, now_s: float, asked_s: float, pid: int | None) -> RankSign | None:
        self._learn(rank, beat)
        last_s = max(beat.beat_s, asked_s)
        silent_s = now_s - last_s
        since_s, cpu_s = self._cpu_at_s.get(rank, (-1.0, 0.0))
        if silent_s < QUIET_S or since_s != last_s:
            self._cpu_at_s[rank] = (last_s, cpu_seconds(pid))
            return None
        allowed_s = self._times.allowed_s(_phase(beat), self._hang_factor)
        return RankSign(rank, silent_s, allowed_s, cpu_seconds(pid) - cpu_s, stopped=is_stopped(pid))

    def _learn(self, rank: int, beat: Heartbeat) -> None:
        """From a step's own measured time; elsewhere from the time between two beats."""
        before = self._last.get(rank)
        if before is not None and before.beat_s == beat.beat_s:
            return
        self._last[rank] = beat
        if beat.phase in STEP_PHASES:
            self._times.observe(_phase(beat), beat.step_s)
        if before is not None and before.beat_s and before.phase not in (*STEP_PHASES, "idle"):
            self._times.observe(_phase(before), beat.beat_s - before.beat_s)


def _phase(beat: Heartbeat) -> Phase:
    return cast(Phase, beat.phase) if beat.phase in MINIMUM_S else "start"


def is_stopped(pid: int | None) -> bool:
    """Whether the kernel shows the process as stopped or traced."""
    if pid is None:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False
