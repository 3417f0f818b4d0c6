"""Each deployment of deployments/prefect.yaml, submitted with small parameters, ends Completed and shows what it is for."""

import json
import time
from pathlib import Path

import psutil
import pytest
import yaml
from prefect_site import Site, wait_for
from process_tree import alive

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(2_400)]
FILE = Path(__file__).parents[2] / "deployments" / "prefect.yaml"
TRIED = {"endurance", "finetune", "chaos-drill", "restore-drill", "doctor", "restart", "generate"}  # restart: test_prefect_workers


def test_every_shipped_deployment_is_tried_here() -> None:
    """An eighth one needs a test of its own."""
    assert {entry["name"] for entry in yaml.safe_load(FILE.read_text())["deployments"]} == TRIED


@pytest.fixture(scope="module")
def trained(site: Site) -> str:
    """Run id of what the endurance deployment has trained."""
    flow_run = completed(site, site.train("five", **{"training.max_steps": 150}))
    assert site.result("five")["applied_steps"] == 150
    assert f"mem-{flow_run['name']}" in site.artifacts(flow_run["id"])
    return "five"


def completed(site: Site, flow_run_id: str, limit_s: float = 600.0) -> dict:  # type: ignore[type-arg]
    """The flow run, once it is over and all is well."""
    flow_run = site.wait_end(flow_run_id, limit_s)
    assert flow_run["state_name"] == "Completed", flow_run["state"]["message"]
    print(f"{flow_run['name']}: Completed after {flow_run['total_run_time']:.1f} s")
    return flow_run


def test_restore_drill_replays_what_endurance_left(site: Site, trained: str) -> None:
    """Replay is the default level; the table says what was proven of which step."""
    flow_run = completed(site, site.run_deployment("restore-drill/restore-drill", run_id=trained, store=str(site.store)))
    rows = json.loads(site.artifacts(flow_run["id"])["mem-restore-drill"]["data"])
    assert [(row["step"], row["level"], row["valid"], row["steps"].split()[0]) for row in rows] == [
        (150, "replay", True, "finite"),
        (100, "replay", True, "as"),
    ]


def test_restore_drill_fails_where_there_is_nothing_to_restore(site: Site) -> None:
    """With the message and the kind of the judging process."""
    flow_run = site.wait_end(site.run_deployment("restore-drill/restore-drill", run_id="nowhere", store=str(site.store)))
    assert flow_run["state_name"] == "Failed"
    assert "RequestError" in flow_run["state"]["message"]
    assert "there is no such run" in flow_run["state"]["message"]


def test_finetune_trains_with_few_parameters(site: Site) -> None:
    """Model, data and numbers as the form asks for them; with more steps the same run goes on."""
    parameters = {
        "run_id": "tuned",
        "model": "preset:llama-nano",
        "store": str(site.store),
        "max_steps": 40,
        "sequence_length": 64,
        "overrides": {"device": "cpu"},
    }
    completed(site, site.run_deployment("finetune/finetune", **parameters))
    assert site.result("tuned")["applied_steps"] == 40
    completed(site, site.run_deployment("finetune/finetune", **{**parameters, "max_steps": 60}))
    assert site.result("tuned")["applied_steps"] == 60


def test_doctor_examines_and_says_so(site: Site) -> None:
    request = {"run_id": "examined", "store": str(site.store), "device": "cpu"}
    flow_run = completed(site, site.run_deployment("doctor/doctor", request=request))
    assert "# Doctor" in site.artifacts(flow_run["id"])["mem-doctor"]["data"]


def test_generate_answers_each_row_and_finds_what_is_finished(site: Site, trained: str) -> None:
    """The run's newest checkpoint, by its id in the store; the page shows the first rows."""
    prompts, output = site.store.parent / "prompts.jsonl", site.store.parent / "answers.jsonl"
    prompts.write_text("".join(f"{json.dumps({'id': number, 'prompt': 'def ' * number})}\n" for number in range(1, 5)))
    parameters = {
        "model": trained, "store": str(site.store), "prompts": str(prompts), "output": str(output), "max_new_tokens": 8, "device": "cpu",
    }  # fmt: skip
    flow_run = completed(site, site.run_deployment("generate/generate", **parameters))
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(line["id"], line["completion_tokens"] <= 8) for line in lines] == [(number, True) for number in range(1, 5)]
    artifacts = site.artifacts(flow_run["id"])
    assert "4 answers in" in artifacts["mem-generate"]["data"]
    assert artifacts["mem-generate-progress"]["data"] == 100.0
    assert "row 4/4" in artifacts["mem-generate-progress"]["description"]
    before = output.stat().st_mtime_ns
    completed(site, site.run_deployment("generate/generate", **parameters))
    assert output.stat().st_mtime_ns == before


def test_chaos_drill_strikes_and_compares(site: Site) -> None:
    """As it is shipped, but for the store: real faults, then a twin; Completed only where both have the same weights."""
    completed(site, site.run_deployment("chaos-drill/chaos-drill", overrides={"store": str(site.store)}), 1_200)
    report = json.loads((site.store / "chaos-drill-drill-0.drill" / "drill.json").read_text())
    assert report["passed"]
    assert report["weights_digest"] == report["twin_weights_digest"] != ""
    assert {fault["verdict"] for fault in report["faults"]} == {"survived"}
    assert len(report["faults"]) == 5


def test_a_cancelled_chaos_drill_is_gone_within_20_s(site: Site) -> None:
    """Drill, trainer, embedded server, fork server and ranks, and the flow says Cancelled."""
    overrides = {"run_id": "given-up", "store": str(site.store), "training.max_steps": 100_000, "chaos.at_steps": [90_000]}
    flow_run = site.run_deployment("chaos-drill/chaos-drill", overrides=overrides)
    folder = site.store / "given-up-drill-0"
    wait_for(lambda: any(folder.glob("checkpoints/step-*/verdict.json")), "a proven checkpoint of the drill", 300)
    assert site.serving is not None
    family = psutil.Process(site.serving.pid).children(recursive=True)
    assert len(family) >= 5
    started_s = time.monotonic()
    assert site.prefect("flow-run", "cancel", flow_run).returncode == 0
    wait_for(lambda: not any(map(alive, family)), "end of every process", 20)
    print(f"{len(family)} processes gone {time.monotonic() - started_s:.1f} s after the cancel")
    assert site.wait_end(flow_run)["state_name"] == "Cancelled"
