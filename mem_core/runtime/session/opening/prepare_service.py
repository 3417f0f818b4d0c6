"""What must be ready before the first step: DeepSpeed's ops and the token shards. Each is made once and found again at once."""

import signal
import subprocess
import sys
from collections.abc import Callable

from mem_core.domain.errors import EnvironmentUnfit
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.machine.build import find_stale_locks, remove_stale_locks
from mem_core.infrastructure.settings import Settings, child_environment
from mem_core.infrastructure.telemetry.progress import PreparingView, Progress
from mem_core.runtime.data.encoding.prepare import prepare_data
from mem_core.runtime.data.values import PreparedData, PrepareProgress
from mem_core.runtime.deepspeed.programs.build_ops import ops_needed
from mem_core.runtime.models.facts import describe_model
from mem_core.runtime.models.folders import at_hand, is_preset
from mem_core.runtime.models.trial import ENTRY as TRIAL_ENTRY
from mem_core.runtime.models.trial import Trial, answer_of
from mem_core.runtime.ranks.port import Helpers

BUILD_DEADLINE_S = 1_200.0
TRIAL_DEADLINE_S = 300.0
TRIAL_BYTES_PER_S = 20e6  # slower than any disk that training should use


def prepare_ops(request: RuntimeRequest, settings: Settings, device: str, max_jobs: int, note: Callable[[str], None]) -> None:
    """Remove stale build locks, then build what this request's engine needs, in a process of its own with a deadline.

    Raises:
        EnvironmentUnfit: the build failed (with the compiler's last lines) or ran past its deadline.
    """
    folder = settings.torch_extensions_dir
    for lock in remove_stale_locks(folder):
        note(f"removed a build lock left by a killed build: {lock}")
    names = ops_needed(request.deepspeed)
    if not names:
        return
    note(f"building DeepSpeed ops once: {', '.join(names)} (up to {BUILD_DEADLINE_S / 60:.0f} minutes; later starts find them ready)")
    environment = child_environment(settings, device="cuda" if device == "cuda" else "cpu", max_jobs=max_jobs)
    try:
        subprocess.run(
            [sys.executable, "-m", "mem_core.runtime.deepspeed.programs.build_ops", *names],
            env=environment, check=True, capture_output=True, text=True, timeout=BUILD_DEADLINE_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired as exc:
        locks = ", ".join(str(lock.path) for lock in find_stale_locks(folder))
        raise EnvironmentUnfit(
            f"building {', '.join(names)} took over {BUILD_DEADLINE_S / 60:.0f} minutes",
            value=locks or None,
            remedy=f"Look for a build lock under {folder} and remove it, then start again.",
        ) from exc
    except subprocess.CalledProcessError as exc:
        lines = (exc.stdout + exc.stderr).strip().splitlines()[-15:]
        raise EnvironmentUnfit(
            f"building {', '.join(names)} failed: {' | '.join(lines)[-1500:]}", remedy="Mend the compiler named above, then start again."
        ) from exc


def try_model(request: RuntimeRequest, settings: Settings, dtype: str, helpers: Helpers) -> None:
    """Build the request's model once in a process beside the driver, before any rank is started. Presets need none.

    Raises:
        RequestError: its folder cannot be trained, in the words of what refused it. EnvironmentUnfit: the process died or never answered.
    """
    if is_preset(request.model.source):
        return
    facts = describe_model(request.model.source, settings.model_cache_dir)
    trial = Trial(
        model=request.model,
        sequence_length=request.data.sequence_length,
        dtype=dtype,
        activation_checkpointing=request.model.activation_checkpointing == "on",
        cache_dir=settings.model_cache_dir,
    )
    child = helpers.fork(TRIAL_ENTRY, "model-trial.log")
    try:
        child.wait_forked(TRIAL_DEADLINE_S)
        child.connection.send(trial.model_dump_json())
        error = answer_of(child.connection, TRIAL_DEADLINE_S + facts.stored_bytes / TRIAL_BYTES_PER_S)
    except (EOFError, OSError, TimeoutError) as exc:
        raise EnvironmentUnfit(
            f"the model could not be tried: its process {'never answered' if isinstance(exc, TimeoutError) else 'died'}",
            field="model.source",
            value=request.model.source,
            remedy="Read logs/model-trial.log; memory may be short for this model.",
        ) from exc
    finally:
        child.signal_group(signal.SIGKILL)
        child.close()
    if error is not None:
        raise error


def with_model_at_hand(request: RuntimeRequest, settings: Settings) -> RuntimeRequest:
    """What ranks are given: they never fetch a model themselves."""
    source = at_hand(request.model.source, settings.model_cache_dir)
    return request.model_copy(update={"model": request.model.model_copy(update={"source": source})})


def prepare_tokens(request: RuntimeRequest, settings: Settings, vocab_size: int | None, progress: Progress) -> PreparedData:
    """Token shards of the request's data, with a progress bar while they are made. Raises DataError and its kin."""

    def show(done: PrepareProgress) -> None:
        progress.update(
            PreparingView(
                done_bytes=done.bytes_done, total_bytes=done.bytes_total, num_rows=done.rows, num_tokens=done.tokens, source=done.phase
            )
        )

    tokenizer = at_hand(request.model.source, settings.model_cache_dir)
    return prepare_data(request.data, request.training.seed, tokenizer, vocab_size, settings.data_cache_dir, show)
