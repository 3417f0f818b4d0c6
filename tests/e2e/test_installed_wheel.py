"""MEM as other people have it: a wheel in an environment of its own, used from a folder that has `flows/` and `tasks/` of its own."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_200)]
ROOT = Path(__file__).parents[2]
REQUEST = """
run_id: elsewhere
store: ./runs
model: {source: preset:llama-nano}
data: {train: ["words.txt"], sequence_length: 16}
training: {max_steps: 20, segment_steps: 10, global_batch_size: 4, warmup_steps: 2}
"""
Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of an environment with MEM's wheel; the libraries that it needs are seen through a path file, MEM's own source is not."""
    base = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, base / "source", ignore=shutil.ignore_patterns(".venv*", ".git", "runs", "*.egg-info", "__pycache__"))
    run = {"check": True, "capture_output": True, "text": True}
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", base, base / "source"], **run)  # type: ignore[call-overload]
    shutil.rmtree(base / "source")
    venv.create(base / "env", with_pip=True)
    (wheel,) = base.glob("mem-*.whl")
    subprocess.run([base / "env/bin/python", "-m", "pip", "install", "-q", "--no-deps", wheel], **run)  # type: ignore[call-overload]
    (packages,) = (base / "env/lib").glob("python3.*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name in ("ninja", "prefect"):
        shutil.copy(Path(sys.executable).with_name(name), base / "env/bin" / name)
    return base / "env/bin"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where somebody works who has folders that are called like ours."""
    folder = tmp_path_factory.mktemp("work")
    for name in ("flows", "tasks", "deployments"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise ImportError('these are somebody else\\'s {name}')")
    (folder / "words.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    (folder / "request.yaml").write_text(REQUEST)
    return folder


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Nothing of the test process's own paths."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PREFECT_", "VIRTUAL_ENV"))}
    return {**kept, "MEM_HOME": str(tmp_path_factory.mktemp("home"))}


@pytest.fixture(scope="module")
def command(programs: Path, folder: Path, environ: dict[str, str]) -> Command:
    """Run a program of that environment in that folder."""

    def run(name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [programs / name, *arguments], cwd=folder, env=environ, capture_output=True, text=True, timeout=400, check=False
        )

    return run


def test_what_is_imported_is_the_wheel(command: Command, programs: Path) -> None:
    done = command("python", "-P", "-c", "import flows, tasks, mem_core; print(flows.__file__, tasks.__file__, mem_core.__file__)")
    assert done.returncode == 0, done.stderr
    assert all(str(programs.parent) in path for path in done.stdout.split())


def test_the_runbook_comes_along_with_what_it_links_to(programs: Path) -> None:
    shipped = programs.parent / "share/mem/deployments"
    links = re.findall(r"\]\(([\w./-]+)\)", (shipped / "RUNBOOK.md").read_text())
    assert "COMING_FROM_TRAINER.md" in links
    assert [link for link in links if not (shipped / link).exists()] == []


def test_every_verb_of_a_run_works(command: Command) -> None:
    trained = command("mem", "train", "request.yaml", "--json")
    assert trained.returncode == 0, trained.stderr[-3_000:]
    assert json.loads(trained.stdout)["applied_steps"] == 20
    verbs = ("doctor request.yaml", "status elsewhere", "runs", "logs elsewhere", "report elsewhere", "checkpoints list elsewhere")
    more = ("checkpoints verify elsewhere --deep", "checkpoints export elsewhere", "policy explain elsewhere", "policy replay elsewhere")
    for words in (*verbs, *more, "completion bash", "init --output new.yaml", "stop elsewhere"):
        done = command("mem", *words.split())
        assert done.returncode == 0, f"{words}: {done.stderr[-2_000:]}"
        assert "Traceback" not in done.stderr


@pytest.fixture
def served(programs: Path, folder: Path, environ: dict[str, str]) -> Iterator[str]:
    """`mem serve` on a port of its own; the address of its API."""
    log, answer = folder / "serve.log", folder / "serve.json"
    with log.open("w") as out, answer.open("w") as told:
        process = subprocess.Popen([programs / "mem", "serve", "--port", "0", "--json"], cwd=folder, env=environ, stderr=out, stdout=told)
    try:
        end = time.monotonic() + 240
        while not answer.read_text().endswith("\n"):
            assert process.poll() is None, log.read_text()[-3_000:]
            assert time.monotonic() < end, log.read_text()[-3_000:]
            time.sleep(0.5)
        yield json.loads(answer.read_text())["api_url"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def test_serve_finds_its_deployments_and_runs_one(served: str, folder: Path) -> None:
    with httpx.Client(base_url=served, timeout=60) as client:
        found = {item["name"]: item["id"] for item in client.post("/deployments/filter", json={}).json()}
        assert {"endurance", "finetune", "chaos-drill"} <= set(found)
        request = {"run_id": "served", "store": str(folder / "runs"), "data": {"train": [str(folder / "words.txt")], "sequence_length": 16},
                   "training": {"max_steps": 10, "segment_steps": 10, "global_batch_size": 4, "warmup_steps": 2}}  # fmt: skip
        made = client.post(f"/deployments/{found['endurance']}/create_flow_run", json={"parameters": {"request": request}}).json()
        end = time.monotonic() + 300
        while (state := client.get(f"/flow_runs/{made['id']}").json()["state"])["type"] not in ("COMPLETED", "FAILED", "CRASHED"):
            assert time.monotonic() < end, state
            time.sleep(1)
    assert state["type"] == "COMPLETED", state
    assert json.loads((folder / "runs/served/result.json").read_text())["applied_steps"] == 10
