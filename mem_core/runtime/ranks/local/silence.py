"""Watches the ranks' heartbeats for silence. The judgement is pure (`find_hung`); here the facts are gathered."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from mem_core.core.recovery.deadlines import MINIMUM_S, PhaseTimes, RankSign, find_hung
from mem_core.domain.segment import Phase
from mem_core.infrastructure.machine.process_facts import active_seconds
from mem_core.runtime.ranks.local.heartbeat import HeartbeatReader
from mem_core.runtime.ranks.port import Heartbeat

QUIET_S = 0.5  # younger beats are no silence, and /proc is not asked
STEP_PHASES = ("forward", "backward", "step")


@dataclass(frozen=True, slots=True)
class _Since:
    """What was seen when a silence was first looked at: the beat before it, the moment, the activity so far."""

    last_s: float
    watched_from_s: float
    active_s: float


class SilenceWatch:
    """One for a try. `look` is called some times a second while answers are due."""

    def __init__(self, readers: Sequence[HeartbeatReader], times: PhaseTimes, hang_factor: float) -> None:
        self._readers = readers
        self._times = times
        self._hang_factor = hang_factor
        self._last: dict[int, Heartbeat] = {}
        self._since: dict[int, _Since] = {}

    def look(self, now_s: float, asked_s: float, pids: Sequence[int | None], answered: Set[int]) -> RankSign | None:
        """The rank that holds the group up, or None. `asked_s` is when the command was given; answered ranks owe nothing."""
        signs = [
            self._sign(rank, reader.read(), now_s, asked_s, pids[rank]) for rank, reader in enumerate(self._readers) if rank not in answered
        ]
        return find_hung(signs)

    def phase(self, rank: int) -> Phase:
        """The phase that a rank was last seen in."""
        return _phase(self._last.get(rank, Heartbeat()))

    def _sign(self, rank: int, beat: Heartbeat, now_s: float, asked_s: float, pid: int | None) -> RankSign:
        self._learn(rank, beat)
        last_s = max(beat.beat_s, asked_s)
        silent_s = now_s - last_s
        allowed_s = self._times.allowed_s(_phase(beat), self._hang_factor)
        since = self._since.get(rank)
        if silent_s < QUIET_S or since is None or since.last_s != last_s:
            since = self._since[rank] = _Since(last_s, now_s, active_seconds(pid))
        watched_s = now_s - since.watched_from_s
        if watched_s < QUIET_S:  # it has just spoken, or we have just begun to look: at work, and its peers may wait for it
            return RankSign(rank, silent_s, allowed_s, 0.0, runnable=True)
        states = thread_states(pid)
        active_s = (active_seconds(pid) - since.active_s) * silent_s / watched_s
        return RankSign(rank, silent_s, allowed_s, active_s, stopped=bool({"T", "t"} & states), runnable="R" in states)

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


def thread_states(pid: int | None) -> set[str]:
    """The kernel's letters for a process's threads: R (computes or waits for a core), S, D, T (stopped); empty when it is gone."""
    found: set[str] = set()
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found.add((task / "stat").read_text().rpartition(")")[2].split()[0])
    except OSError:
        pass
    return found
