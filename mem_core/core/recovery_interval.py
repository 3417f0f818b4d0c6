"""How long a segment should be: the classic trade between the cost of a checkpoint and the work that a fault undoes. Pure."""

import math


def best_interval_s(save_stall_s: float, mean_time_between_faults_s: float) -> float:
    """Seconds of work between checkpoints that lose the least time (Young 1974; Daly 2006 adds the correction for short intervals).

    `save_stall_s` is what a checkpoint costs the training, not how long it takes to be written behind it.
    """
    ratio = save_stall_s / (2.0 * mean_time_between_faults_s)
    if ratio >= 1.0:
        return mean_time_between_faults_s
    return math.sqrt(2.0 * save_stall_s * mean_time_between_faults_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - save_stall_s


def best_segment_steps(step_s: float, save_stall_s: float, mean_time_between_faults_s: float, max_steps: int) -> int:
    """The same in steps, at least 1 and at most the run.

    Each segment also costs the flow some hundredths of a second; `save_stall_s` should include what was measured of that.
    """
    steps = best_interval_s(save_stall_s, mean_time_between_faults_s) / max(step_s, 1e-9)
    return max(1, min(max_steps, round(steps)))


def expected_goodput(interval_s: float, save_stall_s: float, mean_time_between_faults_s: float, recovery_s: float) -> float:
    """Fraction of the wall time that moves training forward, to first order: saving, half an interval lost per fault, recovering."""
    saving = save_stall_s / (interval_s + save_stall_s)
    lost = (interval_s / 2.0 + recovery_s) / mean_time_between_faults_s
    return max(0.0, 1.0 - saving - lost)
