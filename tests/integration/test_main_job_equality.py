"""The same request gives the same weights: twice, in segments of any length, at every ZeRO stage; another seed gives others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mem_core.core.run.record import record_of
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.runtime.ranks.local.processes import ForkServer

pytestmark = pytest.mark.integration
Nano = Callable[..., RuntimeRequest]
Drive = Callable[..., RunResult]
# (steps, segment lengths): whole, a divisor, and one that leaves a remainder. The full size is the slow one.
SHORT = (48, (48, 16, 7))
FULL = (300, (300, 100, 37))


def digests(result: RunResult) -> tuple[str, str]:
    assert result.status == "completed"
    assert len(result.weights_digest) == len(result.trajectory_digest) == 64
    return result.weights_digest, result.trajectory_digest


def training(steps: int, segment_steps: int, **more: Any) -> dict[str, Any]:
    return {"max_steps": steps, "segment_steps": segment_steps, "warmup_steps": 10, "learning_rate": 1e-3, **more}


def weights_of(server: ForkServer, checkpoint: Path, log: Path) -> dict[str, np.ndarray]:
    """The whole model of a checkpoint in float32, read in a forked child."""
    server.log_into(log)
    child = server.fork("stage_weights:fp32_weights", "weights.log")
    child.connection.send(str(checkpoint))
    weights = child.connection.recv()
    child.close()
    return weights


def furthest(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> float:
    """Largest relative distance of a tensor, norm-wise."""
    assert first.keys() == second.keys()
    return max(float(np.linalg.norm(first[name] - second[name]) / np.linalg.norm(second[name])) for name in first)


def check_stages(drive: Drive, nano: Nano, server: ForkServer, root: Path, steps: int, segments: tuple[int, ...]) -> None:
    final = {}
    for stage in range(4):
        found = set()
        for segment_steps in segments:
            request = nano(f"stage-{stage}-{segment_steps}", training=training(steps, segment_steps), parallel={"zero_stage": stage})
            result = drive(request)
            assert result.applied_steps == steps
            assert result.checkpoints.validated == -(-steps // segment_steps)
            found.add(digests(result))
        assert len(found) == 1, f"stage {stage}: other bits with other segments"
        final[stage] = weights_of(server, root / f"stage-{stage}-{segments[0]}" / "checkpoints" / f"step-{steps:09d}", root)
    assert max(furthest(final[stage], final[0]) for stage in (1, 2, 3)) < 1e-5
    assert any(np.any(final[3][name] != final[0][name]) for name in final[0]), "the stages were read from different files"


def test_every_stage_gives_the_same_bits_however_it_is_cut(drive: Drive, nano: Nano, fork_server: ForkServer, tmp_path: Path) -> None:
    check_stages(drive, nano, fork_server, tmp_path, *SHORT)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_stage_gives_the_same_bits_over_300_steps(drive: Drive, nano: Nano, fork_server: ForkServer, tmp_path: Path) -> None:
    check_stages(drive, nano, fork_server, tmp_path, *FULL)


def test_another_seed_gives_other_weights_and_another_trajectory(drive: Drive, nano: Nano) -> None:
    runs = [drive(nano(f"seed-{seed}", training=training(10, 10, seed=seed))) for seed in (0, 1, 2)]
    weights, trajectories = zip(*map(digests, runs), strict=True)
    assert len(set(weights)) == len(set(trajectories)) == 3


def test_a_name_and_what_is_kept_do_not_change_the_weights(drive: Drive, nano: Nano) -> None:
    """Nothing but what decides the weights enters them."""
    first = drive(nano("a", training=training(20, 10)))
    second = drive(nano("b", training=training(20, 10), checkpoint={"keep_last": 1, "keep_every_steps": 10}))
    assert digests(first) == digests(second)


def test_more_steps_go_on_from_where_a_finished_run_stands(drive: Drive, nano: Nano) -> None:
    """10 steps, then 20 asked of the same run, are the 20 steps of a run with the same horizon."""
    short = drive(nano("longer", training=training(10, 10, schedule_steps=20)))
    longer = drive(nano("longer", training=training(20, 10)))
    whole = drive(nano("whole", training=training(20, 20)))
    assert short.applied_steps == 10
    assert digests(longer) == digests(whole)
    training_now = record_of(Path(longer.run_folder)).request.training
    assert (training_now.max_steps, training_now.schedule_steps) == (20, 20), "the record says how far the run goes now"
