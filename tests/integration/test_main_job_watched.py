"""What somebody else sees of a run while it trains, and what the last progress line says."""

from collections.abc import Callable
from pathlib import Path

import pytest

from flows.commands.report import run_status
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import LiveStep, RunResult
from mem_core.infrastructure.telemetry.live import LIVE_NAME
from mem_core.infrastructure.telemetry.progress import NoProgress, ProgressView, View

pytestmark = pytest.mark.integration


class LooksOn(NoProgress):
    """Asks for the status from the run folder at each new view, as another process would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[LiveStep] = []
        self.last: ProgressView | None = None

    def update(self, view: View) -> None:
        if isinstance(view, ProgressView):
            self.last = view if view.loss is not None else self.last
            live = run_status(self.folder).live
            self.seen += [live] if live is not None else []


def test_status_follows_a_run_step_by_step_and_the_last_view_holds_the_last_loss(
    drive: Callable[..., RunResult], nano: Callable[..., RuntimeRequest], tmp_path: Path
) -> None:
    looks = LooksOn(tmp_path / "watched")
    result = drive(nano("watched", training={"max_steps": 500, "segment_steps": 100, "warmup_steps": 10}), progress=looks)
    assert result.status == "completed"
    assert len({live.step for live in looks.seen}) >= 2, "it moves"
    assert {live.total_steps for live in looks.seen} == {500}
    assert all(live.step <= live.until_step <= live.segment_index * 100 + 100 for live in looks.seen)
    assert any(live.steps_per_s and live.left_s and live.loss for live in looks.seen)
    assert not (tmp_path / "watched" / LIVE_NAME).exists(), "what runs no more is nowhere right now"
    assert looks.last is not None
    assert (looks.last.step, looks.last.loss) == (500, pytest.approx(result.loss_last, rel=1e-6))
    assert looks.last.tokens_per_s == pytest.approx(result.tokens_per_s, rel=0.9)
