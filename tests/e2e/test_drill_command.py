"""`mem drill` and `mem prove-resume` as a person calls them: real faults from outside, a twin, a verdict, nothing left behind."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

DRILL = """
run_id: rehearsal
store: runs
device: cpu
training: {max_steps: 400, segment_steps: 40, warmup_steps: 10}
chaos: {kinds: [kill_rank, kill_flow, flip_checkpoint, error_in_step, failed_allocation]}
"""
PROOF = """
run_id: resume
store: runs
device: cpu
training: {max_steps: 90, warmup_steps: 10}
"""


def test_a_drill_survives_every_fault_and_ends_with_the_weights_of_its_twin(mem: Callable[..., Any], tmp_path: Path) -> None:
    """Exit 0, all faults proven to have fired, the report as JSON and as a page."""
    (tmp_path / "drill.yaml").write_text(DRILL)
    done = mem("drill", "drill.yaml", "--seed", "7", "--json", timeout_s=900)
    assert done.code == 0, done.err[-4000:]
    answer = done.answer
    assert answer["passed"] is True
    assert answer["weights_digest"] == answer["twin_weights_digest"] != ""
    assert answer["trajectory_digest"] == answer["twin_trajectory_digest"] != ""
    assert {fault["kind"] for fault in answer["faults"]} == {
        "kill_rank", "kill_flow", "flip_checkpoint", "error_in_step", "failed_allocation",
    }  # fmt: skip
    assert all(fault["verdict"] == "survived" and fault["proof"] and fault["recovered_s"] is not None for fault in answer["faults"])
    assert answer["starts"] == [-9, 0]
    assert answer["run_folder"] != answer["twin_folder"]
    desk = Path(f"{answer['run_folder']}.drill")
    assert json.loads((desk / "drill.json").read_text()) == answer
    assert "<html" in (desk / "drill.html").read_text()


def test_resume_is_proven_by_a_certificate(mem: Callable[..., Any], tmp_path: Path) -> None:
    """N steps straight and N steps in three pieces with kills between them: equal to the bit, in writing."""
    (tmp_path / "proof.yaml").write_text(PROOF)
    done = mem("prove-resume", "proof.yaml", "--json", timeout_s=900)
    assert done.code == 0, done.err[-4000:]
    answer = done.answer
    assert answer["equal"] is True
    assert answer["starts"] == [-9, -9, 0]
    assert [kill["verdict"] for kill in answer["kills"]] == ["survived", "survived"]
    certificate = json.loads(Path(answer["certificate_path"]).read_text())
    assert certificate == answer
    assert Path(answer["certificate_path"]).parent.name == answer["run_id"]


@pytest.mark.parametrize(
    ("chaos", "words"),
    [("{kinds: [meteor]}", "meteor"), ("{at_steps: [500], kinds: [kill_rank]}", "after the end of the run")],
)
def test_a_drill_that_cannot_be_is_refused_before_anything_is_started(
    mem: Callable[..., Any], tmp_path: Path, chaos: str, words: str
) -> None:
    """Exit 64, in seconds, without a run folder."""
    (tmp_path / "drill.yaml").write_text(
        DRILL.replace("{kinds: [kill_rank, kill_flow, flip_checkpoint, error_in_step, failed_allocation]}", chaos)
    )
    done = mem("drill", "drill.yaml", "--json")
    assert done.code == 64
    assert words in done.err
    assert not (tmp_path / "runs").exists()


SERVICES = """
run_id: services
store: runs
device: cpu
training: {max_steps: 900, segment_steps: 60, warmup_steps: 10}
checkpoint: {mirror: "s3://runs/copies"}
chaos: {kinds: [store_errors, store_resets, prefect_killed, KINDS_OF_ROOT]}
"""


@pytest.fixture
def moto(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An S3 server on loopback with a bucket `runs`, named by the environment of what is started."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": url}
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=url)
    client.create_bucket(Bucket="runs")
    yield client
    server.stop()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_the_run_leans_on_may_fail(mem: Callable[..., Any], tmp_path: Path, moto: Any) -> None:
    """S3 that answers 503 or resets, a killed Prefect API, and as root a full and a read-only disk: survived, and the mirror is whole."""
    of_root = ["full_disk", "read_only_store"] if os.geteuid() == 0 else []
    kinds = ["store_errors", "store_resets", "prefect_killed", *of_root]
    (tmp_path / "drill.yaml").write_text(SERVICES.replace("prefect_killed, KINDS_OF_ROOT", ", ".join(kinds[2:])))
    done = mem("drill", "drill.yaml", "--seed", "5", "--json", timeout_s=900)
    assert done.code == 0, done.err[-4000:]
    answer = done.answer
    assert {fault["kind"]: fault["verdict"] for fault in answer["faults"]} == dict.fromkeys(kinds, "survived")
    proofs = {fault["kind"]: fault["proof"] for fault in answer["faults"]}
    assert "a stranger got 503" in proofs["store_errors"]
    assert "connections of the run met the same" in proofs["store_resets"]
    keys = [item["Key"] for item in moto.list_objects_v2(Bucket="runs", Prefix=f"copies/{answer['run_id']}/").get("Contents", [])]
    assert any("000900" in key and "manifest" in key for key in keys), keys
    assert answer["run_folder"] not in Path("/proc/mounts").read_text(), "the run's own disk is gone, its files are kept"
    assert (Path(answer["run_folder"]) / "run.json").is_file()
