"""How long a phase may be silent before it counts as hung: observed × factor, never below what a busy machine can cause. Pure."""

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
    "idle": 60.0,
    "data": 600.0,
    "calibrate": 180.0,
    "validate": 120.0,
}
BUSY_ALLOWANCE = 10.0


def silence_allowed_s(phase: Phase, slowest_s: float, hang_factor: float) -> float:
    """Seconds without a heartbeat after which a rank in `phase` is suspected of hanging.

    `slowest_s` is the slowest of that phase seen so far in this run (0 when none was seen).
    """
    return max(MINIMUM_S[phase], slowest_s * hang_factor)


def is_hung(silent_s: float, allowed_s: float, cpu_used_s: float) -> bool:
    """Whether a silent rank is hung.

    A rank that computes on a starved machine is slow, not hung: while its processes use CPU time it gets `BUSY_ALLOWANCE`
    times as long. A stopped or dead-locked one uses none and is found at once.
    """
    if silent_s < allowed_s:
        return False
    busy = cpu_used_s > 0.02 * silent_s
    return not busy or silent_s >= allowed_s * BUSY_ALLOWANCE
