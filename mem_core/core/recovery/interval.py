"""How long a segment should be: the classic trade between the cost of a checkpoint and the work that a fault undoes. Pure."""

import math
from collections import deque
from statistics import median
from typing import Literal

from mem_core.domain.events import AttemptStarted, Event, FaultMet, RunEnded, SegmentEnded, SegmentStarted, TimeSpent
from mem_core.domain.request import MAX_SEGMENTS
from mem_core.domain.segment import SegmentCompleted

FIRST_INTERVAL_S = 60.0  # before anything was measured: a slow model then risks a minute
PRIOR_FAULT_FREE_S = 600.0  # a run without a fault yet is taken for one that had its first after its age plus this
SHORTEST_S = 1.0
UNMEASURED_COST_S = 0.1
RECENT = 32
BETWEEN_STEPS = ("save_stall", "validation_wait", "idle")


def best_interval_s(save_stall_s: float, mean_time_between_faults_s: float) -> float:
    """Seconds of work between checkpoints that lose the least time (Young 1974; Daly 2006 adds the correction for short intervals).

    `save_stall_s` is what a checkpoint costs the training, not how long it takes to be written behind it.
    """
    ratio = save_stall_s / (2.0 * mean_time_between_faults_s)
    if ratio >= 1.0:
        return mean_time_between_faults_s
    return math.sqrt(2.0 * save_stall_s * mean_time_between_faults_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - save_stall_s


def expected_goodput(interval_s: float, save_stall_s: float, mean_time_between_faults_s: float, recovery_s: float) -> float:
    """Fraction of the wall time that moves training forward, to first order: saving, half an interval lost per fault, recovering."""
    saving = save_stall_s / (interval_s + save_stall_s)
    lost = (interval_s / 2.0 + recovery_s) / mean_time_between_faults_s
    return max(0.0, 1.0 - saving - lost)


class RunPace:
    """What a run has shown of itself, from its journal events in order: steps, cost of a segment's end, faults.

    Linear in the events and of constant size; a resumed run comes to the same values as the one before it.
    """

    def __init__(self) -> None:
        self._step_s: deque[float] = deque(maxlen=RECENT)
        self._segment_cost_s: deque[float] = deque(maxlen=RECENT)
        self._ended_well = False
        self._running = False
        self.faults = 0
        self.segments = 0
        self.running_s = 0.0

    def add(self, event: Event) -> None:
        """Take the next event."""
        match event:
            case AttemptStarted():
                self.faults += self._running  # the attempt before it ended without a word
                self._running = True
            case RunEnded():
                self._running = False
            case SegmentStarted():
                self.segments += 1
            case FaultMet():
                self.faults += 1
            case SegmentEnded(outcome=SegmentCompleted() as done):
                self._ended_well = True
                if done.to_step > done.from_step:
                    self._step_s.append(done.duration_s / (done.to_step - done.from_step))
            case TimeSpent():
                self.running_s += sum(event.seconds.values())
                if self._ended_well:
                    self._segment_cost_s.append(sum(event.seconds.get(bucket, 0.0) for bucket in BETWEEN_STEPS))
                self._ended_well = False
            case _:
                pass

    @property
    def mean_time_between_faults_s(self) -> float:
        """Observed, with one fault to come in a while after now, so that a quiet run is trusted more the older it is."""
        return (self.running_s + PRIOR_FAULT_FREE_S) / (self.faults + 1)

    @property
    def segment_cost_s(self) -> float:
        """What the end of a segment costs the training: the save's stall and the time between two segments; usual value of late."""
        return median(self._segment_cost_s or [UNMEASURED_COST_S])

    def interval_s(self, wish: float | Literal["auto"] | None, steps_left: int) -> float | None:
        """Seconds after which the next segment ends at a step boundary; None where steps alone decide.

        Never so short that the rest of the run would need more segments than are left of `MAX_SEGMENTS`.
        """
        segments_left = MAX_SEGMENTS - self.segments
        if wish is None or segments_left <= 0:
            return None
        if not self._step_s:
            return FIRST_INTERVAL_S if wish == "auto" else wish
        shortest_s = max(SHORTEST_S, steps_left * median(self._step_s) / segments_left)
        if wish == "auto":
            wish = best_interval_s(self.segment_cost_s, self.mean_time_between_faults_s)
        return max(wish, shortest_s)
