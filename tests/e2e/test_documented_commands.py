"""Every command that README and RUNBOOK name is typed into a shell and ends as they say; one that `documented.py` lacks fails."""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from documented import DOCUMENTS, FENCE, ROOT, TABLE, documented_commands, of_kind, typed
from prefect_site import BIN, Site, wait_for

from mem_core.infrastructure.request.file import load_request
from mem_core.infrastructure.settings import Settings
from mem_core.runtime.ranks.local.processes import ForkServer
from mem_core.testing.driver import drive

REHEARSAL = "chaos: {kinds: [kill_rank, failed_allocation]}\n"
SMALL = """
run_id: small
store: ./runs
device: cpu
training: {max_steps: MAX_STEPS, segment_steps: 20, warmup_steps: 5}
"""


def test_every_documented_command_is_tried_and_nothing_else() -> None:
    """One way in for a new command: a line in `documented.py` that says how it is tried."""
    assert documented_commands() == set(TABLE)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_no_inline_code_runs_over_the_end_of_a_line(name: str) -> None:
    """Else commands would be cut where they are looked for."""
    text = FENCE.sub("", (ROOT / name).read_text(encoding="utf-8"))
    assert [line for line in text.splitlines() if line.count("`") % 2] == []


@pytest.mark.parametrize("command", of_kind("make"))
def test_every_make_target_has_a_recipe(command: str) -> None:
    """`make -n`: what it would do; the tests of the recipes' own commands are elsewhere."""
    done = subprocess.run([*command.split(), "-n"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert ".venv/bin/" in done.stdout


class Desk:
    """A folder like a checkout: `.venv`, `deployments`, and runs of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / ".venv").symlink_to(BIN.parent)
        (folder / "deployments").symlink_to(ROOT / "deployments")
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")},
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "HOME": str(folder),
            "MEM_HOME": str(Settings.from_environment().mem_home),
            "COLUMNS": "300",
        }
        self.type = functools.cache(self._type)

    def _type(self, line: str, timeout_s: float = 900) -> "subprocess.CompletedProcess[str]":
        """Typed into a shell there; the same line again is answered from memory."""
        return subprocess.run(
            ["bash", "-c", line], cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip

    def small(self, name: str, max_steps: int) -> None:
        """A request file of a run of a few seconds."""
        (self.folder / name).write_text(SMALL.replace("MAX_STEPS", str(max_steps)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Desk:
    """The run `demo`, some steps long and at its end."""
    desk = Desk(tmp_path_factory.mktemp("finished"))
    request = load_request(str(ROOT / "deployments" / "demo.yaml"), ["training.max_steps=30", "training.segment_steps=10"])
    drive(request.model_copy(update={"store": str(desk.folder / "runs")}), server=fork_server)
    return desk


@pytest.mark.integration
@pytest.mark.parametrize("command", of_kind("quick"))
def test_what_looks_at_a_run_or_a_machine(finished: Desk, command: str) -> None:
    """Typed beside a finished run."""
    done = finished.type(typed(command))
    assert done.returncode in TABLE[command].codes, done.stderr[-2000:]
    assert done.stdout or done.stderr or "dmesg" in command


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Path:
    """The folder of a run `small` with 20 steps behind it."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "small.yaml").write_text(SMALL.replace("MAX_STEPS", "20"))
    drive(load_request(str(folder / "small.yaml"), [f"store={folder}"]), server=fork_server)
    return folder / "small"


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """Empty but for request files."""
    desk = Desk(tmp_path)
    for name, max_steps in (("small.yaml", 20), ("more.yaml", 40), ("rehearsal.yaml", 300)):
        desk.small(name, max_steps)
    with (tmp_path / "rehearsal.yaml").open("a") as file:
        file.write(REHEARSAL)
    return desk


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("command", of_kind("trains"))
def test_what_trains(finished: Desk, small_run: Path, desk: Desk, command: str) -> None:
    """`more.yaml` goes on with the small run, `--deep` looks at the finished demo, the others begin anew."""
    line = typed(command)
    if "more.yaml" in line:
        shutil.copytree(small_run, desk.folder / "runs" / "small")
    if "--deep" in line:
        shutil.copytree(finished.folder / "runs", desk.folder / "runs")
    done = desk.type(line)
    assert done.returncode in TABLE[command].codes, done.stderr[-3000:]
    if "more.yaml" in line:
        result = json.loads((desk.folder / "runs" / "small" / "result.json").read_text())
        assert result["applied_steps"] == 40 if done.returncode == 0 else 20 < result["applied_steps"] < 40


@pytest.mark.slow
@pytest.mark.integration
def test_kill_it(desk: Desk) -> None:
    """README's block as it stands, with `make demo` as a smaller run and `sleep 60` as "until a checkpoint is proven"."""
    (block,) = [text for _, text in FENCE.findall((ROOT / "README.md").read_text()) if "kill -9" in text]
    assert {line.strip() for line in block.splitlines()} <= {*of_kind("kill it"), "make demo"}
    functions = (
        "set -m\n"
        "make() { mem train rehearsal.yaml --json; }\n"
        "sleep() { until compgen -G 'runs/small/checkpoints/step-*/verdict.json' > /dev/null; do command sleep 0.1; done; }\n"
    )
    done = desk.type(functions + block)
    assert done.returncode == 0, done.stderr[-3000:]
    (answer,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert answer["applied_steps"] == 300
    assert len(list((desk.folder / "runs" / "small" / "journal").glob("attempt-*.jsonl"))) == 2


class Shell(Desk):
    """A desk whose commands find a server; the flows that it starts have their home there."""

    def __init__(self, folder: Path, site: Site) -> None:
        super().__init__(folder)
        self.site = site
        mine = {name: self.environment[name] for name in ("PATH", "HOME", "MEM_HOME", "COLUMNS")}
        self.environment = {**site.environment, **mine}
        self.told: set[str] = set()

    def say(self, command: str, **placeholders: str) -> str:
        """Type one command of the table to its end; returns what it printed."""
        self.told.add(command)
        line = typed(command)
        for name, value in placeholders.items():
            line = line.replace(name, value)
        done = self._type(line)
        assert done.returncode in TABLE[command].codes, f"{line}: {done.stdout[-1000:]}{done.stderr[-2000:]}"
        return done.stdout

    @contextlib.contextmanager
    def stays(self, command: str, sign: str) -> Iterator[None]:
        """Type one that stays: until its sign of life, then with it, then Ctrl-C; it must end by itself."""
        self.told.add(command)
        log = self.folder / "stays.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"], cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=file,
                stderr=file, start_new_session=True,
            )  # fmt: skip
        try:
            wait_for(lambda: sign in log.read_text(errors="replace"), f"{sign!r} of {command}", 300)
            yield
            process.send_signal(signal.SIGINT)
            process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(1_800)
def test_what_needs_a_server(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A person's day with a worker: set it up, submit, look, cancel, retry, prove; then the same deployments with `mem serve`."""
    with Site.open(tmp_path_factory.mktemp("documented-site"), serving=False) as site:
        shell = Shell(tmp_path, site)
        shell.say("prefect work-pool create mem-process --type process")
        shell.say("prefect --no-prompt deploy --all --prefect-file deployments/prefect.yaml")
        made = site.get("/deployments/name/endurance/endurance")["parameter_openapi_schema"]
        said = shell.say("python -m flows.automations deployments/automations.yaml")
        assert ("created" in said, "endurance/endurance: its form is up to date" in said) == (True, True)
        form = site.get("/deployments/name/endurance/endurance")["parameter_openapi_schema"]
        assert (made["properties"]["run_id"]["title"], form["properties"]["run_id"]["title"]) == ("run_id", "Run id")
        shell.say("prefect config set PREFECT_SERVER_EVENTS_RETENTION_PERIOD=3d")
        with shell.stays("prefect worker start --pool mem-process", "started!"):
            submit_a = next(command for command in of_kind("server") if '"run_id": "a"' in command)
            assert site.wait_end(flow_run_of(shell.say(submit_a)))["state_name"] == "Completed"
            long = {"run_id": "long", "device": "cpu", "training.max_steps": 100_000, "training.segment_steps": 50}
            flow_run = site.run_deployment("endurance/endurance", overrides=long)
            proven = tmp_path / "mem" / "runs" / "long" / "checkpoints"
            wait_for(lambda: any(proven.glob("step-*/verdict.json")), "a proven checkpoint", 240)
            assert flow_run in shell.say("prefect flow-run ls --state Running")
            shell.say("prefect flow-run cancel ID", ID=flow_run)
            assert site.wait_end(flow_run)["state_name"] == "Cancelled"
            confirmed = "Flow run was cancelled successfully."  # see RUNBOOK: a retry before that is cancelled too
            wait_for(lambda: site.flow_run(flow_run)["state"]["message"] == confirmed, "the runner's word", 120)
            assert flow_run in shell.say("prefect flow-run ls")
            shell.say("prefect flow-run retry ID", ID=flow_run)
            wait_for(lambda: site.flow_run(flow_run)["run_count"] == 2, "the second start", 120)
            shell.say("prefect flow-run cancel ID", ID=flow_run)
            assert site.wait_end(flow_run)["state_name"] == "Cancelled"
            proof = flow_run_of(shell.say("prefect deployment run restore-drill/restore-drill -p run_id=RUN", RUN="a"))
            assert site.wait_end(proof)["state_name"] == "Completed"
        with shell.stays("mem serve --allow-host mem.example.org", "Ctrl-C stops"):
            submit = next(command for command in of_kind("server") if "p 'overrides={\"training" in command)
            assert site.wait_end(flow_run_of(shell.say(submit)))["state_name"] == "Completed"
        assert shell.told == set(of_kind("server"))


def flow_run_of(printed: str) -> str:
    """The id in what `prefect deployment run` prints."""
    found = re.search(r"UUID: ([0-9a-f-]{36})", printed)
    assert found is not None, printed
    return found.group(1)
