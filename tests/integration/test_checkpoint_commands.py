"""The verbs on checkpoints: keys and who is believed without one, steps in fresh processes, what interrupted uploads left."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flows.commands.checkpoints import list_checkpoints, verify_checkpoints
from flows.commands.export import export_checkpoint
from mem_core.bootstrap import examine_only
from mem_core.domain.errors import NoValidCheckpoint, RequestError, StoreUnavailable
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.storage.local import LocalStore
from mem_core.infrastructure.storage.port import Store
from mem_core.runtime.session.opening.orphans import orphan_findings, with_orphans

TRAINING = {"max_steps": 10, "segment_steps": 5, "global_batch_size": 4, "warmup_steps": 2}
Capture = pytest.CaptureFixture[str]


def with_key(key: str) -> Settings:
    """This machine with MEM_MANIFEST_KEY set; empty means unset."""
    return Settings.from_environment({**os.environ, "MEM_MANIFEST_KEY": key})


@pytest.mark.integration
def test_a_signed_run_is_believed_only_with_its_key(
    nano: Callable[..., RuntimeRequest], drive: Callable[..., RunResult], tmp_path: Path, capsys: Capture
) -> None:
    """Verify and export succeed with the key; without it, and with another, they fail and say why; so does going on with the run."""
    result = drive(nano("run", training=TRAINING), settings=with_key("one"))
    folder = tmp_path / "run"
    assert verify_checkpoints(folder, as_json=False, settings=with_key("one")) == 0
    assert export_checkpoint(folder, None, None, as_json=True, settings=with_key("one")) == 0
    assert json.loads(capsys.readouterr().out)["weights_digest"] == result.weights_digest
    for key, words in (("", "MEM_MANIFEST_KEY"), ("two", "signature is missing or does not match")):
        assert verify_checkpoints(folder, as_json=True, settings=with_key(key)) == NoValidCheckpoint.exit_code
        said = capsys.readouterr()
        assert [verdict["valid"] for verdict in json.loads(said.out)] == [False, False]
        assert words in said.err
    list_checkpoints(folder, as_json=True, settings=with_key("two"))
    assert {info["state"] for info in json.loads(capsys.readouterr().out)} == {"invalid"}
    with pytest.raises(RequestError, match="MEM_MANIFEST_KEY"):
        export_checkpoint(folder, None, None, as_json=False, settings=with_key(""))
    with pytest.raises(NoValidCheckpoint):
        export_checkpoint(folder, None, None, as_json=False, settings=with_key("two"))


@pytest.mark.integration
def test_unsigned_checkpoints_are_refused_under_a_key(
    nano: Callable[..., RuntimeRequest], drive: Callable[..., RunResult], tmp_path: Path, capsys: Capture
) -> None:
    """A key asks for signatures: what was saved without is neither verified nor resumed from, and nothing starts at 0 in silence."""
    drive(nano("run", training=TRAINING))
    assert verify_checkpoints(tmp_path / "run", as_json=False) == 0
    assert verify_checkpoints(tmp_path / "run", as_json=False, settings=with_key("one")) == NoValidCheckpoint.exit_code
    assert "signature is missing" in capsys.readouterr().err
    with pytest.raises(NoValidCheckpoint, match="signature is missing"):
        drive(nano("run", training={**TRAINING, "max_steps": 15}), settings=with_key("one"))
    assert not list((tmp_path / "run" / "quarantine").glob("*")), "a key that is wrong or new must not cost the checkpoints"
    assert drive(nano("run", training={**TRAINING, "max_steps": 15}), settings=with_key("")).applied_steps == 15


@pytest.mark.integration
def test_deep_verification_steps_from_every_checkpoint(
    nano: Callable[..., RuntimeRequest], drive: Callable[..., RunResult], tmp_path: Path, capsys: Capture
) -> None:
    """Each is restored and stepped: with the recorded losses to the bit, the last one without. Records of another state are a finding."""
    drive(nano("run", training=TRAINING))
    folder = tmp_path / "run"
    before = snapshot(folder)
    assert verify_checkpoints(folder, as_json=True, deep=True) == 0
    said = capsys.readouterr()
    assert [verdict["valid"] for verdict in json.loads(said.out)] == [True, True]
    assert "step         5  restoring; 2 recorded steps" in said.err
    assert "step        10  restoring; no recorded steps" in said.err
    assert snapshot(folder) == before, "verifying changes nothing in the run folder"
    path = folder / "metrics" / "step-000000010.npz"
    columns = dict(np.load(path))
    columns["loss"][1] = np.nextafter(columns["loss"][1], 100.0)
    np.savez(path, **columns)
    assert verify_checkpoints(folder, as_json=False, deep=True) == NoValidCheckpoint.exit_code
    assert "loss of step 7" in capsys.readouterr().err


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file of a run."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def test_interrupted_uploads_are_a_notice(tmp_path: Path) -> None:
    """Objects that no manifest completes: count, bytes and keys; complete uploads and other runs are not among them."""
    store = LocalStore(tmp_path)
    done, cut = ("run/checkpoints/step-000000010/attempt-1-0a0a0a0a", "run/checkpoints/step-000000020/attempt-1-0b0b0b0b")
    store.write(f"{done}/model.pt", b"x" * 10)
    store.write(f"{done}/manifest.json", b"{}")
    assert orphan_findings(store, "run") == ()
    for number in range(7):
        store.write(f"{cut}/part-{number}.pt", b"x" * 100)
    store.write("other/checkpoints/step-000000010/attempt-1-0c0c0c0c/model.pt", b"x")
    (finding,) = orphan_findings(store, "run")
    assert (finding.check, finding.severity, finding.exit_code) == ("store.orphans", "notice", 0)
    assert "7 objects (700 B) of 1 incomplete uploads" in finding.observed
    assert f"{cut}/part-0.pt" in finding.observed
    assert finding.observed.endswith("and 2 more")


def test_what_a_killed_writer_left_of_an_object_is_in_the_notice(tmp_path: Path) -> None:
    """Parts that no listing shows."""
    store = LocalStore(tmp_path)
    done = "run/checkpoints/step-000000010/attempt-1-0a0a0a0a"
    store.write(f"{done}/manifest.json", b"{}")
    (tmp_path / done / ".partial-0123").write_bytes(b"x")
    (finding,) = orphan_findings(store, "run")
    assert "0 objects (0 B) of 0 incomplete uploads and 1 unfinished objects" in finding.observed
    assert "parts of run/checkpoints/step-000000010/attempt-1-0a0a0a0a/.partial-0123" in finding.observed


def test_looking_for_orphans_never_fails_and_never_waits(tmp_path: Path) -> None:
    """A store that raises and one that hangs leave the report as it was, within the limit."""
    report = examine_only(RuntimeRequest.model_validate({"run_id": "run", "store": str(tmp_path), "device": "cpu"}), with_key(""))
    hang = threading.Event()

    def broken() -> Store:
        raise StoreUnavailable("away", remedy="Wait.")

    def hanging() -> Store:
        hang.wait(30)
        raise AssertionError("nobody waits for this")

    assert with_orphans(report, broken, "run") == report
    assert with_orphans(report, lambda: None, "run") == report
    started_s = time.monotonic()
    assert with_orphans(report, hanging, "run", limit_s=0.1) == report
    assert time.monotonic() - started_s < 5
    hang.set()
