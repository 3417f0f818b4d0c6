"""For the doctor: does transformers build this model, does DeepSpeed take this configuration? Asked in a process of its own.

Presets without raw DeepSpeed keys are known to work and cost nothing. The child writes into one temporary folder only, which goes
with it; it holds no weights, opens no device and ends within `LIMIT_S`.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from mem_core.domain.environment import EngineObservation, EngineProblem
from mem_core.domain.errors import MemError
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.settings import Settings, child_environment
from mem_core.runtime.models.folders import is_preset
from mem_core.runtime.session.opening.prepare_service import with_model_at_hand

LIMIT_S = 120.0
PROGRAM = "mem_core.runtime.deepspeed.programs.probe_engine"
_SHOWN_LINES = 3


def probe_engine(request: RuntimeRequest, settings: Settings, limit_s: float = LIMIT_S, program: str = PROGRAM) -> EngineObservation | None:
    """What was found; None where nothing had to be asked, or the model is not there (which others say). `program` is a module."""
    model, config = not is_preset(request.model.source), bool(request.deepspeed)
    if not (model or config):
        return None
    try:
        source = with_model_at_hand(request, settings).model.source
    except MemError:
        return None
    dtype = "float32" if request.model.dtype == "auto" else request.model.dtype
    if model:
        source = str(Path(source).absolute())  # the child stands in a folder of its own
    asked = request.model_dump(mode="json") | {"model": request.model.model_dump(mode="json") | {"source": source}}
    order = json.dumps({"request": asked, "dtype": dtype, "model": model, "config": config})
    with tempfile.TemporaryDirectory(prefix="mem-probe-", ignore_cleanup_errors=True) as folder:
        names = ("TMPDIR", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "HF_HOME")
        extra = dict.fromkeys(names, folder) | {"PYTHONDONTWRITEBYTECODE": "1"}
        environment = child_environment(settings, device="cpu", extra=extra)
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", program], input=order, env=environment, cwd=folder,
                capture_output=True, text=True, errors="replace", timeout=limit_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return EngineObservation(unknown=f"no answer within {limit_s:.0f} s")
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
    problems = tuple(EngineProblem(field=field, problem=problem, remedy=remedy) for field, problem, remedy in answer["problems"])
    return EngineObservation(architecture=answer.get("architecture", ""), attention=answer.get("attention", ""), problems=problems)
