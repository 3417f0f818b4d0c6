"""`kill -9` of one rank: recovered inside the run, to the same weights, with one rank and with two."""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from mem_core.core.recovery.actions import Train
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.runtime.session.run_session import RunSession

pytestmark = pytest.mark.integration
STEPS, SEGMENT_STEPS, KILL_AFTER_STEP = 60, 20, 28


class RankKiller:
    """Kills one rank with SIGKILL once it has gone past a step, in the middle of a segment. `killed_at` is None until then."""

    def __init__(self, rank: int, after_step: int) -> None:
        self.rank = rank
        self.after_step = after_step
        self.killed_at: int | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def before_segment(self, session: RunSession, segment: Train) -> None:
        if self._thread is None and segment.from_step > 0:
            self._thread = threading.Thread(target=self._watch, args=(session,))
            self._thread.start()

    def _watch(self, session: RunSession) -> None:
        while not self._stop.is_set():
            group = session.segments.ranks.group
            beats = group.heartbeats() if group is not None else []
            if group is not None and len(beats) > self.rank and beats[self.rank].applied_steps > self.after_step:
                os.kill(group.pids[self.rank], signal.SIGKILL)
                self.killed_at = beats[self.rank].applied_steps
                return
            time.sleep(0.001)

    def finish(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()


@pytest.mark.parametrize(
    ("num_ranks", "victim", "zero_stage", "model"), [(1, 0, 1, {}), (2, 0, 2, {}), (2, 1, 0, {}), (2, 1, 3, {"lora": {"dropout": 0.1}})]
)
def test_a_killed_rank_is_replaced_and_the_weights_are_the_same(
    drive: Callable[..., RunResult],
    nano: Callable[..., RuntimeRequest],
    num_ranks: int,
    victim: int,
    zero_stage: int,
    model: dict[str, Any],
) -> None:
    shape = {
        "model": model,
        "training": {"max_steps": STEPS, "segment_steps": SEGMENT_STEPS, "warmup_steps": 10},
        "parallel": {"num_ranks": num_ranks, "zero_stage": zero_stage},
    }
    undisturbed = drive(nano("left-in-peace", **shape))
    killer = RankKiller(victim, KILL_AFTER_STEP)
    try:
        struck = drive(nano("struck", **shape), before_segment=killer.before_segment)
    finally:
        killer.finish()
    assert killer.killed_at is not None
    assert KILL_AFTER_STEP < killer.killed_at < STEPS
    assert struck.restarts == 1
    (fault,) = struck.faults
    assert fault.kind == "worker_lost"
    assert "SIGKILL" in fault.detail
    assert 0 < fault.step <= killer.killed_at, "it went on from a checkpoint, not from the start"
    assert fault.recovered_s is not None
    assert struck.applied_steps == STEPS
    assert (struck.weights_digest, struck.trajectory_digest) == (undisturbed.weights_digest, undisturbed.trajectory_digest)
