"""The composition root: the one place where parts are wired into a run. Importing it acts on nothing."""

import contextlib
from pathlib import Path

from mem_core.core.doctor.environment_doctor import EnvironmentDoctor, error_of, with_failures
from mem_core.core.results.length import going_on_in_steps, in_steps, length_of, length_words
from mem_core.core.run.belonging import CheckpointWords, birth_of
from mem_core.core.run.holder import observe_holder
from mem_core.core.run.journal_check import check_journal
from mem_core.core.run.reconcile import reconcile
from mem_core.core.run.record import RunRecord, has_record
from mem_core.core.run.reshard import allow_other_shape, reshaped
from mem_core.core.run.state_manager import StateManager
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.errors import MemError
from mem_core.domain.events import DataPrepared, DoctorReported, Noted
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import DataSummary
from mem_core.domain.secrets import unsigned
from mem_core.infrastructure.machine.logs import remove_logs_of_the_dead
from mem_core.infrastructure.machine.observe import observe_machine
from mem_core.infrastructure.machine.store import is_remote, local_path
from mem_core.infrastructure.settings import Settings, child_environment
from mem_core.infrastructure.storage.disk import OsDisk
from mem_core.infrastructure.storage.opening import open_store
from mem_core.infrastructure.storage.port import Store
from mem_core.infrastructure.storage.presence import Patience
from mem_core.infrastructure.storage.retrying import RetryPolicy
from mem_core.runtime.checkpoint_manager.catalog import Catalog
from mem_core.runtime.checkpoint_manager.mirror.mirror import highest_attempt
from mem_core.runtime.data.values import PreparedData, PreparedRows
from mem_core.runtime.inference.sample_prompts import prompt_problems, sample_order
from mem_core.runtime.models.facts import describe_model
from mem_core.runtime.models.numbers import read_model_numbers
from mem_core.runtime.ranks.local.processes import ForkServer
from mem_core.runtime.ranks.local.ranks import LocalRanks
from mem_core.runtime.session.opening.advisers import advice_problems, planner_of, policy_engine
from mem_core.runtime.session.opening.already_there import Resuming, problems_of_run
from mem_core.runtime.session.opening.birth import born, with_allowed_changes
from mem_core.runtime.session.opening.compiling import born_compiled, compile_ahead
from mem_core.runtime.session.opening.engine_probe import probe_engine
from mem_core.runtime.session.opening.orphans import with_orphans
from mem_core.runtime.session.opening.prepare_service import (
    look_at_rows,
    prepare_evaluation,
    prepare_ops,
    prepare_tokens,
    try_compile,
    try_model,
)
from mem_core.runtime.session.opening.prepare_service import (
    report_on_data as report_on_data,
)
from mem_core.runtime.session.opening.refusals import refuse_other_inputs, refuse_other_life, refuse_other_machine
from mem_core.runtime.session.opening.stages import Examined, Held, Prepared, RunOrder
from mem_core.runtime.session.opening.wiring import wire, worker_spec
from mem_core.runtime.session.remote_service import RemoteService, fetch_record
from mem_core.runtime.session.results.result_log import logging_problems

CHAOS_LEFT_OUT = (
    "chaos is left out: training never hurts a run on purpose; mem drill REQUEST or the chaos-drill deployment does, "
    "and compares with a twin"
)


def live_root(request: RuntimeRequest, settings: Settings) -> Path:
    """The local folder that holds live run folders: the store itself, or a cache of it where the store is remote."""
    if not is_remote(request.store):
        return local_path(request.store)
    name = "".join(character if character.isalnum() else "-" for character in unsigned(request.store)).strip("-")
    return settings.mem_home / "live" / name


def examine(order: RunOrder) -> Examined:
    """Doctor: look, judge, report. Changes nothing.

    Raises:
        MemError: the first failing kind in the order of the exit codes.
    """
    options, request = order.options, order.request
    report = examine_only(
        request, order.settings, allow_reshard=options.allow_reshard, person_at_hand=options.person_at_hand, as_born=options.as_born
    )
    error = error_of(report)
    if error is not None:
        raise error
    return Examined(order, report, policy_engine(request.policy.file), planner_of(request, order.settings))


def examine_only(
    request: RuntimeRequest,
    settings: Settings,
    *,
    allow_reshard: bool = False,
    person_at_hand: bool | None = None,
    as_born: tuple[str, ...] = (),
) -> EnvironmentReport:
    """The doctor's report, whatever it says. `person_at_hand`: whether the run could put a question to a person; by default where a
    Prefect server is configured, since the one that a command starts for itself is seen by nobody. `as_born`: see `OpeningOptions`."""
    asked = settings.prefect_api_url is not None if person_at_hand is None else person_at_hand
    folder = live_root(request, settings) / request.run_id
    model = read_model_numbers(request.model.source, settings.model_cache_dir)  # first: what it refuses costs no process
    observations = observe_machine(request, settings, run_root=folder.parent, holder_of=observe_holder)
    observations = observations.model_copy(update={"engine": probe_engine(request, settings)})
    data = look_at_rows(request, settings, model.vocab_size, folder)
    report = EnvironmentDoctor().examine(request, observations, model, data, asked)
    report = with_orphans(report, lambda: remote_store(request, settings, RetryPolicy(attempts=1)), request.run_id)
    report = allow_other_shape(report) if allow_reshard else report
    resuming = Resuming(allow_reshard, as_born, settings.manifest_key, settings.model_cache_dir)
    problems = [*advice_problems(request, settings), *logging_problems(request, settings)]
    problems += prompt_problems(request, settings.model_cache_dir)
    return with_failures(report, *problems, *problems_of_run(folder, request, report, resuming))


def examine_deeply(request: RuntimeRequest, settings: Settings, *, person_at_hand: bool | None = None) -> EnvironmentReport:
    """The doctor's report, and the trial that a run makes of its model before it starts ranks; where nothing else stands in the way."""
    report = examine_only(request, settings, person_at_hand=person_at_hand)
    if error_of(report) is not None:
        return report
    environ = child_environment(settings, device=report.device, threads_per_rank=report.threads_per_rank)
    server = ForkServer.start(environ, settings.mem_home / "logs", preload=())
    try:
        try_compile(request, report.device, server)
        try_model(request, settings, report.dtype, server)
    except MemError as exc:
        return with_failures(report, exc)
    finally:
        server.close()
    return report


def acquire(examined: Examined) -> Held:
    """Take the run folder and start to import the heavy libraries in the background. What fails half-way gives everything back.

    Raises:
        RunHeld: another process holds the run. RequestError: it was born with other values.
    """
    order, environment = examined.order, examined.environment
    root, run_id = live_root(order.request, order.settings), order.request.run_id
    store = remote_store(order.request, order.settings)
    at_least = 1
    if store is not None and not has_record(root / run_id):
        fetch_record(store, run_id, root / run_id)
        at_least = highest_attempt(store, run_id) + 1
    with contextlib.ExitStack() as undo:
        patience = Patience(order.options.store_patience_s, order.progress.note)
        state = StateManager.acquire(root, run_id, at_least=at_least, patience=patience)
        undo.callback(state.release)
        record = state.record()
        request = order.request
        if record is not None:
            request = going_on_in_steps(record.length, record.request, request, order.options.as_born)
            request = reconcile(record.request, request, allow_reshard=order.options.allow_reshard, as_born=order.options.as_born)
            refuse_other_machine(record, environment)
        remote = RemoteService(store, state, request.checkpoint, lambda why: _stop(order, why)) if store is not None else None
        server = order.options.server or start_fork_server(request, order.settings, environment)
        undo.callback(server.close)
        server.log_into(state.folder / "logs")
        _journal_start(state, examined)
        undo.pop_all()
    return Held(examined, request, state, server, remote)


def _journal_start(state: StateManager, examined: Examined) -> None:
    environment, progress = examined.environment, examined.order.progress
    damage = check_journal(state.folder / "journal")
    state.start_attempt(None, note=f"{environment.device}, {environment.dtype}: {environment.device_reason}")
    state.emit(DoctorReported(report=environment))
    for text in (str(damage) if damage else "", CHAOS_LEFT_OUT if examined.order.request.chaos is not None else ""):
        if text:
            state.emit(Noted(text=text))
            progress.note(text)
    state.mend_record()


def _stop(order: RunOrder, why: str) -> None:
    order.progress.note(why)
    order.stop.ask("a newer attempt on another machine")


def remote_store(request: RuntimeRequest, settings: Settings, retry: RetryPolicy | None = None) -> Store | None:
    """Where copies go: the store itself where that is remote, else the mirror, else nowhere."""
    url = request.store if is_remote(request.store) else request.checkpoint.mirror
    if url is None:
        return None
    return open_store(
        url,
        settings.storage_options(url),
        retry=retry,
        refresh_options=lambda: settings.read_again().storage_options(url),
    )


def start_fork_server(request: RuntimeRequest, settings: Settings, environment: EnvironmentReport) -> ForkServer:
    """Begin the heavy imports for a run in the background; returns at once. Whoever starts it closes it, or hands it to `acquire`."""
    environ = child_environment(
        settings,
        device=environment.device,
        threads_per_rank=environment.threads_per_rank,
        max_jobs=environment.max_build_jobs,
        run_folder=live_root(request, settings) / request.run_id,
    )
    remove_logs_of_the_dead(settings.mem_home / "logs")
    return ForkServer.start(environ, settings.mem_home / "logs")


def prepare(held: Held) -> Prepared:
    """Ops, a trial of a model that this run has not trained yet, token shards; then wire the session.

    Raises:
        RequestError: the model cannot be trained. DataError, EnvironmentUnfit, StoreUnavailable.
    """
    order, environment, state = held.order, held.examined.environment, held.state
    record = state.record()
    born_now = record is None
    with order.ledger.bucket("op_build"):
        prepare_ops(held.request, order.settings, environment.device, environment.max_build_jobs, order.progress.note)
        try_compile(held.request, environment.device, held.server)
    if record is None:
        try_model(held.request, order.settings, environment.dtype, held.server)
    with order.ledger.bucket("data"):
        model = describe_model(held.request.model.source, order.settings.model_cache_dir)
        data = prepare_tokens(held.request, order.settings, model.vocab_size, order.progress, record)
        rows = PreparedRows(
            train=data,
            evaluation=prepare_evaluation(held.request, order.settings, model.vocab_size, order.progress, record),
            samples=sample_order(held.request, order.settings.model_cache_dir),
        )
    asked = in_steps(held.request, data.epoch_rows)
    if record is None:
        length = length_of(order.request, data.epoch_rows)
        numbers = read_model_numbers(held.request.model.source, order.settings.model_cache_dir)
        record = born(asked, environment, model.fingerprint, data.fingerprint, data.encoding)
        compiled = born_compiled(asked, numbers, environment, order.progress.note)
        record = record.model_copy(update={"length": length, "router_loss": numbers.router_loss, "compiled": compiled})
        _refuse_other_life(held, record)  # before the folder says whose it is
        state.write_record(record)
    else:
        refuse_other_inputs(record, data, model)
        _refuse_other_life(held, record)
    state.emit(DataPrepared(data=_summary(data, asked)))
    training = asked.training.model_copy(update={"schedule_steps": record.request.training.schedule_steps})
    request = asked.model_copy(update={"training": training})
    length = length_of(order.request, data.epoch_rows, before=record.length)
    record = with_allowed_changes(record, request).model_copy(update={"length": length})
    if length.epochs is not None:
        order.progress.note(length_words(length, request))
    shaped = reshaped(record, request, environment.threads_per_rank)
    with order.ledger.bucket("op_build"):
        spec = worker_spec(held, request, rows, shaped)
        compiled = compile_ahead(held.server, spec, order.progress.note, born=born_now)
    if spec.compiled:
        record, shaped = (each.model_copy(update={"compiled": compiled}) for each in (record, shaped))
    if record != state.record():
        state.write_record(record)
    ranks = LocalRanks(held.server, state.folder / "live")
    session = wire(held, ranks, request, rows, shaped)
    return Prepared(held, data, model, session)


def _summary(data: PreparedData, request: RuntimeRequest) -> DataSummary:
    """What is trained on, and how many updates see all of it once."""
    return data.summary().model_copy(update={"steps_per_epoch": data.epoch_rows / request.training.global_batch_size})


def _refuse_other_life(held: Held, record: RunRecord) -> None:
    key = held.order.settings.manifest_key
    catalog = Catalog(OsDisk(), held.state.folder, record.run_id, key.encode() if key else None)
    words = CheckpointWords(line.event for line in held.state.lines())
    for note in refuse_other_life(catalog, record.run_id, birth_of(record), words):
        held.state.emit(Noted(text=note))
        held.order.progress.note(note)
