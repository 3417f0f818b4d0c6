"""Replay verdicts in real runs: fresh processes redo the recorded steps, and a damaged optimizer does not pass."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mem_core.core.run.state_manager import read_journal
from mem_core.domain.checkpoint import CheckpointManifest
from mem_core.domain.events import CheckpointJudged
from mem_core.domain.plan import Hyperparams
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.runtime.proof.replay_service import ReplayService, batch_after, compare
from mem_core.runtime.ranks.worker.protocol import ReplayEvidence
from mem_core.runtime.session.run_session import RunSession

TRAINING = {"max_steps": 30, "segment_steps": 10, "global_batch_size": 4, "warmup_steps": 5}


def record(losses: tuple[float, ...], norms: tuple[float | None, ...] = (1.0, 1.0)) -> ReplayEvidence:
    """Two steps after step 10."""
    return ReplayEvidence(10, Hyperparams(), losses, norms)


def test_comparison_names_step_and_values() -> None:
    """One bit counts on a CPU; a stated tolerance holds on CUDA; without a record only finiteness counts."""
    near = 2.0 + 2**-50
    assert compare(record((3.0, 2.0)), record((3.0, 2.0)), exact=True) == ()
    assert compare(record((3.0, 2.0)), record((3.0, near)), exact=True) == (f"loss of step 12 is {near!r}, recorded 2.0",)
    assert compare(record((3.0, 2.0)), record((3.0, near)), exact=False) == ()
    assert compare(record((3.0, 2.0)), record((3.0, 2.5)), exact=False) != ()
    assert compare(record((3.0,)), record((3.0, 2.0)), exact=True) != ()
    assert compare(None, record((3.0, float("nan"))), exact=True) == ("loss nan is not finite",)


def test_batches_that_are_left_out_do_not_count() -> None:
    """Two steps from batch 10 on end before batch 12, or later by as many as are left out on the way."""
    assert batch_after(10, 2, ()) == 12
    assert batch_after(10, 2, (10, 3, 12)) == 14
    assert batch_after(10, 2, (10, 11)) == 14


@pytest.mark.integration
@pytest.mark.parametrize(("zero_stage", "num_ranks"), [(1, 1), (2, 2)])
def test_every_checkpoint_of_a_run_is_replayed(
    zero_stage: int, num_ranks: int, nano: Callable[..., RuntimeRequest], drive: Callable[..., RunResult], tmp_path: Path
) -> None:
    """Each verdict is of level replay, the last one included, and replaying leaves no trace in the run."""
    parallel = {"zero_stage": zero_stage, "num_ranks": num_ranks}
    replayed = drive(nano("replayed", training=TRAINING, parallel=parallel, checkpoint={"validation": "replay"}))
    plain = drive(nano("plain", training=TRAINING, parallel=parallel))
    assert (replayed.weights_digest, replayed.trajectory_digest) == (plain.weights_digest, plain.trajectory_digest)
    events = [line.event for line in read_journal(tmp_path / "replayed" / "journal")]
    verdicts = [event.verdict for event in events if isinstance(event, CheckpointJudged)]
    assert [(verdict.step, verdict.level, verdict.valid) for verdict in verdicts] == [(step, "replay", True) for step in (10, 20, 30)]


@pytest.mark.integration
def test_another_state_does_not_pass(nano: Callable[..., RuntimeRequest], drive: Callable[..., RunResult]) -> None:
    """The recorded steps belong to one state: those of step 20 are not what step 10 comes to."""
    sessions: list[RunSession] = []
    drive(nano("run", training=TRAINING), before_segment=lambda session, segment: sessions.append(session), prepared=_check_while_open)
    assert len(sessions) == 3


def _check_while_open(prepared) -> None:  # type: ignore[no-untyped-def]
    """Wrap `finish`: while the fork server is there, replay step 10 against what follows step 20."""
    session = prepared.session
    finish = session.finish

    def checked() -> None:
        manager = session.checkpoints.manager
        manifest: CheckpointManifest = manager.newest_valid()
        assert manifest.step == 30
        setup = session.segments.ranks.setup
        good = ReplayService(setup.ranks, setup.spec, lambda step, deadline_s: None)
        assert good(manager.path_of(10), _manifest(manager.path_of(10))) == ()
        recorded = record((1.0, 1.0), (0.5, 0.5))
        bad = ReplayService(setup.ranks, setup.spec, lambda step, deadline_s: recorded)
        reasons = bad(manager.path_of(10), _manifest(manager.path_of(10)))
        assert len(reasons) == 4
        assert "loss of step 11" in reasons[0]
        finish()

    session.finish = checked


def _manifest(folder: Path) -> CheckpointManifest:
    return CheckpointManifest.model_validate_json((folder / "manifest.json").read_bytes())
