"""How many checkpoints `checkpoint.keep_every_steps` adds up, and what the doctor says of them."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.commands.drill import small_disk_bytes
from mem_core.core.doctor.environment_doctor import EnvironmentDoctor, error_of
from mem_core.core.doctor.keeping import num_kept_for_ever
from mem_core.core.recovery.actions import Evaluate, Progress, Train
from mem_core.core.recovery.mem_orchestrator import MemOrchestrator
from mem_core.domain.environment import (
    AcceleratorObservation,
    BuildObservation,
    EnvironmentReport,
    Finding,
    FolderObservation,
    MachineObservations,
    ModelNumbers,
    SavedRun,
    StoreObservation,
)
from mem_core.domain.request import RuntimeRequest

GIB = 2**30
BIG = ModelNumbers(num_parameters=135_000_000, num_layers=1, hidden_size=64, vocab_size=384, num_heads=4, max_positions=2048)


def asked(max_steps: int, segment_steps: int, every_steps: int | None, evaluated: int | None = None, **training: Any) -> RuntimeRequest:
    length = {"max_steps": max_steps, "segment_steps": segment_steps} | training
    evaluation = {} if evaluated is None else {"every_steps": evaluated}
    checkpoint = {"keep_every_steps": every_steps}
    return RuntimeRequest.model_validate({"run_id": "demo", "training": length, "checkpoint": checkpoint, "evaluation": evaluation})


def ends_of(request: RuntimeRequest) -> list[int]:
    """The steps at which an undisturbed run ends a segment, as the orchestrator says them."""
    orchestrator, step, ends, evaluated = MemOrchestrator.of(request), 0, list[int](), False
    while step < request.training.max_steps:
        action = orchestrator.next_action(Progress(applied_steps=step, validated_step=None, is_evaluated=evaluated), None)
        if isinstance(action, Evaluate):
            evaluated = True
            continue
        assert isinstance(action, Train)
        step, evaluated = action.until_step, False
        ends.append(step)
    return ends


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 20), st.one_of(st.none(), st.integers(1, 20)), st.integers(0, 70))
def test_the_count_is_that_of_the_segments_that_really_end_there(
    max_steps: int, segment_steps: int, every_steps: int, evaluated: int | None, after_step: int
) -> None:
    request = asked(max_steps, segment_steps, every_steps, evaluated)
    kept = [step for step in ends_of(request) if step % every_steps == 0 and step > after_step]
    assert num_kept_for_ever(request, after_step) == len(kept)


def test_nothing_is_added_where_nothing_asks_for_it_or_the_length_is_not_known() -> None:
    assert num_kept_for_ever(asked(100, 10, None)) == 0
    assert num_kept_for_ever(asked(1_000_000, 10, 10, epochs=2.0)) == 0


def examine(request: RuntimeRequest, free_gib: int, saved_step: int | None = None) -> EnvironmentReport:
    """On a machine whose disk has so much room. A checkpoint of the model takes 2 GiB."""
    seen = MachineObservations(
        num_cores=2,
        versions={"torch": "2.13.0", "deepspeed": "0.19.8"},
        accelerator=AcceleratorObservation(available=False, reason="not asked for"),
        host_limits={"MemAvailable": 64 * GIB},
        store=StoreObservation(location="/runs"),
        store_folder=FolderObservation(path="/runs", total_bytes=1_000 * GIB, free_bytes=free_gib * GIB, free_inodes=10**6),
        build=BuildObservation(folder="/ext", compiler="g++ 12", ninja="1.13"),
        saved=None if saved_step is None else SavedRun(num_ranks=1, zero_stage=1, step=saved_step, checkpoint_bytes=GIB),
    )
    return EnvironmentDoctor().examine(request, seen, BIG)


def found(report: EnvironmentReport, check: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.check == check]


def test_the_disk_must_hold_what_stays_for_ever_as_well() -> None:
    """1,000 steps in segments of 10: ten multiples of 100 beside the last three and two on their way."""
    request = asked(1_000, 10, 100)
    (disk,) = found(examine(request, free_gib=100), "disk")
    assert disk.severity == "ok"
    assert "15 checkpoints of 2.0 GiB, 10 of them (20.1 GiB) by checkpoint.keep_every_steps over the run" in disk.needed
    tight = examine(request, free_gib=20)
    assert getattr(error_of(tight), "exit_code", 0) == 73
    assert "raise checkpoint.keep_every_steps" in found(tight, "disk")[0].remedy
    (plain,) = found(examine(asked(1_000, 10, None), free_gib=20), "disk")
    assert (plain.severity, plain.needed) == ("ok", "10.1 GiB: 5 checkpoints of 2.0 GiB")


def test_a_run_that_goes_on_is_warned_and_not_stopped() -> None:
    """What is still to come is named; somebody may take older ones elsewhere meanwhile."""
    request = asked(1_000, 10, 100)
    (disk,) = found(examine(request, free_gib=10, saved_step=700), "disk")
    assert (disk.severity, disk.exit_code) == ("warning", 0)
    assert "5 checkpoints" in disk.needed
    assert "3 of them" in disk.needed
    assert found(examine(request, free_gib=3, saved_step=700), "disk")[0].severity == "failure"


def test_epochs_leave_the_number_open_and_it_is_said() -> None:
    (disk,) = found(examine(asked(1_000_000, 10, 100, epochs=2.0), free_gib=100), "disk")
    assert "5 checkpoints" in disk.needed
    assert "how many follows from the data" in disk.needed


@pytest.mark.parametrize(
    ("segment_steps", "every_steps", "evaluated", "met"), [(300, 1_000, None, 3_000), (300, 1_000, 400, 2_000), (1_000, 300, None, 3_000)]
)
def test_multiples_at_which_no_segment_ends_are_a_notice(segment_steps: int, every_steps: int, evaluated: int | None, met: int) -> None:
    (notice,) = found(examine(asked(9_000, segment_steps, every_steps, evaluated), free_gib=900), "checkpoint.keep_every_steps")
    assert notice.severity == "notice"
    assert f"only those of {met} have" in notice.observed


@pytest.mark.parametrize(("segment_steps", "every_steps", "evaluated"), [(100, 1_000, None), (300, 1_000, 500), (100, None, None)])
def test_multiples_that_are_met_need_no_word(segment_steps: int, every_steps: int | None, evaluated: int | None) -> None:
    assert found(examine(asked(9_000, segment_steps, every_steps, evaluated), free_gib=900), "checkpoint.keep_every_steps") == []


def test_a_drill_s_own_disk_has_room_for_them() -> None:
    one = 2**20
    more = small_disk_bytes(asked(1_000, 10, 100), one)
    fewer = small_disk_bytes(asked(1_000, 10, None), one)
    assert more is not None
    assert fewer is not None
    assert more - fewer == 2 * 10 * one
