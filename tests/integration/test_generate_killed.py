"""`mem generate` as people start it: killed again and again, under limits, and gone on with by the same command."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mem_core.testing.model_folders import model_folder

pytestmark = pytest.mark.integration
MEM = Path(sys.executable).with_name("mem")
LIMIT_S = 240.0
NUM_KILLS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of some thousand numbers, and five hundred prompts."""
    root = tmp_path_factory.mktemp("generate")
    model_folder(root / "llama", "llama")
    draws = random.Random(1)
    rows = [{"id": number, "prompt": "a lazy dog " * draws.randint(1, 30)} for number in range(500)]
    for name, count in (("few.jsonl", 60), ("many.jsonl", 500)):
        (root / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows[:count]))
    return root


def started(folder: Path, prompts: str, output: str, *more: str) -> "subprocess.Popen[str]":
    command = [MEM, "generate", "llama", "--prompts", prompts, "--output", output, "--device", "cpu", "--json", *more]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: "subprocess.Popen[str]", code: int = 0) -> dict[str, Any]:
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code, err[-3_000:]
    return json.loads(out)


def child_of(process: "subprocess.Popen[str]") -> int | None:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[0]) if children else None


def wait_for(seen: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not seen():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def num_kept(folder: Path, output: str) -> int:
    with contextlib.suppress(FileNotFoundError):
        return (folder / f"{output}.partial" / "answers.jsonl").read_bytes().count(b'"end"')
    return 0


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_child_and_an_owner_that_are_killed_leave_the_same_answers(folder: Path) -> None:
    options = ("--batch-rows", "6", "--max-new-tokens", "40")
    undisturbed = started(folder, "few.jsonl", "quiet.jsonl", *options)
    assert ended(undisturbed)["rows"] == 60
    first = started(folder, "few.jsonl", "killed.jsonl", *options)
    wait_for(lambda: num_kept(folder, "killed.jsonl") >= 2)
    child = child_of(first)
    assert child is not None
    os.kill(child, signal.SIGKILL)
    wait_for(lambda: num_kept(folder, "killed.jsonl") >= 4)
    first.kill()
    _, said = first.communicate()
    assert "killed by SIGKILL; another one goes on" in said
    assert not (folder / "killed.jsonl").exists()
    done = ended(started(folder, "few.jsonl", "killed.jsonl", *options))
    assert (done["rows"], done["shrunk"], done["already_complete"]) == (60, 0, False)
    assert (folder / "killed.jsonl").read_bytes() == (folder / "quiet.jsonl").read_bytes()
    assert not (folder / "killed.jsonl.partial").exists()
    assert ended(started(folder, "few.jsonl", "killed.jsonl", *options))["already_complete"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_five_kills_at_any_moment_and_five_hundred_answers_none_twice(folder: Path, seed: int) -> None:
    options = ("--batch-rows", "10", "--max-new-tokens", "24", "--temperature", "1.0", "--seed", "3")
    quiet, output = "quiet-500.jsonl", f"killed-{seed}.jsonl"
    began_s = time.monotonic()
    if not (folder / quiet).exists():
        ended(started(folder, "many.jsonl", quiet, *options))
    span_s = time.monotonic() - began_s if seed == 0 else 30.0
    draws = random.Random(seed)
    for _ in range(NUM_KILLS):
        process = started(folder, "many.jsonl", output, *options)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(draws.uniform(0.1, 0.6) * span_s)
        target = child_of(process) if process.poll() is None and draws.random() < 0.4 else process.pid
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(target or process.pid, signal.SIGKILL)
        time.sleep(draws.uniform(0, 1))
        process.kill()
        process.communicate()
    done = ended(started(folder, "many.jsonl", output, *options))
    assert done["rows"] == 500
    assert [row["id"] for row in rows_of(folder / output)] == list(range(500))
    assert (folder / output).read_bytes() == (folder / quiet).read_bytes()


LIMITED = """
import resource, sys
from pathlib import Path
import mem_core.runtime.inference.generate_process as program
from mem_core.runtime.inference.supervise import GenerateJob
from mem_core.core.inference.composition import Sizing

mapped = program.CpuDevice().probe
def limited(model, dtype, kind, open_model=program.open_model):
    opened = open_model(model, dtype, kind)
    now = mapped().usage().mapped_bytes
    resource.setrlimit(resource.RLIMIT_AS, (now + int(sys.argv[1]), resource.RLIM_INFINITY))
    return opened
program.open_model = limited
program.main()
"""


@pytest.mark.slow
def test_under_an_address_space_that_only_small_batches_survive_every_row_is_answered(folder: Path, tmp_path: Path) -> None:
    """The limit falls on the answering process once the model is there; allocations really fail, or are foreseen to."""
    from mem_core.domain.results.generation import GenerateOrder, Sampling
    from mem_core.runtime.inference.supervise import GenerateJob, identity_of
    from mem_core.runtime.inference.work_folder import WorkFolder

    wide = model_folder(tmp_path / "wide", "llama", hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
    order = GenerateOrder(
        model=str(wide), prompts=str(folder / "few.jsonl"), output=str(tmp_path / "out.jsonl"), device="cpu", batch_rows=60,
        sampling=Sampling(max_new_tokens=8),
    )  # fmt: skip
    work = WorkFolder(Path(order.output))
    with work.held():
        work.begin(identity_of(order))
    job = GenerateJob(order=order, parent_pid=os.getpid()).model_dump_json()
    done = _with_input([sys.executable, "-P", "-c", LIMITED, str(250 << 20)], job)
    answer = json.loads(done.splitlines()[-1])
    assert "answer" in answer, answer
    assert answer["answer"]["rows"] == 60
    sizes = [len(batch.rows) for batch in work.read().composed.values()]
    assert max(sizes) < 60


def _with_input(command: Sequence[str], line: str) -> str:
    """The program ends at the end of its input, so that is left open until it has answered."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
        return process.stdout.read()
