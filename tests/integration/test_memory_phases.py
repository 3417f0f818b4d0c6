"""Out of memory where a smaller micro-batch is no cure: saves, loads, evaluations, and leaks, each acted on for what it is."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mem_core.core.run.state_manager import read_journal
from mem_core.domain.errors import MemoryExhausted
from mem_core.domain.events import CheckpointJudged, Noted, SegmentEnded
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.domain.segment import OutOfMemory, SaveFailed
from mem_core.testing.memory_faults import FailingLoad, fail_evaluation, fail_fork, fail_in_pieces, fail_one_save, fired, leak
from mem_core.testing.ports import with_port

pytestmark = pytest.mark.integration
Drive = Callable[..., RunResult]
Nano = Callable[..., RuntimeRequest]
MIB = 2**20
TRAINING = {"max_steps": 20, "segment_steps": 10, "global_batch_size": 8, "warmup_steps": 2}


def events(result: RunResult, kind: type) -> list[Any]:
    """The journal's events of a kind."""
    return [line.event for line in read_journal(Path(result.run_folder) / "journal") if isinstance(line.event, kind)]


def digests(result: RunResult) -> tuple[str, str]:
    """What makes two runs the same run."""
    return result.trajectory_digest, result.weights_digest


@pytest.fixture(scope="module")
def clean(fork_server: Any, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """The run that meets nothing."""
    from mem_core.testing.driver import drive

    values = {"run_id": "clean", "store": str(tmp_path_factory.mktemp("clean")), "device": "cpu", "training": TRAINING}
    return drive(RuntimeRequest.model_validate(values), server=fork_server)


def test_a_rank_that_cannot_be_forked_saves_in_the_foreground(drive: Drive, nano: Nano, tmp_path: Path, clean: RunResult) -> None:
    """ENOMEM from fork: training waits for the save instead, nothing shrinks, both checkpoints are proven and have the same weights."""
    result = drive(nano("forkless", training=TRAINING), options=with_port(partial(fail_fork, folder=tmp_path)))
    assert (tmp_path / "forks").stat().st_size == 2
    assert (result.restarts, result.ooms_fatal, result.memory.plan_changes) == (0, 0, ())
    assert [event.verdict.valid for event in events(result, CheckpointJudged)] == [True, True]
    assert digests(result) == digests(clean)


def test_a_writer_out_of_memory_costs_one_checkpoint_and_no_step(drive: Drive, nano: Nano, tmp_path: Path, clean: RunResult) -> None:
    """The forked writer's failure is a save that failed: the engine is sound, the plan stays, the next save holds."""
    result = drive(nano("save", training=TRAINING), options=with_port(partial(fail_one_save, marker=tmp_path / "failed")))
    failures = [event.outcome for event in events(result, SegmentEnded) if isinstance(event.outcome, SaveFailed)]
    assert len(failures) == 1
    assert "can't allocate memory" in failures[0].evidence.exception
    assert (result.status, result.restarts, result.checkpoints.validated) == ("completed", 0, 1)
    assert result.memory.plan_changes == ()
    assert digests(result) == digests(clean)


def test_a_last_checkpoint_that_could_not_be_written_is_done_again(drive: Drive, nano: Nano, tmp_path: Path, clean: RunResult) -> None:
    """Nothing comes after the last segment that could be saved in its stead: it is done again, and the run ends with a checkpoint."""
    whole = {**TRAINING, "segment_steps": TRAINING["max_steps"]}
    result = drive(nano("last", training=whole), options=with_port(partial(fail_one_save, marker=tmp_path / "failed")))
    assert (result.status, result.applied_steps, result.checkpoints.validated) == ("completed", TRAINING["max_steps"], 1)
    newest = max((tmp_path / "last" / "checkpoints").glob("step-*"))
    assert int(newest.name.removeprefix("step-")) == TRAINING["max_steps"]
    assert digests(result) == digests(clean)


def test_a_load_out_of_memory_is_tried_again_under_the_same_plan(drive: Drive, nano: Nano, tmp_path: Path, clean: RunResult) -> None:
    """A smaller micro-batch does not make a checkpoint smaller: the load is tried again, named as what it is, and nothing shrinks."""
    port = FailingLoad(tmp_path, times=1, kill_at_batch=15)
    result = drive(nano("load", training=TRAINING), options=with_port(port))
    failures = [event.outcome for event in events(result, SegmentEnded) if isinstance(event.outcome, OutOfMemory)]
    assert [(failure.memory, failure.evidence.phase) for failure in failures] == [("host", "restore")]
    assert [fault.kind for fault in result.faults] == ["worker_lost", "out_of_memory"]
    assert (result.ooms_fatal, result.memory.plan_changes) == (0, ())
    assert digests(result) == digests(clean)


def test_a_load_that_never_fits_ends_the_run_and_says_what_would_fit(drive: Drive, nano: Nano, tmp_path: Path) -> None:
    """Bounded: exit 78 and not an endless row of restarts."""
    port = FailingLoad(tmp_path, times=99, kill_at_batch=15)
    with pytest.raises(MemoryExhausted, match="in restore") as error:
        drive(nano("stuck", training=TRAINING), options=with_port(port))
    assert len(list(tmp_path.glob("load-*"))) <= 3
    assert "What would fit: data.sequence_length: 64" in str(error.value)


def test_an_evaluation_that_does_not_fit_is_done_in_smaller_passes(drive: Drive, nano: Nano, tmp_path: Path, clean: RunResult) -> None:
    """The validation loss is the same up to rounding, training's plan stays, nothing is restarted."""
    port = partial(fail_evaluation, rows_that_fit=2, folder=tmp_path)
    result = drive(nano("evaluate", training=TRAINING), options=with_port(port))
    assert fired(tmp_path, "failures") > 0
    assert clean.validation_loss is not None
    assert result.validation_loss == pytest.approx(clean.validation_loss, rel=1e-6)
    assert (result.restarts, result.ooms_fatal, result.memory.plan_changes) == (0, 0, ())
    assert digests(result) == digests(clean)


@pytest.mark.parametrize("times", [1, 2])
def test_a_device_whose_memory_is_in_pieces(times: int, drive: Drive, nano: Nano, tmp_path: Path, clean: RunResult) -> None:
    """First a fresh process with another allocator and the same micro-batch, so the same bits; if that fails too, a smaller one."""
    port = partial(fail_in_pieces, batch_index=13, times=times, folder=tmp_path)
    result = drive(nano("pieces", training=TRAINING), options=with_port(port))
    assert fired(tmp_path, "in-pieces") == times
    assert (result.status, result.restarts, result.ooms_fatal) == ("completed", 1, 0)
    assert sum("expandable_segments:True" in event.text for event in events(result, Noted)) == 1
    assert len(result.memory.plan_changes) == times - 1
    assert times == 2 or digests(result) == digests(clean)


@pytest.mark.slow
def test_a_leak_replaces_the_worker_at_a_boundary(drive: Drive, nano: Nano, tmp_path: Path) -> None:
    """Real memory kept step by step under a real limit: found before any allocation fails, ended by a fresh worker, evidence kept."""
    training = {"max_steps": 200, "segment_steps": 25, "global_batch_size": 8, "warmup_steps": 2}
    port = partial(leak, bytes_per_step=MIB, headroom_bytes=260 * MIB, marker=tmp_path / "leaked")
    result = drive(nano("leak", training=training), options=with_port(port))
    notes = [event.text for event in events(result, Noted)]
    (found,) = [note for note in notes if "memory grows from step to step" in note and "VmHWM" in note]
    assert "python objects" in found
    assert sum("the workers are replaced before the next segment" in note for note in notes) == 1
    assert (result.status, result.ooms_absorbed, result.ooms_fatal, result.restarts) == ("completed", 0, 0, 0)
    assert result.memory.plan_changes == ()
