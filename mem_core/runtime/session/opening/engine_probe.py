"""For the doctor: does transformers build this model, does DeepSpeed take this configuration? Asked in a process of its own.

Presets that are trained whole, without raw DeepSpeed keys, are known to work and cost nothing. The child writes into one temporary
folder only, which goes with it; it holds no weights, opens no device and ends within `LIMIT_S`.

A start asks twice within seconds, before the flow and inside it. The second time the first answer counts, for as long as a start takes
and while nothing that decides it has changed; a child that could not answer is asked again.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from mem_core.domain.environment import EngineObservation, EngineProblem
from mem_core.domain.errors import MemError
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.settings import Settings, child_environment
from mem_core.runtime.models.folders import is_preset
from mem_core.runtime.session.opening.prepare_service import with_model_at_hand

LIMIT_S = 120.0
PROGRAM = "mem_core.runtime.deepspeed.programs.probe_engine"
REMEMBERED_S = 300.0
_SHOWN_LINES = 3
_SAID = ("field", "problem", "remedy", "bound", "exit_code")
FileStamp = tuple[str, int, int, int, int]


def probe_engine(request: RuntimeRequest, settings: Settings, limit_s: float = LIMIT_S, program: str = PROGRAM) -> EngineObservation | None:
    """What was found; None where nothing had to be asked, or the model is not there (which others say). `program` is a module."""
    partly = request.model.lora is not None or bool(request.model.freeze)
    preset = is_preset(request.model.source)
    model, config = partly or not preset, bool(request.deepspeed)
    if not (model or config):
        return None
    try:
        source = with_model_at_hand(request, settings).model.source
    except MemError:
        return None
    dtype = "float32" if request.model.dtype == "auto" else request.model.dtype
    if not preset:
        source = str(Path(source).absolute())  # the child stands in a folder of its own
    asked = request.model_dump(mode="json") | {"model": request.model.model_dump(mode="json") | {"source": source}}
    order = json.dumps({"request": asked, "dtype": dtype, "model": model, "config": config})
    files = () if preset else stamps_of(Path(source))
    try:
        return _asked(Order(order, program, limit_s, settings), files, int(time.monotonic() // REMEMBERED_S))
    except _NoAnswer as exc:
        return exc.observation


@dataclass(frozen=True, eq=True)
class Order:
    """What a child is asked, and in which environment: with the stamps of the model's files all that its answer depends on."""

    text: str
    program: str
    limit_s: float
    settings: Settings = field(compare=False)
    environ: tuple[tuple[str, str], ...] = field(init=False, repr=False)  # keys may be among them

    def __post_init__(self) -> None:
        # What Prefect is told changes between the two looks of one start, and no child reads it.
        told = ((name, value) for name, value in self.settings.environ.items() if not name.startswith("PREFECT_"))
        object.__setattr__(self, "environ", tuple(sorted(told)))


class _NoAnswer(Exception):
    """Says nothing about the request, so that nobody remembers it."""

    def __init__(self, observation: EngineObservation) -> None:
        super().__init__(observation.unknown)
        self.observation = observation


@lru_cache(maxsize=8)
def _asked(order: Order, files: tuple[FileStamp, ...], period: int) -> EngineObservation:
    del files, period
    answer = _ask_child(order)
    if answer.unknown:
        raise _NoAnswer(answer)
    return answer


def stamps_of(folder: Path) -> tuple[FileStamp, ...]:
    """Name, inode, size and times of every file below a model's folder: another one of them is another model."""
    found: list[FileStamp] = []
    with contextlib.suppress(OSError):
        for path in sorted(folder.rglob("*")):
            seen = path.stat()
            found.append((str(path), seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns))
    return tuple(found)


def _ask_child(order: Order) -> EngineObservation:
    with tempfile.TemporaryDirectory(prefix="mem-probe-", ignore_cleanup_errors=True) as folder:
        names = ("TMPDIR", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "HF_HOME")
        extra = dict.fromkeys(names, folder) | {"PYTHONDONTWRITEBYTECODE": "1"}
        environment = child_environment(order.settings, device="cpu", extra=extra)
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", order.program], input=order.text, env=environment, cwd=folder,
                capture_output=True, text=True, errors="replace", timeout=order.limit_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return EngineObservation(unknown=f"no answer within {order.limit_s:.0f} s")
        except OSError as exc:
            return EngineObservation(unknown=f"no process could be started: {exc}")
    return read_answer(done.returncode, done.stdout, done.stderr)


def read_answer(code: int, out: str, err: str) -> EngineObservation:
    """From what the child printed. One that a signal ended says nothing about the request; one that failed at its imports does."""
    if code < 0:
        return EngineObservation(unknown=f"the process was ended by signal {-code}")
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    try:
        answer = json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        return EngineObservation(died=" | ".join(lines[-_SHOWN_LINES:])[-900:] or f"exit code {code}")
    problems = tuple(EngineProblem(**dict(zip(_SAID, problem, strict=False))) for problem in answer["problems"])
    known = {name: answer[name] for name in ("architecture", "attention", "num_trainable_parameters", "left_out") if name in answer}
    return EngineObservation(problems=problems, **known)
