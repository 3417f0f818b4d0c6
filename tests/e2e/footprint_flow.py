"""A program: the real flow loop, tasks and view over segments that do nothing, so that only Prefect's share is measured.

`python footprint_flow.py FOLDER NUM_SEGMENTS` prints {"rss_bytes": {segments: bytes}, "drain_s": ...}; PREFECT_API_URL is the server.
"""

import contextlib
import gc
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from flows.context import shown_in_prefect
from flows.endurance_flow import train_to_end
from flows.mem_flow import mem_flow
from flows.prefect_view.publisher import PrefectView
from mem_core.core.recovery.actions import Action, Finish, Train
from mem_core.core.run.state_manager import StateManager
from mem_core.domain.checkpoint import CheckpointVerdict
from mem_core.domain.errors import Interrupted
from mem_core.domain.events import CheckpointCommitted, CheckpointJudged, RunEnded, SegmentEnded, SegmentStarted
from mem_core.domain.plan import Hyperparams
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.segment import SegmentCompleted
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.telemetry.progress import ProgressView
from mem_core.runtime.session.checkpoint_service import SaveResult
from mem_core.runtime.session.opening.stages import Prepared, RunOrder
from tasks.running import DRIVEN

STEPS = 1_000


@dataclass
class EmptySession:
    """Stands where a RunSession stands: journals as a real one does, trains nothing."""

    state: StateManager
    view: PrefectView
    num_segments: int
    done: int = 0
    rss_bytes: dict[int, int] = field(default_factory=dict)
    advice: Any = field(default_factory=lambda: SimpleNamespace(has_planner=False))

    def waiting_for_verdict(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def interrupted(self) -> Interrupted:
        return Interrupted("stopped", remedy="")

    def next_action(self) -> Action:
        if self.done % 100 == 0:
            gc.collect()
            self.rss_bytes[self.done] = psutil.Process().memory_info().rss
        if self.done == self.num_segments:
            return Finish()
        return Train(self.done, self.done * STEPS, (self.done + 1) * STEPS)

    def decide(self, segment: Train) -> Hyperparams:
        return Hyperparams()

    def train_segment(self, segment_index: int, until_step: int, try_number: int) -> SegmentCompleted:
        before = until_step - STEPS
        self.state.emit(SegmentStarted(segment_index=segment_index, from_step=before, until_step=until_step))
        loss = 3.0 - 2.0 * segment_index / self.num_segments
        self.view.update(ProgressView(step=until_step, total_steps=self.num_segments * STEPS, segment_index=segment_index, loss=loss))
        outcome = SegmentCompleted(
            from_step=before, to_step=until_step, batch_index=until_step, loss_first=loss, loss_last=loss, tokens=1_000, duration_s=1.0,
            trajectory_digest="0" * 64,
        )  # fmt: skip
        self.state.emit(SegmentEnded(segment_index=segment_index, outcome=outcome))
        self.done += 1
        return outcome

    def complete_save(self, step: int) -> SaveResult:
        self.state.emit(CheckpointCommitted(step=step, size_bytes=1_000_000, duration_s=0.1))
        verdict = CheckpointVerdict(step=step, level="integrity", valid=True, manifest_sha256="0" * 64)
        self.state.emit(CheckpointJudged(verdict=verdict))
        return SaveResult(step, verdict)

    def settle(self, result: SaveResult) -> None:
        assert result.valid

    def finish(self) -> None:
        self.state.emit(RunEnded(status="completed", exit_code=0))


@mem_flow(name="footprint", persist_result=False)
def footprint(folder: str, num_segments: int) -> dict[int, int]:
    """The loop of the endurance flow."""
    steps = num_segments * STEPS
    request = RuntimeRequest.model_validate({"run_id": "empty", "store": folder, "training": {"max_steps": steps}})
    order = shown_in_prefect(RunOrder(request, Settings.from_environment()))
    view = order.progress
    assert isinstance(view, PrefectView)
    state = StateManager.acquire(Path(folder), "empty")
    view.follow(state)
    session = EmptySession(state, view, num_segments)
    with DRIVEN.driving(order) as run:
        run.stage = Prepared(held=None, data=None, model=None, session=session)  # type: ignore[arg-type]
        train_to_end(run.key)
    state.release()
    view.close()
    return session.rss_bytes


if __name__ == "__main__":
    print(json.dumps({"rss_bytes": footprint(sys.argv[1], int(sys.argv[2]))}), flush=True)
