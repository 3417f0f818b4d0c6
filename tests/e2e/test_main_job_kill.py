"""`kill -9` of the whole job at any moment, the same command again: it completes with the weights of a run left in peace."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from process_tree import BackgroundMem, events, num_attempts, survivors, validated_step

from mem_core.core.run.lease import read_lease
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult

pytestmark = [pytest.mark.integration, pytest.mark.timeout(2400)]
STEPS, SEGMENT_STEPS = 300, 30
TRAINING = {"max_steps": STEPS, "segment_steps": SEGMENT_STEPS, "warmup_steps": 10, "learning_rate": 1e-3}
REQUEST = f"""
run_id: killed
store: .
device: cpu
training: {{max_steps: {STEPS}, segment_steps: {SEGMENT_STEPS}, warmup_steps: 10, learning_rate: 1.0e-3}}
"""


@dataclass(frozen=True)
class Moment:
    """When to kill: `come(run folder, number of this attempt)`. After the first validated checkpoint, before the end."""

    name: str
    come: Callable[[Path, int], bool]
    whole_tree: bool


def in_a_segment_after(step: int, pause_s: float = 0.0) -> Callable[[Path, int], bool]:
    """A segment that starts at `step` or later has begun, and one checkpoint is validated."""

    def come(folder: Path, attempt: int) -> bool:
        begun = any(e["event"] == "segment_started" and e["from_step"] >= step for e in events(folder, attempt))
        if begun and validated_step(folder) > 0:
            time.sleep(pause_s)
            return True
        return False

    return come


def while_a_checkpoint_is_written(folder: Path, attempt: int) -> bool:
    """The snapshot's files are growing in the staging folder of this attempt."""
    return validated_step(folder) > 0 and any((folder / "staging").glob(f"attempt-{attempt}/**/*.pt"))


def while_it_is_resuming(folder: Path, attempt: int) -> bool:
    """This attempt holds the run and has not begun a segment yet."""
    names = {e["event"] for e in events(folder, attempt)}
    return validated_step(folder) > 0 and "doctor_reported" in names and "segment_started" not in names


def check_killed(folder: Path, command: BackgroundMem, whole_tree: bool) -> int:
    """Kill; nothing survives, and the lease of the dead holder stops nobody although its time is not over. Returns the resume step."""
    family = command.kill(whole_tree)
    assert len(family) >= 2, "the fork server and the Prefect server were running"
    assert survivors(family, folder) == []
    lease = read_lease(folder)
    assert lease is not None
    assert lease.expires_unix_s > time.time() - 5, "killed while the lease was fresh"
    assert not lease.holder_alive(time.time()), "the next start would wait for a dead holder"
    return validated_step(folder)


def check_resumed(folder: Path, attempt: int, resume_step: int) -> None:
    """The attempt went on from the last validated checkpoint, never from step 0."""
    started = [e["from_step"] for e in events(folder, attempt) if e["event"] == "segment_started"]
    assert started, f"attempt {attempt} trained nothing"
    assert resume_step > 0
    assert min(started) >= resume_step


def run_with_kills(tmp_path: Path, moments: list[Moment]) -> dict[str, Any]:
    """Start, kill at each moment in turn, always with the same command; returns the result of the last start, which completes."""
    (tmp_path / "request.yaml").write_text(REQUEST)
    folder = tmp_path / "killed"
    resume_steps: dict[int, int] = {}
    for attempt, moment in enumerate(moments, start=1):
        command = BackgroundMem(tmp_path, "train", "request.yaml", "--json")
        command.wait_for(lambda attempt=attempt, moment=moment: num_attempts(folder) == attempt and moment.come(folder, attempt))
        resume_steps[attempt + 1] = check_killed(folder, command, moment.whole_tree)
        assert resume_steps[attempt + 1] < STEPS, f"{moment.name} came after the end"
    last = BackgroundMem(tmp_path, "train", "request.yaml", "--json")
    family_at_work: list[Any] = []
    last.wait_for(lambda: bool(family_at_work.extend(last.descendants()) or len(family_at_work) >= 2), poll_s=0.2)
    result = last.finish()
    assert survivors(family_at_work, folder) == [], "a completed run leaves nothing behind either"
    for attempt, step in resume_steps.items():
        if any(e["event"] == "segment_started" for e in events(folder, attempt)) or attempt == len(moments) + 1:
            check_resumed(folder, attempt, step)
    assert [fault["kind"] for fault in result["faults"]] == ["run_killed"] * len(moments)
    assert [fault["step"] for fault in result["faults"]] == list(resume_steps.values()), "each kill is told with where it went on"
    return result


def check_same(result: dict[str, Any], undisturbed: RunResult) -> None:
    assert result["status"] == "completed"
    assert result["applied_steps"] == STEPS
    assert result["weights_digest"] == undisturbed.weights_digest
    assert result["trajectory_digest"] == undisturbed.trajectory_digest


def test_a_run_killed_three_times_ends_with_the_same_weights(
    tmp_path: Path, drive: Callable[..., RunResult], nano: Callable[..., RuntimeRequest]
) -> None:
    """In the middle of a segment, while a checkpoint is written, and while a resume is under way."""
    moments = [
        Moment("in a segment", in_a_segment_after(2 * SEGMENT_STEPS), whole_tree=False),
        Moment("resuming", while_it_is_resuming, whole_tree=True),
        Moment("writing", while_a_checkpoint_is_written, whole_tree=False),
    ]
    result = run_with_kills(tmp_path, moments)
    check_same(result, drive(nano("undisturbed", training=TRAINING)))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ten_moments_each_with_the_same_command_again(
    tmp_path: Path, drive: Callable[..., RunResult], nano: Callable[..., RuntimeRequest]
) -> None:
    """Ten runs, each killed once: at seven places of a segment, while writing, twice with the whole tree at once."""
    undisturbed = drive(nano("undisturbed", training=TRAINING))
    places = [in_a_segment_after(30 * index, pause_s=0.037 * index) for index in range(1, 9)]
    moments = [Moment(f"segment {index + 1}", place, whole_tree=index % 2 == 0) for index, place in enumerate(places)]
    moments += [Moment("writing", while_a_checkpoint_is_written, True), Moment("writing, owner only", while_a_checkpoint_is_written, False)]
    for index, moment in enumerate(moments):
        folder = tmp_path / f"run-{index}"
        folder.mkdir()
        check_same(run_with_kills(folder, [moment]), undisturbed)
