"""Life cycle under a process worker, by hand and by schedule: the minutes-long half of what `test_prefect_runs` proves."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prefect_site import BIN, Site, wait_for
from test_prefect_runs import check_outage

from mem_core.domain.errors import EnvironmentUnfit

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(2_400)]
PREFECT_FILE = Path(__file__).parents[2] / "deployments" / "prefect.yaml"
POOL_RUN = "endurance/endurance"


@dataclasses.dataclass
class Worker:
    """A process worker whose deployments have taken the place of the served ones."""

    site: Site
    process: "subprocess.Popen[bytes]"

    def restart(self) -> None:
        """Another one after the first has died."""
        self.process = start_worker(self.site)


def start_worker(site: Site) -> "subprocess.Popen[bytes]":
    process = site.start(BIN / "prefect", "worker", "start", "--pool", "mem-process", log="worker.log")
    site.wait_log("worker.log", "started!")
    return process


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """`prefect work-pool create`, `prefect deploy --all`, `prefect worker start`: the commands of deployments/prefect.yaml."""
    with Site.open(tmp_path_factory.mktemp("worker-site"), serving=False) as site:
        assert site.prefect("work-pool", "create", "mem-process", "--type", "process").returncode == 0
        (site.folder / "gone").mkdir()
        done = site.prefect("deploy", "--all", "--prefect-file", str(PREFECT_FILE), folder=site.folder / "gone")
        assert done.returncode == 0, done.stdout + done.stderr
        (site.folder / "gone").rmdir()  # a deployment depends on no folder, least of all on the one it was typed in
        applied = subprocess.run(
            [sys.executable, "-m", "flows.automations", str(PREFECT_FILE.with_name("automations.yaml"))],
            env=site.environment, capture_output=True, text=True, timeout=300, check=True,
        )  # fmt: skip
        assert "mem-crash-dead-flows: created" in applied.stdout
        assert "mem-notify: left out" in applied.stdout
        worker = Worker(site, start_worker(site))
        yield worker
        if worker.process.poll() is None:
            os.killpg(worker.process.pid, signal.SIGKILL)
            worker.process.wait()


def test_no_deployment_remembers_the_folder_it_was_typed_in(worker: Worker) -> None:
    for entry in yaml.safe_load(PREFECT_FILE.read_text())["deployments"]:
        flow = entry["entrypoint"].rpartition(".")[2].replace("_", "-")
        assert worker.site.get(f"/deployments/name/{flow}/{entry['name']}")["pull_steps"] == []


def test_a_cancel_through_the_worker_commits_and_leaves_no_process(worker: Worker) -> None:
    site = worker.site
    flow_run = site.train("pool-cancel", **{"training.max_steps": 100_000})
    site.wait_validated("pool-cancel", 50)
    assert site.prefect("flow-run", "cancel", flow_run).returncode == 0
    wait_for(lambda: not site.processes("pool-cancel"), "end of every process", 20)
    assert site.wait_end(flow_run)["state_name"] == "Cancelled"


def test_a_worker_killed_with_its_flow_is_found_and_the_run_goes_on(worker: Worker) -> None:
    """Both die at once, as on a power cut: the automation says Crashed after 90 s without a heartbeat and schedules it again."""
    site = worker.site
    flow_run = site.train("power-cut", **{"training.max_steps": 300})
    site.wait_validated("power-cut", 50)
    for pid in (worker.process.pid, site.holder("power-cut")):
        os.kill(pid, signal.SIGKILL)
    worker.process.wait()
    wait_for(lambda: not site.processes("power-cut"), "end of every process", 5)
    assert site.state(flow_run) == "Running", "Prefect itself does not notice"
    worker.restart()
    waited_s = wait_for(lambda: site.flow_run(flow_run)["run_count"] == 2, "second start", 240)
    print(f"second start {waited_s:.0f} s after the power cut")
    wait_for(lambda: site.state(flow_run) == "Completed", "the end", 600)
    assert site.result("power-cut")["applied_steps"] == 300


def test_a_worker_told_to_stop_kills_its_flow_and_the_next_start_goes_on_at_once(worker: Worker, tmp_path: Path) -> None:
    """Prefect's process worker gives its flows no chance; the lease of a dead holder is free at once."""
    site = worker.site
    flow_run = site.train("worker-stop", **{"training.max_steps": 100_000})
    site.wait_validated("worker-stop", 50)
    worker.process.send_signal(signal.SIGTERM)
    worker.process.wait(60)
    wait_for(lambda: not site.processes("worker-stop"), "end of every process", 20)
    assert site.state(flow_run) == "Running", "Prefect itself does not notice"
    site.post(f"/flow_runs/{flow_run}/set_state", {"state": {"type": "CANCELLED"}, "force": True})
    step = site.validated_step("worker-stop")
    request = tmp_path / "r.yaml"
    training = f"{{max_steps: {step + 20}, segment_steps: 50}}"
    request.write_text(f"run_id: worker-stop\nstore: {site.store}\ndevice: cpu\ntraining: {training}\n")
    assert site.start(BIN / "mem", "train", str(request), log="next.log").wait(300) == 0, (site.folder / "next.log").read_text()[-500:]
    assert site.result("worker-stop")["applied_steps"] == step + 20


def test_serving_told_to_stop_lets_its_flow_commit(site: Site) -> None:
    """SIGTERM to `mem serve`: the run commits and is Cancelled, schedules are paused, and the next `mem serve` resumes them."""
    flow_run = site.train("serve-stop", **{"training.max_steps": 100_000})
    site.wait_validated("serve-stop", 50)
    assert site.serving is not None
    site.serving.send_signal(signal.SIGTERM)
    assert site.serving.wait(60) == 0
    assert site.wait_end(flow_run)["state_name"] == "Cancelled"
    assert not site.processes("serve-stop")
    assert site.get(f"/deployments/name/{POOL_RUN}")["paused"]
    site.start_serving()
    assert not site.get(f"/deployments/name/{POOL_RUN}")["paused"]


def test_runs_that_piled_up_while_nobody_served_do_not_train_twice(site: Site) -> None:
    """Three late runs of one id: one trains, the others are cancelled by the limit or answer at once."""
    assert site.serving is not None
    os.killpg(site.serving.pid, signal.SIGKILL)
    site.serving.wait()
    late = [site.train("piled", **{"training.max_steps": 100}) for _ in range(3)]
    site.start_serving()
    states = sorted(site.wait_end(flow_run)["state_name"] for flow_run in late)
    assert "Completed" in states
    assert set(states) <= {"Completed", "Cancelled"}
    segments = [task for flow_run in late for task in site.task_runs(flow_run) if task["name"].startswith("steps")]
    assert len(segments) == 2


def test_a_run_without_a_runner_cancels_itself(site: Site, tmp_path: Path) -> None:
    """`mem train` against a server: nobody sends it a signal, so it asks for its own state."""
    request = tmp_path / "r.yaml"
    request.write_text(f"run_id: alone\nstore: {site.store}\ndevice: cpu\ntraining: {{max_steps: 100000, segment_steps: 50}}\n")
    process = site.start(BIN / "mem", "train", str(request), log="alone.log")
    site.wait_validated("alone", 50)
    flow_run = site.post("/flow_runs/filter", {"flow_runs": {"name": {"any_": ["alone"]}}})[0]["id"]
    assert site.prefect("flow-run", "cancel", flow_run).returncode == 0
    assert process.wait(20) == 75
    assert site.state(flow_run) == "Cancelled"
    assert not site.processes("alone")


def test_two_minutes_without_a_server_cost_nothing(site: Site) -> None:
    check_outage(site, "long-outage", outage_s=120.0)


def test_a_deleted_flow_run_stops_with_a_checkpoint_and_harms_no_other(site: Site) -> None:
    doomed = site.train("deleted", deployment="endurance/endurance", **{"training.max_steps": 100_000})
    site.wait_validated("deleted", 50)
    assert site.prefect("flow-run", "delete", doomed).returncode == 0
    wait_for(lambda: not site.processes("deleted"), "end of every process", 40)
    wait_for(lambda: (site.store / "deleted" / "result.json").exists(), "the result, which is written after the workers' end", 60)
    assert site.result("deleted")["exit_code"] == 75
    request = {"run_id": "after-delete", "store": str(site.store), "device": "cpu"}
    assert site.wait_end(site.run_deployment("doctor/doctor", request=request))["state_name"] == "Completed"


def test_serving_told_to_stop_while_the_server_is_away_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    """It cannot pause the schedules; that is no bug of ours, and nothing is left."""
    with Site.open(tmp_path_factory.mktemp("away-site")) as site:
        assert site.serving is not None
        request = {"run_id": "serves", "store": str(site.store), "device": "cpu"}
        assert site.wait_end(site.run_deployment("doctor/doctor", request=request))["state_name"] == "Completed"
        site.kill_server()
        site.serving.send_signal(signal.SIGTERM)
        assert site.serving.wait(900) == EnvironmentUnfit.exit_code
        said = (site.folder / "serve.log").read_text()
        assert "is away (ConnectError)" in said
        assert "Report this as a bug" not in said


def test_a_run_that_dies_at_each_start_is_restarted_three_times_and_then_failed_with_the_reason(site: Site) -> None:
    """Its process dies before it can count: a pull step into a folder that is gone, as an old deployment may have one."""
    deployment = site.get(f"/deployments/name/{POOL_RUN}")["id"]
    step = {"prefect.deployments.steps.set_working_directory": {"directory": str(site.folder / "gone")}}
    site.patch(f"/deployments/{deployment}", {"pull_steps": [step]})
    try:
        flow_run = site.train("never-starts", **{"training.max_steps": 50})
        wait_for(lambda: site.state(flow_run) == "Failed", "the guard to give up", 900)
        told = [state["message"] or "" for state in site.states(flow_run)]
        assert [words for words in told if words.startswith("restarted after a crash")] == [
            f"restarted after a crash ({number} of 3 without progress)" for number in (1, 2, 3)
        ]
        assert "NoProgress: crashed again after 3 restarts without a new checkpoint" in told[-1]
        assert f"prefect flow-run retry {flow_run}" in told[-1]
        num_states = len(told)
        time.sleep(30)
        assert len(site.states(flow_run)) == num_states, "nobody starts it again"
    finally:
        site.patch(f"/deployments/{deployment}", {"pull_steps": []})
    assert site.prefect("flow-run", "retry", flow_run).returncode == 0
    assert site.wait_end(flow_run)["state_name"] == "Completed", "a person's retry counts anew, and the cause is mended"


def test_schedules_that_people_switch_on_or_make_outlive_the_serving_process(site: Site) -> None:
    """One of the file is switched on, one is made in the UI; `mem serve` starts again and says what it left as it was."""
    endurance, finetune = (site.get(f"/deployments/name/{name}") for name in (POOL_RUN, "finetune/finetune"))
    (weekly,) = endurance["schedules"]
    site.patch(f"/deployments/{endurance['id']}/schedules/{weekly['id']}", {"active": True})
    own = {"schedule": {"interval": 86_400.0}, "active": True, "parameters": {"run_id": "by-hand"}}
    site.post(f"/deployments/{finetune['id']}/schedules", [own])  # type: ignore[arg-type]
    assert site.serving is not None
    site.serving.send_signal(signal.SIGTERM)
    assert site.serving.wait(120) == 0
    site.start_serving()
    (weekly,) = site.get(f"/deployments/name/{POOL_RUN}")["schedules"]
    (mine,) = site.get("/deployments/name/finetune/finetune")["schedules"]
    assert (weekly["slug"], weekly["active"], weekly["schedule"]["cron"]) == ("weekly", True, "0 3 * * 1")
    assert (mine["slug"], mine["active"], mine["schedule"]["interval"]) == (None, True, 86_400.0)
    assert mine["parameters"] == {"run_id": "by-hand"}
    assert "schedule weekly of endurance/endurance stays on" in (site.folder / "serve.log").read_text()
    site.patch(f"/deployments/{endurance['id']}/schedules/{weekly['id']}", {"active": False})
    assert site.prefect("deployment", "schedule", "clear", "finetune/finetune", "--accept-yes").returncode == 0


def test_a_deployment_that_somebody_paused_stays_paused(site: Site) -> None:
    """`mem serve` pauses what it serves when it ends and resumes that when it starts again, and nothing else."""
    names = ("doctor/doctor", "finetune/finetune")

    def paused() -> list[bool]:
        return [site.get(f"/deployments/name/{name}")["paused"] for name in names]

    doctor = site.get("/deployments/name/doctor/doctor")["id"]
    site.patch(f"/deployments/{doctor}", {"paused": True})
    assert paused() == [True, False]
    assert site.serving is not None
    site.serving.send_signal(signal.SIGTERM)
    assert site.serving.wait(120) == 0
    assert paused() == [True, True]
    site.start_serving()
    assert paused() == [True, False]
    assert "doctor/doctor stays paused" in (site.folder / "serve.log").read_text()
    site.patch(f"/deployments/{doctor}", {"paused": False})
