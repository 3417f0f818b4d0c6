"""`mem audit`: an honest run is trained again to the same bits, whatever happened to it; a dishonest one is found."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from audit_forgery import claim_learning_rate, flip_weights_digest
from chaos_ports import Poison

from flows.commands.audit import AuditWish, audit, opened
from mem_core.domain.errors import DataError, NoValidCheckpoint, RequestError
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.results.audit import AuditCertificate, AuditedSegment
from mem_core.domain.run import RunResult
from mem_core.infrastructure.settings import Settings
from mem_core.runtime.proof.audit.audit_service import AuditOrder, audit_run
from mem_core.runtime.proof.audit.kept import Kept, LocalKept
from mem_core.runtime.proof.deep_verify import ranks_for_a_while
from mem_core.runtime.ranks.local.processes import ForkServer
from mem_core.runtime.session.opening.stages import OpeningOptions
from mem_core.testing.memory_faults import PlannedOom, fail_allocations
from mem_core.testing.ports import with_port

pytestmark = pytest.mark.integration
Drive, Nano = Callable[..., RunResult], Callable[..., RuntimeRequest]
Audit = Callable[..., AuditCertificate]
K, ALL = 4, 99
TRAINING: dict[str, Any] = {
    "max_steps": 4 * K, "segment_steps": K, "global_batch_size": 4, "warmup_steps": 2, "learning_rate": 1e-3,
}  # fmt: skip
LORA: dict[str, Any] = {"lora": {"rank": 4, "dropout": 0.1}}
EVERY: dict[str, Any] = {"keep_last": 1, "keep_every_steps": K}
HALF: dict[str, Any] = {"keep_last": 1, "keep_every_steps": 2 * K}
TWO: dict[str, Any] = {"keep_last": 2}


@pytest.fixture
def audited(fork_server: ForkServer) -> Audit:
    """Audit a run folder on the shared fork server: every segment, unless told otherwise."""

    def run(folder: Path, num_segments: int = ALL, seed: int = 0, kept: Kept | None = None) -> AuditCertificate:
        order = AuditOrder(folder, kept or LocalKept.of(folder, folder.name, None), str(folder), num_segments, seed)
        return audit_run(order, Settings.from_environment(), lambda text: None, partial(ranks_for_a_while, server=fork_server))

    return run


@pytest.fixture
def trained(drive: Drive, nano: Nano, tmp_path: Path) -> Callable[..., Path]:
    """A small run without held-out rows, driven to its end; gives its folder."""

    def run(run_id: str = "run", options: OpeningOptions | None = None, **sections: Any) -> Path:
        sections = {"data": {"validation": None}, "training": TRAINING, "checkpoint": EVERY} | sections
        drive(nano(run_id, **sections), options=options)
        return tmp_path / run_id

    return run


def steps_of(certificate: AuditCertificate) -> list[tuple[int, int]]:
    return [(segment.from_step, segment.to_step) for segment in certificate.segments]


def assert_all_equal(certificate: AuditCertificate) -> None:
    assert [(segment.to_step, segment.status, segment.reasons) for segment in certificate.segments] == [
        (segment.to_step, "equal", ()) for segment in certificate.segments
    ]
    assert certificate.findings == ()
    assert certificate.equal
    assert all(segment.distance.weights == segment.distance.loss == 0.0 for segment in certificate.segments)
    assert all(segment.steps_compared >= segment.num_steps for segment in certificate.segments)


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize(
    ("num_ranks", "zero_stage", "model"),
    [
        (1, 1, {}), (2, 2, {}), (1, 1, LORA), pytest.param(2, 3, LORA, marks=pytest.mark.slow),
        pytest.param(1, 0, {}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_an_honest_run_comes_to_the_same_bits(
    num_ranks: int, zero_stage: int, model: dict[str, Any], trained: Callable[..., Path], audited: Audit
) -> None:
    """Every segment, from fresh weights and from every kept checkpoint; nothing of the run's folder is touched."""
    folder = trained(parallel={"num_ranks": num_ranks, "zero_stage": zero_stage}, model=model)
    before = contents(folder)
    certificate = audited(folder)
    assert contents(folder) == before
    assert steps_of(certificate) == [(0, K), (K, 2 * K), (2 * K, 3 * K), (3 * K, 4 * K)]
    assert_all_equal(certificate)
    assert [(segment.num_ranks, segment.zero_stage) for segment in certificate.segments] == [(num_ranks, zero_stage)] * 4
    assert (certificate.redone_share, certificate.not_audited, certificate.notes) == (1.0, (), ())
    assert certificate.segments[0].trained_on == certificate.audited_on
    result = json.loads((folder / "result.json").read_text())
    assert (certificate.weights_digest, certificate.trajectory_digest) == (result["weights_digest"], result["trajectory_digest"])


def test_what_is_not_kept_is_named_and_the_seed_draws_the_same_again(trained: Callable[..., Path], audited: Audit) -> None:
    folder = trained(checkpoint=HALF)
    one = audited(folder, 1, seed=5)
    assert steps_of(one) == steps_of(audited(folder, 1, seed=5))
    assert (one.coverage.possible_segments, one.coverage.possible_steps, one.coverage.redone_steps) == (2, 2 * K, K)
    assert one.redone_share == 0.25
    assert [text.split(":")[0] for text in one.not_audited] == [f"steps {K + 1} to {2 * K}", f"steps {3 * K + 1} to {4 * K}"]


@dataclass(frozen=True)
class Together:
    """Several ports of a rank as one."""

    ports: tuple[Callable[[Any], None], ...]

    def __call__(self, runner: Any) -> None:
        for port in self.ports:
            port(runner)


def test_a_run_that_was_killed_starved_and_poisoned_comes_to_the_same_bits(
    trained: Callable[..., Path], audited: Audit, tmp_path: Path
) -> None:
    """Micro-batches shrunk in the second segment, a rank killed in the third, a batch left out in the fourth."""
    ooms = partial(fail_allocations, plans=(PlannedOom("forward", K + 1, times=1),), folder=tmp_path)
    killed = Poison(2 * K + 2, "kill", str(tmp_path / "killed"), times=1)
    poisoned = Poison(3 * K + 1, "nan", str(tmp_path / "poisoned"))
    folder = trained(
        options=with_port(Together((ooms, killed, poisoned))), memory={"micro_batch_size": 4}, resilience={"on_poisoned_batch": "skip"}
    )
    assert [(tmp_path / name).stat().st_size for name in ("0", "killed")] == [1, 1]
    certificate = audited(folder)
    assert_all_equal(certificate)
    assert [segment.num_plan_changes for segment in certificate.segments] == [0, 1, 0, 0]
    assert [segment.left_out_batches for segment in certificate.segments] == [(), (), (), (3 * K + 1,)]


def test_a_segment_is_trained_again_under_the_values_that_were_decided_for_it(
    trained: Callable[..., Path], audited: Audit, tmp_path: Path
) -> None:
    """The second segment ran at a lower rate after a loss that was no number."""
    poison = Poison(K + 1, "nan", str(tmp_path / "count"), times=1)
    steps = TRAINING | {"max_steps": 2 * K}
    folder = trained(options=with_port(poison), training=steps, resilience={"on_non_finite": "lower_lr"})
    certificate = audited(folder)
    assert_all_equal(certificate)
    rates = [segment.hyperparams[0].lr_multiplier for segment in certificate.segments]
    assert rates[0] == 1.0 > rates[1]


@pytest.mark.slow
def test_a_run_that_took_another_shape_is_trained_again_in_the_shape_of_each_part(
    drive: Drive, nano: Nano, audited: Audit, tmp_path: Path
) -> None:
    kept = {"data": {"validation": None}, "checkpoint": EVERY}
    drive(nano("run", training=TRAINING | {"max_steps": 2 * K, "schedule_steps": 4 * K}, **kept))
    other = nano("run", training=TRAINING, parallel={"num_ranks": 2, "zero_stage": 2}, **kept)
    drive(other, options=OpeningOptions(allow_reshard=True))
    certificate = audited(tmp_path / "run")
    assert [(segment.from_step, segment.num_ranks) for segment in certificate.segments] == [(K, 1), (2 * K, 2), (3 * K, 2)]
    assert_all_equal(certificate)
    assert "another number of ranks" in certificate.not_audited[0]


def test_a_run_in_a_remote_store_is_audited_from_its_copies(trained: Callable[..., Path], audited: Audit, tmp_path: Path) -> None:
    """Record and journal are brought, and one checkpoint at a time; its steps stayed where it was trained."""
    folder = trained(checkpoint=EVERY | {"mirror": f"file://{tmp_path}/mirror"})
    shutil.rmtree(folder)
    url = f"local://{tmp_path}/mirror"  # through the same port as any other remote store
    with opened(AuditWish("run", url), Settings.from_environment()) as (brought, place, kept):
        assert place.endswith("mirror/run")
        certificate = audited(brought, kept=kept)
    assert not brought.exists()
    assert certificate.equal
    assert steps_of(certificate)[-1] == (3 * K, 4 * K)
    assert [segment.steps_compared for segment in certificate.segments] == [0] * len(certificate.segments)


# -- what is dishonest, damaged or not there ----------------------------------------------------------------------------------------


def named(certificate: AuditCertificate, to_step: int) -> AuditedSegment:
    return next(segment for segment in certificate.segments if segment.to_step == to_step)


def test_a_digest_that_was_changed_in_a_journal_made_right_again_is_found(trained: Callable[..., Path], audited: Audit) -> None:
    """Of a step whose checkpoint is gone: nothing that lies there contradicts it, only training again does."""
    folder = trained(checkpoint=HALF)
    assert audited(folder).equal
    flip_weights_digest(folder, 3 * K)
    certificate = audited(folder)
    assert not certificate.equal
    assert certificate.findings == ()
    assert named(certificate, K).status == "equal"
    bad = named(certificate, 3 * K)
    assert bad.status == "different"
    assert bad.reasons[0].startswith("weights after its last step")
    assert not bad.trajectory_digest.differs


def test_a_digest_that_a_kept_checkpoint_contradicts_is_a_finding(trained: Callable[..., Path], audited: Audit) -> None:
    folder = trained(checkpoint=HALF)
    flip_weights_digest(folder, 2 * K)
    certificate = audited(folder, 1)
    assert not certificate.equal
    assert f"checkpoint of step {2 * K}: the journal names weights" in certificate.findings[0]


def test_a_journal_that_was_edited_without_its_chain_is_a_finding(trained: Callable[..., Path], audited: Audit) -> None:
    folder = trained()
    path = folder / "journal" / "attempt-0001.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"doctor_reported"', b'"doctor_reported" ', 1))
    certificate = audited(folder, 1)
    assert not certificate.equal
    assert "the journal is damaged" in certificate.findings[0]


@pytest.mark.parametrize(
    ("num_ranks", "zero_stage"), [(1, 1), pytest.param(1, 0, marks=pytest.mark.slow), pytest.param(2, 3, marks=pytest.mark.slow)]
)
def test_another_learning_rate_under_a_forged_record_is_found(
    num_ranks: int, zero_stage: int, trained: Callable[..., Path], audited: Audit
) -> None:
    """Record, seal, manifests, verdicts and journal all say 1e-3; the weights were trained with 2e-3. No other check can tell."""
    shape = {"num_ranks": num_ranks, "zero_stage": zero_stage}
    folder = trained(training=TRAINING | {"learning_rate": 2e-3}, parallel=shape, checkpoint=TWO)
    claim_learning_rate(folder, 1e-3)
    certificate = audited(folder)
    assert not certificate.equal
    assert certificate.findings == ()
    assert {segment.status for segment in certificate.segments} == {"different"}
    last = named(certificate, 4 * K)
    assert last.distance.loss is not None
    assert last.distance.loss > 1e-6
    assert last.distance.weights is not None
    assert 1e-5 < last.distance.weights < 1.0
    assert any("learning rate of step" in reason for reason in last.reasons)


def test_a_damaged_checkpoint_is_not_begun_with(trained: Callable[..., Path], audited: Audit) -> None:
    folder = trained(checkpoint=TWO)
    path = folder / "checkpoints" / f"step-{3 * K:09d}" / "mp_rank_00_model_states.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    certificate = audited(folder)
    assert {segment.to_step: segment.status for segment in certificate.segments} == {K: "equal", 4 * K: "unproven"}
    assert "SHA-256 differs" in named(certificate, 4 * K).reasons[0]
    assert (certificate.equal, certificate.coverage.redone_steps) == (False, K)


def test_edited_numbers_of_a_step_are_found(trained: Callable[..., Path], audited: Audit) -> None:
    import numpy as np

    folder = trained(checkpoint=TWO)
    path = folder / "metrics" / f"step-{4 * K:09d}.npz"
    columns = dict(np.load(path))
    columns["loss"][1] = np.nextafter(columns["loss"][1], 100.0)
    np.savez(path, **columns)
    certificate = audited(folder)
    assert [segment.to_step for segment in certificate.segments if segment.status == "different"] == [4 * K]
    assert f"loss of step {3 * K + 2}" in named(certificate, 4 * K).reasons[0]
    assert 0 < (named(certificate, 4 * K).distance.loss or 0) < 1e-12


def test_other_data_and_other_models_are_refused_by_name(trained: Callable[..., Path], audited: Audit, tmp_path: Path) -> None:
    rows = tmp_path / "rows.txt"
    rows.write_text("".join(f"line {number} of a text that is long enough\n" for number in range(400)))
    folder = trained(data={"train": [str(rows)], "validation": None})
    rows.write_text(rows.read_text().replace("line 7 ", "line 8 "))
    with pytest.raises(DataError, match="has changed since it was born"):
        audited(folder)
    rows.unlink()
    with pytest.raises(DataError):
        audited(folder)


def test_the_command_writes_a_certificate_and_says_1_where_it_is_not_equal(
    trained: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a fork server of its own, as people use it."""
    folder, output = trained(checkpoint=HALF), tmp_path / "certificates" / "one.json"
    output.parent.mkdir()
    wish = AuditWish("run", str(tmp_path), num_segments=1, seed=1, output=output)
    assert audit(wish, as_json=True) == 0
    said = capsys.readouterr()
    certificate = AuditCertificate.model_validate_json(output.read_bytes())
    assert AuditCertificate.model_validate_json(said.out) == certificate
    assert certificate.equal
    assert output.with_suffix(".txt").read_text() in said.err
    flip_weights_digest(folder, 2 * K)
    assert audit(wish, as_json=False) == 1
    assert "NOT equal" in output.with_suffix(".txt").read_text()


def test_what_cannot_be_audited_at_all_is_an_error_with_a_way_out(trained: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no run here"):
        audit(AuditWish("run", str(tmp_path)), as_json=False)
    folder = trained()
    with pytest.raises(RequestError, match="writes nothing into the run"):
        audit(AuditWish("run", str(tmp_path), output=folder / "audit.json"), as_json=False)
    with pytest.raises(RequestError, match="cannot be drawn"):
        audit(AuditWish("run", str(tmp_path), num_segments=0), as_json=False)
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(NoValidCheckpoint, match="keep_every_steps"):
        audit(AuditWish("run", str(tmp_path)), as_json=False)
