"""What people get wrong: each has its exit code, one clear message, and leaves nothing half-made behind."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from process_tree import events, marked_processes

from mem_core.domain.errors import DataError, StoreUnavailable
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.infrastructure.settings import Settings
from mem_core.testing.driver import drive as drive_alone

pytestmark = pytest.mark.integration
REQUEST = """
run_id: bad
store: ./store
device: cpu
training: {max_steps: 20, segment_steps: 10, warmup_steps: 2}
"""
HOLDER = """
import sys, time
from pathlib import Path
from mem_core.core.run.state_manager import StateManager
StateManager.acquire(Path(sys.argv[1]), "bad")
print("held", flush=True)
time.sleep(600)
"""
TABLE = {
    "missing file": (['data.train=["missing.jsonl"]'], 66, ["data.train", "missing.jsonl", "no such file"]),
    "empty file": (['data.train=["empty.jsonl"]'], 66, ["empty.jsonl", "empty"]),
    "not UTF-8": (['data.train=["latin.txt"]'], 66, ["latin.txt", "not UTF-8", "0xe9"]),
    "sequence too long": (["data.sequence_length=100000"], 64, ["data.sequence_length", "100000", "2048"]),
    "batch and ranks": (["training.global_batch_size=7", "parallel.num_ranks=2"], 64, ["training.global_batch_size", "7", "2"]),
    "zero_stage 4": (["parallel.zero_stage=4"], 64, ["parallel.zero_stage", "4", "0, 1, 2 or 3"]),
    "unknown key": (["training.max_step=10"], 64, ["training.max_step", "max_steps"]),
    "LoRA": (["model.lora={target_modules: [query]}"], 64, ["model.lora.target_modules", "query", "q_proj", "auto"]),
    "freeze": (["model.freeze=[h.0.*]"], 64, ["model.freeze", "h.0.*", "model.embed_tokens.weight"]),
    "offload at ZeRO 0": (
        ["parallel.zero_stage=0", "parallel.offload_optimizer=cpu"],
        64,
        ["parallel.offload_optimizer", "cpu", "1, 2 or 3"],
    ),
    "nobody to ask": (["policy.approval.required=true"], 64, ["policy.approval.required", "PREFECT_API_URL"]),
    "unknown fault": (["chaos.kinds=[nonsense]"], 64, ["chaos.kinds", "nonsense", "kill_rank"]),
    "not a number": (["training.learning_rate=nan"], 64, ["training.learning_rate", "nan"]),
    "a file in place of the store": (["store=./empty.jsonl"], 73, ["store", "empty.jsonl", "not a folder"]),
    "no CUDA": (["device=cuda"], 80, ["cuda_unavailable", "device: cpu"]),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the command is given: the request and files of every bad kind."""
    (tmp_path / "request.yaml").write_text(REQUEST)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"word " * 2_000 + b"caf\xe9\n")
    rows = [json.dumps({"text": f"row {number} with some words in it"}) for number in range(1, 1_201)]
    rows[999] = '{"text": "cut off'
    (tmp_path / "broken.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path


def check_refused(ended: Any, code: int, words: list[str]) -> None:
    """This exit code, one message that names all of these words, the same on standard output for machines."""
    assert ended.code == code, ended.err
    assert ended.err.count("mem: ") == 1, ended.err
    assert "Traceback" not in ended.err
    message = ended.err[ended.err.index("mem: ") :]
    assert [word for word in words if word not in message] == [], message
    assert ended.answer["exit_code"] == code
    assert ended.answer["status"] == "failed"


def check_nothing_half_made(store: Path) -> None:
    """No run was born, nothing is staged, nobody holds it, no process is left."""
    assert list(store.rglob("run.json")) == []
    assert list(store.rglob("step-*")) == []
    for lease in store.rglob("lease.json"):
        assert json.loads(lease.read_text())["released"] is True
    assert marked_processes(store / "bad") == []


@pytest.mark.parametrize("case", TABLE)
def test_a_wrong_request_is_refused_before_anything_is_made(case: str, folder: Path, mem: Callable[..., Any]) -> None:
    if case == "no CUDA" and Path("/dev/nvidia0").exists():
        pytest.skip("there is a CUDA device")
    overrides, code, words = TABLE[case]
    pairs = [word for pair in overrides for word in ("--set", pair)]
    check_refused(mem("train", "request.yaml", *pairs, "--json"), code, words)
    assert not (folder / "store").exists(), "not even the store was made"


def test_a_broken_row_far_into_the_file_is_named_by_its_line(folder: Path, mem: Callable[..., Any]) -> None:
    ended = mem("train", "request.yaml", "--set", 'data.train=["broken.jsonl"]', "--json")
    check_refused(ended, 66, ["data.train", "broken.jsonl:1000", "not valid JSON", "on_bad_row"])
    assert not (folder / "store").exists(), "the doctor has read that far: not even the store was made"


def test_a_broken_row_leaves_no_half_made_shards_in_the_cache(folder: Path) -> None:
    request = RuntimeRequest.model_validate(
        {"run_id": "bad", "store": str(folder / "store"), "device": "cpu", "data": {"train": [str(folder / "broken.jsonl")]}}
    )
    settings = Settings.from_environment(dict(Settings.from_environment().environ) | {"MEM_HOME": str(folder / "home")})
    with pytest.raises(DataError, match=r"broken\.jsonl:1000"):
        drive_alone(request, settings=settings)
    left = [path.name for path in (folder / "home" / "data").rglob("*") if path.is_file()]
    assert set(left) <= {".lock", "file-hashes.json"}
    check_nothing_half_made(folder / "store")


def test_a_run_that_another_process_holds_is_left_alone(folder: Path, mem: Callable[..., Any]) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder / "store")], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        before = sorted((path.name, path.stat().st_size) for path in (folder / "store").rglob("*"))
        ended = mem("train", "request.yaml", "--json")
        check_refused(ended, 76, ["holds run bad since", str(holder.pid), "mem stop bad --store ./store"])
        assert sorted((path.name, path.stat().st_size) for path in (folder / "store").rglob("*")) == before
        assert holder.poll() is None
    finally:
        holder.kill()
        holder.communicate()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system of a few megabytes; skips where nobody may mount."""
    mounted = []

    def mount(options: str) -> Path:
        place = tmp_path / "small"
        place.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"no file system may be mounted here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill_up(filler: Path) -> None:
    """Write until the disk is full."""
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for _ in range(1_000_000):
            file.write(bytes(4096))


@pytest.mark.parametrize(("options", "words"), [("size=4m,ro", ["store", "Read-only"]), ("size=64k", ["store"])])
def test_a_store_that_cannot_take_the_run_is_refused(
    options: str, words: list[str], folder: Path, mem: Callable[..., Any], small_disk: Callable[[str], Path]
) -> None:
    place = small_disk(options)
    check_refused(mem("train", "request.yaml", "--set", f"store={place}", "--json"), 73, [*words, str(place)])
    assert list(place.iterdir()) == []


def test_a_disk_that_fills_up_ends_the_run_and_space_lets_it_go_on(
    drive: Callable[..., RunResult], nano: Callable[..., RuntimeRequest], small_disk: Callable[[str], Path]
) -> None:
    """Full after the second segment: 73, the validated checkpoint untouched; with space the same run ends as if nothing had been."""
    training = {"max_steps": 40, "segment_steps": 10, "warmup_steps": 2}
    place = small_disk("size=64m")
    filler = place / "filler"

    def fill(session: Any, segment: Any) -> None:
        if segment.from_step == 20 and session.segments.standing.validated_step:
            fill_up(filler)

    with pytest.raises(StoreUnavailable) as caught:
        drive(nano("full", store=str(place), training=training), before_segment=fill)
    assert filler.exists()
    assert caught.value.exit_code == 73
    assert "checkpoint.keep_last" in caught.value.remedy
    assert str(place) in str(caught.value)
    assert [path for path in (place / "full" / "staging").rglob("*") if path.is_file()] == []
    filler.unlink()
    result = drive(nano("full", store=str(place), training=training))
    undisturbed = drive(nano("undisturbed", training=training))
    assert (result.weights_digest, result.trajectory_digest) == (undisturbed.weights_digest, undisturbed.trajectory_digest)
    started = [event["from_step"] for event in events(place / "full", attempt=2) if event["event"] == "segment_started"]
    assert min(started) >= 10
