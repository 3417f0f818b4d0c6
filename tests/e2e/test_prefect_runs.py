"""A run through a real server and a real serving process: submitted, watched, refused, cancelled, killed, resumed."""

import json
import os
import signal
import time

import pytest
from prefect_site import Site, wait_for

pytestmark = pytest.mark.integration


def test_a_run_submitted_from_a_clean_shell_trains_and_shows_itself(site: Site) -> None:
    """`prefect deployment run` → named and tagged run, task runs by step range, page, progress, result, events; again: at once."""
    overrides = {
        "run_id": "shell", "store": str(site.store), "device": "cpu", "training.max_steps": 100, "training.segment_steps": 50,
        "chaos.kinds": ["kill_rank"],
    }  # fmt: skip
    done = site.prefect("deployment", "run", "endurance/endurance", "-p", f"overrides={json.dumps(overrides)}", "--watch")
    assert done.returncode == 0, done.stdout + done.stderr
    run = site.post("/flow_runs/filter", {"flow_runs": {"name": {"any_": ["shell"]}}})[0]
    assert {"mem", "training", "run:shell"} <= set(run["tags"])
    names = {task["name"] for task in site.task_runs(run["id"])}
    assert {"doctor", "prepare", "steps 0-50", "steps 50-100", "checkpoint 50", "checkpoint 100", "report"} <= names

    artifacts = site.artifacts(run["id"])
    page = artifacts["mem-shell"]["data"]
    assert artifacts["mem-shell-progress"]["data"] == 100
    for text in (
        "completed at step 100 of 100",
        "data:image/svg+xml;base64,",
        "## Checkpoints",
        "valid (integrity)",
        "## Doctor",
        "report.html",
    ):
        assert text in page
    assert '"status": "completed"' in artifacts["mem-shell-result"]["data"]
    assert any("chaos is left out" in line for line in site.log(run["id"])), "a fault that was asked for and is not done is said aloud"
    wait_for(lambda: len(site.events("mem.run.finished", "shell")) == 1, "event of the end", 20)
    assert sorted(event["payload"]["step"] for event in site.events("mem.checkpoint.validated", "shell")) == [50, 100]

    sections = {"store": str(site.store), "run_id": "another", "device": "cpu", "training": {"segment_steps": 50}, "model": None}
    form = site.fill_form("endurance/endurance", "Once more", run_id="shell", max_steps=100, request=sections)
    again = site.wait_end(form)
    assert (again["state_name"], again["name"]) == ("Completed", "Once more (shell)"), again["state"]["message"]
    assert not [task for task in site.task_runs(again["id"]) if task["name"].startswith("steps")], "a finished run trained again"


def test_what_prefect_cannot_check_is_refused_inside_with_our_message(site: Site) -> None:
    """A relative store here; every other refusal has the same way and is tested without a server."""
    run = site.wait_end(site.run_deployment("endurance/endurance", overrides={"run_id": "refused", "store": "./runs"}))
    assert run["state_name"] == "Failed"
    assert "RequestError" in run["state"]["message"]
    assert "a deployment refuses it" in run["state"]["message"]


def test_what_prefect_can_check_is_refused_at_submission(site: Site) -> None:
    request = {"run_id": "bad", "store": "~/mem/runs", "training": {"max_steps": 0}}
    done = site.prefect("deployment", "run", "endurance/endurance", "-p", f"request={json.dumps(request)}")
    assert done.returncode == 1
    assert "max_steps" in done.stdout + done.stderr
    for wrong, words in (("learning_rate=99", "99 is greater than the maximum of 10"), ('run_id="Bad Name!"', "does not match")):
        done = site.prefect("deployment", "run", "endurance/endurance", "-p", wrong)
        assert (done.returncode, words in " ".join((done.stdout + done.stderr).split())) == (1, True), done.stderr


def test_a_cancelled_run_is_gone_in_time_held_meanwhile_and_goes_on_later(site: Site) -> None:
    """A second run of the same id is refused with who holds it; cancel ends every process within 20 s; the same id goes on."""
    first = site.train("cancelled", **{"training.max_steps": 100_000})
    site.wait_validated("cancelled", 50)
    holder = site.holder("cancelled")
    second = site.wait_end(
        site.run_deployment(
            "finetune/finetune", model="preset:llama-nano", run_id="cancelled", store=str(site.store), overrides={"device": "cpu"}
        )
    )
    assert second["state_name"] == "Failed"
    assert f"process {holder} " in second["state"]["message"]

    started_s = time.monotonic()
    assert site.prefect("flow-run", "cancel", first).returncode == 0
    wait_for(lambda: not site.processes("cancelled") and not _alive(holder), "end of every process", 20)
    ended = site.wait_end(first)
    assert ended["state_name"] == "Cancelled"
    assert site.result("cancelled")["message"].startswith("stopped by SIGTERM")
    said = (site.folder / "serve.log").read_text()
    assert "cancelled as asked: stopped by SIGTERM" in said
    assert "prefect.exceptions.CancelledRun" not in said
    print(f"cancel to the end: {time.monotonic() - started_s:.1f} s")

    step = site.validated_step("cancelled")
    assert site.wait_end(site.train("cancelled", **{"training.max_steps": step + 20}))["state_name"] == "Completed"
    assert site.result("cancelled")["applied_steps"] == step + 20


def test_a_killed_flow_is_restarted_by_the_automation_and_redoes_one_segment_at_most(site: Site) -> None:
    """kill -9 of the flow process: workers die with it, the runner says Crashed, the automation schedules it again."""
    flow_run = site.train("killed", **{"training.max_steps": 400})
    site.wait_validated("killed", 100)
    os.kill(site.holder("killed"), signal.SIGKILL)
    workers_gone_s = wait_for(lambda: not site.processes("killed"), "end of the workers", 5)
    print(f"workers gone {workers_gone_s:.1f} s after the kill of their flow")
    wait_for(lambda: site.flow_run(flow_run)["run_count"] == 2, "second start", 240)
    wait_for(lambda: site.state(flow_run) == "Completed", "the end", 600)
    result = site.result("killed")
    assert result["applied_steps"] == 400
    starts = [int(task["name"].split()[1].split("-")[0]) for task in site.task_runs(flow_run) if task["name"].startswith("steps")]
    assert len(starts) <= 400 / 50 + 1, "more than one segment was done again"
    assert {task["state_name"] for task in site.task_runs(flow_run)} == {"Completed", "Crashed"}, "none stays Running"
    assert site.post("/artifacts/count", {"flow_runs": {"id": {"any_": [flow_run]}}}) == 3


@pytest.mark.slow
def test_a_server_killed_in_mid_run_costs_nothing(site: Site) -> None:
    """I9: training goes on while the API is away, and the flow ends Completed once it is back (two minutes in the slow tests)."""
    check_outage(site, "outage", outage_s=8.0)


def check_outage(site: Site, run_id: str, outage_s: float) -> None:
    """Kill the server for that long while a run trains; the run must not notice."""
    flow_run = site.train(run_id, **{"training.max_steps": 100_000})
    site.wait_validated(run_id, 50)
    site.kill_server()
    killed_s, before = time.monotonic(), site.validated_step(run_id)
    site.wait_validated(run_id, before + 1)  # training and validation go on while the API is away
    time.sleep(max(0.0, outage_s - (time.monotonic() - killed_s)))
    during = site.validated_step(run_id)
    site.start_server()
    wait_for(lambda: site.state(flow_run) == "Running", "the server to know the run", 120)
    site.wait_validated(run_id, during + 50)
    site.post(f"/flow_runs/{flow_run}/set_state", {"state": {"type": "CANCELLING"}})
    assert site.wait_end(flow_run)["state_name"] == "Cancelled"
    assert site.result(run_id)["faults"] == []


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
