"""Faults that no further process can mend end a run at once, under their own name and with their own code."""

from collections.abc import Callable
from pathlib import Path

import pytest
from chaos_ports import Poison, Refuse

from mem_core.core.run.state_manager import read_journal
from mem_core.domain.errors import EnvironmentUnfit
from mem_core.domain.events import SegmentEnded
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.domain.segment import WorkerError
from mem_core.testing.ports import with_port

pytestmark = pytest.mark.integration
Drive, Nano = Callable[..., RunResult], Callable[..., RuntimeRequest]
STEPS = {"max_steps": 4, "segment_steps": 2}


def failures_of(tmp_path: Path, run_id: str) -> list[WorkerError]:
    events = [line.event for line in read_journal(tmp_path / run_id / "journal")]
    return [event.outcome for event in events if isinstance(event, SegmentEnded) and isinstance(event.outcome, WorkerError)]


def test_what_a_rank_refuses_ends_the_run_in_its_own_words(drive: Drive, nano: Nano, tmp_path: Path) -> None:
    """One process, exit 69; field, value, bound and remedy have crossed the border, and the traceback stands in the journal."""
    counter = tmp_path / "count"
    with pytest.raises(EnvironmentUnfit) as caught:
        drive(nano("refused", training=STEPS), options=with_port(Refuse(str(counter))))
    error = caught.value
    assert (error.field, error.value, error.bound, error.remedy) == ("model.dtype", "float16", "float32", "Set model.dtype: float32.")
    assert counter.stat().st_size == 1
    (failure,) = failures_of(tmp_path, "refused")
    assert any("in __call__" in line for line in failure.evidence.last_lines)


def test_the_first_batch_failing_twice_is_the_environments_and_blames_no_sample(drive: Drive, nano: Nano, tmp_path: Path) -> None:
    """Two fresh processes, the same words, no step done by any: exit 69, not "look at those samples"."""
    counter = tmp_path / "count"
    with pytest.raises(EnvironmentUnfit, match="a row that nobody can read") as caught:
        drive(nano("first", training=STEPS), options=with_port(Poison(0, "error", str(counter))))
    assert "samples" not in str(caught.value)
    assert counter.stat().st_size == 2
    assert [failure.before_any_step for failure in failures_of(tmp_path, "first")] == [True, True]
