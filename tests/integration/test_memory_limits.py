"""Real limits: RLIMIT_AS and a control group around the ranks, a user's budget, and SIGKILL. One long document among short ones."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from control_groups import control_group

from mem_core.core.run.state_manager import read_journal
from mem_core.domain.errors import MemError, MemoryExhausted
from mem_core.domain.events import Noted
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.runtime.session.opening.stages import Prepared
from mem_core.testing.memory_faults import kill_rank, limit_address_space, limit_cgroup
from mem_core.testing.ports import distance, recorded, replaying, with_port

pytestmark = pytest.mark.integration
Drive = Callable[..., RunResult]
STEPS, LENGTH = 16, 1_024
MIB = 2**20
SNAPSHOT_HEADROOM = 600 * MIB


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short rows and one of thirty times their length, met once."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    short = [{"text": f"row {number} " * 4} for number in range(8 * STEPS)]
    short[50] = {"text": "a long document " * 62}
    path.write_text("".join(json.dumps(row) + "\n" for row in short))
    return path


def request_of(store: Path, run_id: str, documents: Path, **memory: Any) -> RuntimeRequest:
    """Sixteen steps of llama-tiny in two segments; eight rows in one pass unless memory says otherwise."""
    return RuntimeRequest.model_validate(
        {
            "run_id": run_id, "store": str(store), "device": "cpu", "model": {"source": "preset:llama-tiny"},
            "data": {"train": [str(documents)], "validation": None, "sequence_length": LENGTH, "packing": False},
            "training": {"max_steps": STEPS, "segment_steps": STEPS // 2, "global_batch_size": 8, "warmup_steps": 2},
            "memory": memory,
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def unlimited(fork_server: Any, documents: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """The same run with all the memory it wants."""
    from mem_core.testing.driver import drive

    return drive(request_of(tmp_path_factory.mktemp("free"), "free", documents), server=fork_server)


def assert_survived(result: RunResult, unlimited: RunResult, drive: Drive, request: RuntimeRequest) -> None:
    """The promise under a limit: done, nothing fatal, the same samples, near weights, and the bits of a twin that replays the splits."""
    assert (result.status, result.applied_steps, result.ooms_fatal) == ("completed", STEPS, 0)
    assert result.tokens == unlimited.tokens
    assert result.memory.plan_changes
    assert distance(result, unlimited) <= 1e-5
    twin = drive(request.model_copy(update={"run_id": f"{request.run_id}-twin"}), options=replaying(recorded(result)))
    assert (twin.weights_digest, twin.trajectory_digest) == (result.weights_digest, result.trajectory_digest)


def test_a_long_document_under_rlimit_as(drive: Drive, documents: Path, tmp_path: Path, unlimited: RunResult) -> None:
    """Address space that eight long rows do not fit in: met before any allocation fails, and the result is the same."""
    request = request_of(tmp_path, "rlimit", documents)
    result = drive(request, options=with_port(partial(limit_address_space, headroom_bytes=230 * MIB)))
    assert result.ooms_absorbed == 0
    assert "RLIMIT_AS" in result.memory.plan_changes[0]["reason"]
    assert_survived(result, unlimited, drive, request)


def test_the_same_limit_ends_a_fixed_run(drive: Drive, documents: Path, tmp_path: Path) -> None:
    """The limit bites: without adaptation the same run dies of the long document, once, with exit 78."""
    request = request_of(tmp_path, "fixed", documents, mode="fixed")
    with pytest.raises(MemoryExhausted, match="mode is fixed"):
        drive(request, options=with_port(partial(limit_address_space, headroom_bytes=230 * MIB)))
    journal = read_journal(tmp_path / "fixed" / "journal")
    assert [line.event.event for line in journal].count("segment_started") <= 2


def test_calibration_leaves_no_trace(drive: Drive, documents: Path, tmp_path: Path, unlimited: RunResult) -> None:
    """A budget that is near enough to measure and wide enough to change nothing: the same digests to the bit."""
    result = drive(request_of(tmp_path, "measured", documents, budget="1.45GiB"))
    notes = [line.event.text for line in read_journal(Path(result.run_folder) / "journal") if isinstance(line.event, Noted)]
    assert any("memory calibrated (measured in" in note for note in notes)
    assert result.memory.plan_changes == ()
    assert (result.weights_digest, result.trajectory_digest) == (unlimited.weights_digest, unlimited.trajectory_digest)


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A control group of our own; skipped where the machine does not let us make one."""
    with control_group(f"mem-test-{request.node.name[:40]}") as folder:
        yield folder


def test_a_long_document_in_a_control_group(drive: Drive, documents: Path, tmp_path: Path, unlimited: RunResult, group: Path) -> None:
    """Resident memory under a limit of a group that the rank was moved into: met before the kernel kills anything."""
    request = request_of(tmp_path, "group", documents)
    result = drive(request, options=with_port(partial(limit_cgroup, folder=group, headroom_bytes=230 * MIB)))
    assert (result.restarts, result.ooms_absorbed) == (0, 0)
    assert "cgroup" in result.memory.plan_changes[0]["reason"]
    assert_survived(result, unlimited, drive, request)


def test_a_kill_near_the_limit_is_named_and_retried_with_less(drive: Drive, documents: Path, tmp_path: Path) -> None:
    """SIGKILL with the peak near the budget: named as probable host memory with peak and limit, retried under a smaller plan."""
    request = request_of(tmp_path, "killed", documents)

    def change(prepared: Prepared) -> None:
        ranks = prepared.session.segments.ranks
        ranks.setup = replace(ranks.setup, memory_limit_bytes=300 * MIB)  # less than any rank uses: the peak is "near" it

    result = drive(request, options=with_port(partial(kill_rank, batch_index=11, marker=tmp_path / "killed-once")), prepared=change)
    assert (result.status, result.restarts, result.ooms_absorbed, result.ooms_fatal) == ("completed", 1, 1, 0)
    assert "probably for host memory; peak" in result.faults[0].detail
    assert result.memory.plan_changes[0]["batch_index"] == 11
    assert result.memory.plan_changes[0]["plan"]["micro_batch_tokens"] > 0


def test_a_kill_without_memory_evidence_shrinks_nothing(drive: Drive, documents: Path, tmp_path: Path, unlimited: RunResult) -> None:
    """Somebody's kill -9 is a lost worker: same plan, same bits."""
    request = request_of(tmp_path, "lost", documents)
    result = drive(request, options=with_port(partial(kill_rank, batch_index=11, marker=tmp_path / "killed-once")))
    assert result.faults[0].kind == "worker_lost"
    assert result.memory.plan_changes == ()
    assert result.weights_digest == unlimited.weights_digest


@pytest.mark.slow
def test_kills_by_the_kernel_are_bounded(drive: Drive, documents: Path, tmp_path: Path, group: Path) -> None:
    """A group too small for any pass: the kernel kills every try; each is named, the ladder is walked once, and the run ends."""
    request = request_of(tmp_path, "hopeless", documents)
    with pytest.raises(MemError) as error:
        drive(request, options=with_port(partial(limit_cgroup, folder=group, headroom_bytes=8 * MIB)))
    assert error.value.exit_code in (78, 79)
    assert "OOM killer" in str(error.value)


def small_model(store: Path, run_id: str) -> RuntimeRequest:
    """Two short segments of llama-small, whose state is 395 MiB; a step alone needs 440 MiB, one beside a forked writer 770 MiB."""
    return RuntimeRequest.model_validate(
        {
            "run_id": run_id, "store": str(store), "device": "cpu", "model": {"source": "preset:llama-small"},
            "data": {"sequence_length": 32}, "checkpoint": {"keep_last": 1},
            "training": {"max_steps": 4, "segment_steps": 2, "global_batch_size": 2, "warmup_steps": 2},
        }
    )  # fmt: skip


def limit_group_for_snapshots(runner: Any, folder: Path, headroom_bytes: int, marker: Path) -> None:
    """Join the group; `marker` grows by a byte with each save in the foreground."""
    from mem_core.runtime.deepspeed.snapshot import Snapshot

    limit_cgroup(runner, folder, headroom_bytes)
    write = Snapshot.write_foreground

    def noted_write(snapshot: Snapshot) -> None:
        with marker.open("ab") as file:
            file.write(b".")
        write(snapshot)

    Snapshot.write_foreground = noted_write  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_snapshot_that_the_group_has_no_room_for(drive: Drive, tmp_path: Path, group: Path) -> None:
    """Pages that training writes while a forked writer holds them are charged twice: so training waits for the save."""
    port = partial(limit_group_for_snapshots, folder=group, headroom_bytes=SNAPSHOT_HEADROOM, marker=tmp_path / "saves")
    result = drive(small_model(tmp_path, "snapshot"), options=with_port(port))
    assert (tmp_path / "saves").stat().st_size == 2
    assert (result.status, result.restarts, result.ooms_absorbed, result.ooms_fatal) == ("completed", 0, 0, 0)
    assert result.checkpoints.validated == 2
    assert (group / "memory.oom_control").read_text().split()[-1] == "0"
