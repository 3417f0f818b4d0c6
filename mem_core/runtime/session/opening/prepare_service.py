"""What must be ready before the first step: DeepSpeed's ops and the token shards. Each is made once and found again at once."""

import contextlib
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mem_core.core.results.data_report import DataReport
from mem_core.core.results.length import epochs_of, in_steps
from mem_core.core.run.record import RunRecord, read_record
from mem_core.domain.environment import DataNumbers
from mem_core.domain.errors import DataError, EnvironmentUnfit, MemError, NoValidCheckpoint, RequestError
from mem_core.domain.request import DataSection, RuntimeRequest
from mem_core.infrastructure.machine.build import executable_problem, remove_stale_locks
from mem_core.infrastructure.settings import Settings, child_environment
from mem_core.infrastructure.telemetry.progress import Progress
from mem_core.runtime.data.encoding.prepare import prepare_data
from mem_core.runtime.data.look.first_look import look_at_data
from mem_core.runtime.data.look.show_process import first_rows
from mem_core.runtime.data.values import PreparedData
from mem_core.runtime.deepspeed.programs.build_ops import ops_needed
from mem_core.runtime.deepspeed.programs.build_watch import BuildWatch, build_command, watch_build
from mem_core.runtime.models.compile_trial import ENTRY as COMPILE_ENTRY
from mem_core.runtime.models.encoding import CURRENT_RULES, rules_of
from mem_core.runtime.models.facts import describe_model
from mem_core.runtime.models.folders import at_hand, is_preset
from mem_core.runtime.models.trial import ENTRY as TRIAL_ENTRY
from mem_core.runtime.models.trial import Trial, answer_of
from mem_core.runtime.ranks.port import Helpers
from mem_core.runtime.session.opening.preparing_watch import PreparingWatch

TRIAL_DEADLINE_S = 300.0
TRIAL_BYTES_PER_S = 20e6  # slower than any disk that training should use


def prepare_ops(request: RuntimeRequest, settings: Settings, device: str, max_jobs: int, note: Callable[[str], None]) -> None:
    """Remove stale build locks, then build what this request's engine needs, in a process of its own with a deadline.

    Raises:
        EnvironmentUnfit: the build failed (with the compiler's last lines) or ran past its deadline (with who holds the lock).
    """
    refuse_unexecutable(request, settings)
    folder = settings.torch_extensions_dir
    for lock in remove_stale_locks(folder):
        note(f"removed a build lock left by a killed build: {lock}")
    names = ops_needed(request.deepspeed)
    if not names:
        return
    limit_min = BuildWatch().deadline_s / 60
    note(f"building DeepSpeed ops once: {', '.join(names)} (up to {limit_min:.0f} minutes; later starts find them ready)")
    environment = child_environment(settings, device="cuda" if device == "cuda" else "cpu", max_jobs=max_jobs)
    watch_build(build_command(names), environment, folder, note)


def refuse_unexecutable(request: RuntimeRequest, settings: Settings) -> None:
    """What is compiled is loaded from MEM's folders: asked before the first step, where the answer has a name.

    Raises:
        EnvironmentUnfit: a folder that this request's compiled code would be loaded from takes none.
    """
    folders = [settings.compile_cache_dir] if request.model.compile == "on" else []
    folders += [settings.torch_extensions_dir] if ops_needed(request.deepspeed) else []
    for folder in folders:
        problem = executable_problem(folder)
        if problem:
            raise EnvironmentUnfit(
                f"compiled code cannot be loaded from this folder: {problem} (is it mounted noexec, or not writable?)",
                field="MEM_HOME",
                value=folder,
                remedy="Set MEM_HOME to a folder that allows it, or use model.compile: off.",
            )


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
    deadline_s = TRIAL_DEADLINE_S + facts.stored_bytes / TRIAL_BYTES_PER_S
    unfit = _Unfit("the model could not be tried", "model.source", request.model.source, "memory may be short for this model.")
    error: MemError | None = _tried(helpers, TRIAL_ENTRY, "model-trial.log", trial.model_dump_json(), deadline_s, unfit)
    if error is not None:
        raise error


def try_compile(request: RuntimeRequest, device: str, helpers: Helpers) -> None:
    """Compile a small function once in a process beside the driver, where the request asks for compiled code.

    Raises:
        EnvironmentUnfit: it cannot be compiled or loaded, in the compiler's words, or the process died or never answered.
    """
    if request.model.compile != "on":
        return
    remedy = "Mend the compiler (CXX, g++ and ninja) or the folder MEM_HOME, or use model.compile: off."
    unfit = _Unfit("compiling could not be tried", "model.compile", "on", remedy)
    problem: str = _tried(helpers, COMPILE_ENTRY, "compile-trial.log", device, TRIAL_DEADLINE_S, unfit)
    if problem:
        raise EnvironmentUnfit(f"torch.compile does not work here: {problem}", field="model.compile", value="on", remedy=remedy)


@dataclass(frozen=True)
class _Unfit:
    """What is said where a trial itself fails."""

    problem: str
    field: str
    value: str
    remedy: str


def _tried(helpers: Helpers, entry: str, log_name: str, order: str, deadline_s: float, unfit: _Unfit) -> Any:
    """The answer of a process that is asked once and ended. Raises EnvironmentUnfit."""
    child = helpers.fork(entry, log_name)
    try:
        child.wait_forked(TRIAL_DEADLINE_S)
        child.connection.send(order)
        return answer_of(child.connection, deadline_s)
    except (EOFError, OSError, TimeoutError) as exc:
        raise EnvironmentUnfit(
            f"{unfit.problem}: its process {'never answered' if isinstance(exc, TimeoutError) else 'died'}",
            field=unfit.field,
            value=unfit.value,
            remedy=f"Read logs/{log_name}; {unfit.remedy}",
        ) from exc
    finally:
        child.signal_group(signal.SIGKILL)
        child.close()


def with_model_at_hand(request: RuntimeRequest, settings: Settings) -> RuntimeRequest:
    """What ranks are given: they never fetch a model themselves."""
    source = at_hand(request.model.source, settings.model_cache_dir)
    return request.model_copy(update={"model": request.model.model_copy(update={"source": source})})


def look_at_rows(request: RuntimeRequest, settings: Settings, vocab_size: int | None, run_folder: Path) -> DataNumbers:
    """The doctor's look at the data, under the rules of the run that is in `run_folder`, where one is."""
    record = None
    with contextlib.suppress(NoValidCheckpoint):  # whose record is damaged is told by whoever takes the run
        record = read_record(run_folder)
    rules = CURRENT_RULES if record is None else rules_of(record.encoding)
    tokenizer = at_hand(request.model.source, settings.model_cache_dir)
    found = look_at_data(request.data, tokenizer, vocab_size, settings.data_cache_dir, rules)
    for name, section in evaluation_sections(request).items():
        found = _with_set(found, name, look_at_data(section, tokenizer, vocab_size, settings.data_cache_dir, rules))
    return found


def _with_set(found: DataNumbers, name: str, other: DataNumbers) -> DataNumbers:
    """What stands in the way of a set that is evaluated, beside what stands in the way of the rows that are trained on."""
    field = f"evaluation.sets.{name}"
    problems = [problem.replace("data.train", field, 1) for problem in other.problems]
    if not other.problems and other.refusal is None and not any(file.size_bytes for file in other.files):
        problems.append(f"{field}: no rows, its files are empty")
    refusal = found.refusal or other.refusal
    return found.model_copy(update={"problems": (*found.problems, *problems), "refusal": refusal})


def prepare_tokens(
    request: RuntimeRequest, settings: Settings, vocab_size: int | None, progress: Progress, record: RunRecord | None
) -> PreparedData:
    """Token shards of the request's data, with a progress bar while they are made. A run with a `record` goes on under its own rules.

    Raises DataError and its kin.
    """
    rules = CURRENT_RULES if record is None else rules_of(record.encoding)
    tokenizer = at_hand(request.model.source, settings.model_cache_dir)
    return prepare_data(
        request.data, request.training.seed, tokenizer, vocab_size, settings.data_cache_dir, PreparingWatch(progress), rules
    )


def report_on_data(request: RuntimeRequest, settings: Settings, num_rows: int, progress: Progress) -> DataReport:
    """What the request's rows come to, once they are prepared, and the first of them.

    Raises:
        DataError and its kin.
    """
    embeddings = describe_model(request.model.source, settings.model_cache_dir).vocab_size
    source = at_hand(request.model.source, settings.model_cache_dir)
    data = prepare_tokens(request, settings, embeddings, progress, None)
    steps = in_steps(request, data.epoch_rows).training.max_steps
    batch = request.training.global_batch_size
    return DataReport(
        summary=data.summary().model_copy(update={"steps_per_epoch": data.epoch_rows / batch}),
        fingerprint=data.fingerprint,
        sequence_length=request.data.sequence_length,
        vocab_size=data.vocab_size,
        num_embeddings=embeddings,
        max_token_id=data.max_token_id,
        steps=steps,
        epochs=epochs_of(steps, data.epoch_rows, batch),
        rows=first_rows(data, source, CURRENT_RULES, num_rows) if num_rows else (),
    )


def prepare_evaluation(
    request: RuntimeRequest, settings: Settings, vocab_size: int | None, progress: Progress, record: RunRecord | None
) -> dict[str, PreparedData]:
    """Token shards of the sets that are evaluated besides, under the same rules as the rows that are trained on.

    Raises:
        DataError and its kin, naming the set.
    """
    prepared: dict[str, PreparedData] = {}
    for name, section in evaluation_sections(request).items():
        try:
            asked = request.model_copy(update={"data": section})
            prepared[name] = prepare_tokens(asked, settings, vocab_size, progress, record)
        except (DataError, RequestError) as exc:
            field = f"evaluation.sets.{name}"
            raise type(exc)(exc.problem, field=field, value=exc.value, bound=exc.bound, remedy=exc.remedy) from exc
    return prepared


def evaluation_sections(request: RuntimeRequest) -> dict[str, DataSection]:
    """Each set of the request as if it were what is trained on, with nothing held out of it."""
    return {name: request.data.model_copy(update={"train": files, "validation": None}) for name, files in request.evaluation.sets.items()}
