"""Training a part again: the orders that the ranks get, and what counts as "this machine could not", which says nothing about the run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from flows.commands.audit import exit_code
from mem_core.core.audit.course import Course, Piece
from mem_core.core.audit.words import certificate_text, verdict_words
from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.errors import EnvironmentUnfit
from mem_core.domain.events import MemoryPlanChanged, Noted, OomAbsorbed
from mem_core.domain.plan import Hyperparams, MemoryPlan, MemoryPlanChange
from mem_core.domain.results.audit import AuditCertificate, AuditCoverage, AuditDistances, AuditedOn, AuditedSegment, AuditStatus
from mem_core.domain.segment import Evidence, WorkerLost
from mem_core.runtime.proof.audit.redo import Beginning, NotRedone, Redone, train_again
from mem_core.runtime.ranks.port import GroupFailed, Ranks, Watch
from mem_core.runtime.ranks.worker.protocol import Ready, Saved, SegmentDone, Train, WorkerSpec

LOW, HIGH = Hyperparams(lr_multiplier=0.5), Hyperparams(lr_multiplier=2.0)
COURSE = Course((Piece(13, LOW), Piece(16, HIGH)), end_batch=17, left_out=(12,))
START = TrainingPosition(applied_steps=10, batch_index=10)
CHANGED = MemoryPlanChanged(change=MemoryPlanChange(batch_index=11, plan=MemoryPlan(micro_batch_rows=1), reason="shrink"))
Trained = Callable[[Train, Watch], SegmentDone]


def done(order: Train, watch: Watch) -> SegmentDone:
    """As told; two rows of columns for each order."""
    rows = np.arange(2.0)
    position = START.model_copy(update={"applied_steps": order.until_step, "trajectory_digest": f"t{order.until_step}"})
    return SegmentDone(position, False, 1.0, 0.0, {"loss": rows + order.until_step, "step": rows})


@dataclass
class FakeRanks:
    """`Ranks` and the group that it starts, in one; keeps what it was told."""

    trained: Trained = done
    saved: Callable[[], list[Saved]] = lambda: [Saved(16), Saved(16, weights_digest="w16")]
    told: list[Any] = field(default_factory=list[Any])
    watch: Watch = field(default_factory=Watch)

    def start(self, spec: WorkerSpec, watch: Watch) -> "FakeRanks":
        self.watch = watch
        return self

    def restore(self, folder: str | None, position: TrainingPosition, replay_until: int = 0) -> Ready:
        self.told.append((folder, position.applied_steps, replay_until))
        self.watch.on_record((Noted(text="memory calibrated"),))
        return Ready(position.applied_steps, {}, 0.0, 0.0)

    def train(self, order: Train, on_beat: Any, stop_wanted: Any) -> SegmentDone:
        self.told.append(order)
        return self.trained(order, self.watch)

    def wait_saved(self, step: int, deadline_s: float) -> list[Saved]:
        return self.saved()

    def stop(self) -> None:
        self.told.append("stopped")


def again(ranks: FakeRanks) -> Redone:
    spec = cast(WorkerSpec, None)
    return train_again(cast(Ranks, ranks), spec, Beginning(Path("/kept"), START), COURSE, Path("/staging"), lambda text: None)


def test_the_recorded_values_hold_piece_by_piece_and_only_the_end_is_saved() -> None:
    ranks = FakeRanks()
    redone = again(ranks)
    assert ranks.told == [
        ("/kept", 10, 17),
        Train(13, LOW, None, skip_batches=(12,)),
        Train(16, HIGH, "/staging", skip_batches=(12,)),
        "stopped",
    ]
    assert (redone.weights_digest, redone.position.trajectory_digest) == ("w16", "t16")
    assert redone.columns["loss"].tolist() == [13.0, 14.0, 16.0, 17.0]


def shrunk(order: Train, watch: Watch) -> SegmentDone:
    watch.on_record((CHANGED,))
    return done(order, watch)


def absorbed(order: Train, watch: Watch) -> SegmentDone:
    watch.on_record((OomAbsorbed(batch_index=11, memory="host", phase="forward"),))
    return done(order, watch)


def short(order: Train, watch: Watch) -> SegmentDone:
    return done(Train(order.until_step - 1, order.hyperparams, None), watch)


def lost(order: Train, watch: Watch) -> SegmentDone:
    raise GroupFailed(WorkerLost(cause="SIGKILL", evidence=Evidence(rank=0)))


def unsaved() -> list[Saved]:
    return [Saved(16, error="OSError: no space left on device")]


def too_slow() -> list[Saved]:
    raise TimeoutError("the writers took too long")


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        (FakeRanks(shrunk), "memory did not suffice"), (FakeRanks(absorbed), "memory did not suffice"),
        (FakeRanks(short), "ended at step 12"), (FakeRanks(lost), "worker lost"), (FakeRanks(saved=unsaved), "no space left"),
        (FakeRanks(saved=too_slow), "too long"),
    ],
)  # fmt: skip
def test_what_this_machine_cannot_do_is_no_verdict_on_the_run(ranks: FakeRanks, why: str) -> None:
    with pytest.raises(NotRedone, match=why):
        again(ranks)
    assert ranks.told[-1] == "stopped"


def certificate(*statuses: AuditStatus, findings: tuple[str, ...] = ()) -> AuditCertificate:
    segments = tuple(
        AuditedSegment(
            from_step=10 * number, to_step=10 * number + 10, status=status, reasons=() if status == "equal" else (f"reason {number}",),
            distance=AuditDistances(loss=2e-7),
        )
        for number, status in enumerate(statuses)
    )  # fmt: skip
    equal = set(statuses) == {"equal"} and not findings
    return AuditCertificate(
        equal=equal, run_id="run", place="/runs/run", seed=7, asked_segments=3, segments=segments,
        coverage=AuditCoverage(committed_steps=100, possible_segments=4, possible_steps=40, redone_steps=30), redone_share=0.3,
        findings=findings, not_audited=("steps 41 to 100: not kept",), notes=("trained with torch 1, audited with 2",), device="cpu",
        dtype="float32", last_step=100, weights_digest="w", trajectory_digest="t", journal_sha256="j", record_sha256="r",
        audited_on=AuditedOn(cpu="A CPU (avx2)", versions={"torch": "2"}), issued_unix_s=1.0,
    )  # fmt: skip


def test_the_exit_code_says_whether_the_run_or_the_machine_is_at_fault() -> None:
    assert exit_code(certificate("equal", "equal")) == 0
    assert exit_code(certificate("equal", "different")) == 1
    assert exit_code(certificate("unproven")) == 1
    assert exit_code(certificate("equal", findings=("the journal is damaged",))) == 1
    assert exit_code(certificate("not_redone", "different")) == 1, "what was found is found"
    assert exit_code(certificate("equal", "not_redone")) == EnvironmentUnfit.exit_code


def test_the_text_says_what_was_done_what_came_of_it_and_what_it_does_not_say() -> None:
    text = certificate_text(certificate("equal", "different", "not_redone", findings=("run.json is not what its sealed copy says",)))
    assert text.startswith("Audit of run run in /runs/run: NOT equal: 1 equal to the bit, 1 DIFFERENT, 1 not trained again, 1 finding")
    for words in (
        "3 of 4 segments", "seed 7", "30 of 100 steps (30.00%)", "steps 11 to 20", "reason 1", "losses 2e-07", "not known",
        "torch 2, A CPU,", "Against the record:\n  run.json", "Another machine:\n  trained with torch 1",
        "Cannot be audited:\n  steps 41 to 100",
    ):  # fmt: skip
        assert words in text, words
    assert verdict_words(certificate("equal", "equal")) == "2 of 2 segments came to the same bits"
