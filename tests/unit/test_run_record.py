"""run.json and its sealed copy: damage to either is mended, damage to both ends the run, and a lost record never gives birth again."""

from pathlib import Path

import pytest

from mem_core.core.run.record import RECORD_NAME, SEAL_NAME, RunRecord, read_record
from mem_core.core.run.state_manager import StateManager
from mem_core.domain.environment import EnvironmentReport, Finding, MemoryBudget
from mem_core.domain.errors import NoValidCheckpoint
from mem_core.domain.events import Noted, SegmentStarted
from mem_core.domain.plan import MemoryPlan
from mem_core.domain.request import RuntimeRequest
from mem_core.runtime.session.opening.already_there import Resuming, problems_of_run


def born(root: Path) -> RunRecord:
    """A run that was born in `root`/run and rests."""
    request = RuntimeRequest.model_validate({"run_id": "run", "store": str(root)})
    record = RunRecord(
        run_id="run", request=request, device="cpu", dtype="float32", default_plan=MemoryPlan(micro_batch_rows=1), threads_per_rank=2,
        data_fingerprint="d", model_fingerprint="m",
    )  # fmt: skip
    state = StateManager.acquire(root, "run")
    state.write_record(record)
    state.emit(SegmentStarted(segment_index=0, from_step=0, until_step=10, try_number=1))
    state.release()
    return record


def mended(root: Path) -> tuple[RunRecord | None, list[str]]:
    """What a next attempt believes, and what it says about the record."""
    state = StateManager.acquire(root, "run")
    try:
        state.mend_record()
        return state.record(), [line.event.text for line in state.lines() if isinstance(line.event, Noted)]
    finally:
        state.release()


@pytest.mark.parametrize("name", [RECORD_NAME, SEAL_NAME])
@pytest.mark.parametrize("damage", ["cut", "bent", "lost", "zeros"])
def test_one_damaged_copy_is_written_again_from_the_other(tmp_path: Path, name: str, damage: str) -> None:
    """`bent` is a value that still reads well, as a flipped bit leaves it: one thread more would change the bits of every step."""
    record, path = born(tmp_path), tmp_path / "run" / name
    whole = path.read_bytes()
    if damage == "lost":
        path.unlink()
    else:
        quote = '\\"' if name == SEAL_NAME else '"'
        bent = whole.replace(f"threads_per_rank{quote}: 2".encode(), f"threads_per_rank{quote}: 3".encode())
        assert bent != whole
        path.write_bytes({"cut": whole[: len(whole) // 2], "bent": bent, "zeros": bytes(len(whole))}[damage])
    assert read_record(tmp_path / "run") == record
    believed, notes = mended(tmp_path)
    assert believed == record
    assert path.read_bytes() == whole
    assert len(notes) == (0 if (name, damage) == (SEAL_NAME, "lost") else 1)  # a run of an older version has no seal


def test_a_record_that_is_damaged_twice_ends_the_run(tmp_path: Path) -> None:
    """Exit 74 with the way out, not a traceback."""
    born(tmp_path)
    for name in (RECORD_NAME, SEAL_NAME):
        (tmp_path / "run" / name).write_bytes(b"{")
    with pytest.raises(NoValidCheckpoint, match="is damaged"):
        mended(tmp_path)


def test_a_run_that_trained_is_not_born_again_with_other_values(tmp_path: Path) -> None:
    """Without a record nothing says which seed its checkpoints came from."""
    born(tmp_path)
    for name in (RECORD_NAME, SEAL_NAME):
        (tmp_path / "run" / name).unlink()
    with pytest.raises(NoValidCheckpoint, match="has trained already"):
        mended(tmp_path)


def test_a_run_that_died_before_its_birth_starts_as_new(tmp_path: Path) -> None:
    StateManager.acquire(tmp_path, "run").release()
    assert mended(tmp_path) == (None, [])


def test_a_run_that_is_held_is_said_to_be_held_before_its_values_are_judged(tmp_path: Path) -> None:
    """For training the holder comes first; the doctor must not tell somebody who has to wait something else instead."""
    record = born(tmp_path)
    training = record.request.training.model_copy(update={"seed": 7})
    other = record.request.model_copy(update={"training": training})
    budget = MemoryBudget(kind="host", budget_bytes=2**30, binding_limit="cgroup", limits_bytes={"cgroup": 2**30})
    facts = {
        "device": "cpu",
        "device_reason": "auto",
        "dtype": "float32",
        "num_cores": 2,
        "threads_per_rank": 2,
        "versions": {},
        "memory": (budget,),
    }
    free = EnvironmentReport.model_validate({**facts, "findings": ()})
    (refused,) = problems_of_run(tmp_path / "run", other, free, Resuming())
    assert refused.field == "training.seed"
    holder = Finding(check="holder", severity="failure", observed="process 5 holds run run", exit_code=76)
    assert problems_of_run(tmp_path / "run", other, free.model_copy(update={"findings": (holder,)}), Resuming()) == ()
