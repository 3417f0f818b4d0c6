"""The composition root: the one place where parts are wired into a run. Importing it acts on nothing."""

import time
from dataclasses import replace
from pathlib import Path

from mem_core.core.doctor.environment_doctor import EnvironmentDoctor, error_of
from mem_core.core.run.goodput import GoodputLedger
from mem_core.core.run.holder import observe_holder
from mem_core.core.run.journal_check import check_journal
from mem_core.core.run.reconcile import reconcile
from mem_core.core.run.record import RunRecord, has_record
from mem_core.core.run.reshard import allow_other_shape, reshaped, shape_of, with_shape
from mem_core.core.run.state_manager import StateManager
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.events import DoctorReported, Noted
from mem_core.domain.plan import MemoryPlan
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.machine.observe import observe_machine
from mem_core.infrastructure.machine.store import is_remote, local_path
from mem_core.infrastructure.planner.background import BackgroundAdvice
from mem_core.infrastructure.planner.build import build_planner
from mem_core.infrastructure.request.errors import refuse_passwords
from mem_core.infrastructure.settings import Settings, child_environment
from mem_core.infrastructure.storage.opening import open_store
from mem_core.infrastructure.storage.port import Store
from mem_core.infrastructure.storage.retrying import RetryPolicy
from mem_core.infrastructure.telemetry.progress import NoProgress
from mem_core.infrastructure.telemetry.progress import Progress as ProgressPort
from mem_core.runtime.checkpoint_manager.mirror.mirror import highest_attempt
from mem_core.runtime.data.reading.sniff import sniff_data
from mem_core.runtime.data.values import PreparedData
from mem_core.runtime.models.facts import ModelFacts, describe_model
from mem_core.runtime.models.numbers import read_model_numbers
from mem_core.runtime.ranks.local.processes import ForkServer
from mem_core.runtime.session.opening import RunDraft, known
from mem_core.runtime.session.orphans import with_orphans
from mem_core.runtime.session.prepare_service import prepare_ops, prepare_tokens
from mem_core.runtime.session.refusals import refuse_other_inputs, refuse_other_machine
from mem_core.runtime.session.remote_service import RemoteService, fetch_record
from mem_core.runtime.session.run_session import policy_engine
from mem_core.runtime.session.segment_service import StopFlag
from mem_core.runtime.session.wiring import wire


def draft_run(
    request: RuntimeRequest, progress: ProgressPort | None = None, settings: Settings | None = None, *, allow_reshard: bool = False
) -> RunDraft:
    """Begin to open a run; nothing is touched yet. `allow_reshard`: its newest checkpoint may be converted to other ranks or ZeRO stage."""
    draft = RunDraft(request, settings or Settings.from_environment(), progress or NoProgress(), StopFlag(), GoodputLedger())
    return replace(draft, on_built=next(iter(_ON_BUILT), ""), allow_reshard=allow_reshard)


_ON_BUILT: list[str] = []


def compose_workers(on_built: str) -> None:
    """Runs drafted by this process from now on call `module:function` with each rank's runner once it is built (see WorkerSpec)."""
    _ON_BUILT[:] = [on_built] if on_built else []


def live_root(request: RuntimeRequest, settings: Settings) -> Path:
    """The local folder that holds live run folders: the store itself, or a cache of it where the store is remote."""
    if not is_remote(request.store):
        return local_path(request.store)
    name = "".join(character if character.isalnum() else "-" for character in request.store).strip("-")
    return settings.mem_home / "live" / name


def examine(draft: RunDraft) -> EnvironmentReport:
    """Doctor: look, judge, report. Changes nothing.

    Raises:
        MemError: the first failing kind in the order of the exit codes.
    """
    check_policy(draft)
    report = examine_only(draft.request, draft.settings, allow_reshard=draft.allow_reshard)
    draft.environment = report
    error = error_of(report)
    if error is not None:
        raise error
    return report


def check_policy(draft: RunDraft) -> None:
    """Build planner and policy engine before anything is written, so that a mistake in them, or a secret, leaves no trace.

    Raises:
        RequestError: planner or policy file cannot be used, or a URL of the request carries a password.
    """
    refuse_passwords(draft.request.model_dump(mode="json"))
    draft.policy = policy_engine(draft.request.policy.file)
    section = draft.request.policy.planner
    if section.kind != "none":
        key = draft.settings.secret(section.api_key_env) if section.api_key_env else None
        planner = build_planner(section, default_base_url=draft.settings.planner_base_url, api_key=key)
        draft.planner = BackgroundAdvice(planner)


def examine_only(request: RuntimeRequest, settings: Settings, *, allow_reshard: bool = False) -> EnvironmentReport:
    """The doctor's report, whatever it says."""
    observations = observe_machine(request, settings, run_root=live_root(request, settings), holder_of=observe_holder)
    model = read_model_numbers(request.model.source, settings.model_cache_dir)
    report = EnvironmentDoctor().examine(request, observations, model, sniff_data(request))
    report = with_orphans(report, lambda: remote_store(request, settings, RetryPolicy(attempts=1)), request.run_id)
    return allow_other_shape(report) if allow_reshard else report


def acquire(draft: RunDraft) -> StateManager:
    """Take the run folder and start to import the heavy libraries in the background.

    Raises:
        RunHeld: another process holds the run. RequestError: it was born with other values.
    """
    environment = known(draft.environment)
    root, run_id = live_root(draft.request, draft.settings), draft.request.run_id
    store = remote_store(draft.request, draft.settings)
    at_least = 1
    if store is not None and not has_record(root / run_id):
        fetch_record(store, run_id, root / run_id)
        at_least = highest_attempt(store, run_id) + 1
    draft.state = StateManager.acquire(root, run_id, at_least=at_least)
    if store is not None:
        draft.remote = RemoteService(store, draft.state, draft.request.checkpoint, lambda why: _stop(draft, why))
    record = draft.state.record()
    if record is not None:
        draft.request = reconcile(record.request, draft.request, allow_reshard=draft.allow_reshard)
        refuse_other_machine(record, environment)
    damage = check_journal(draft.state.folder / "journal")
    draft.state.start_attempt(None, note=f"{environment.device}, {environment.dtype}: {environment.device_reason}")
    draft.state.emit(DoctorReported(report=environment))
    if damage:
        draft.state.emit(Noted(text=str(damage)))
        draft.progress.note(str(damage))
    draft.state.mend_record()
    draft.server = draft.server or _EARLY.pop(draft.request.run_id, None) or _fork_server(draft.request, draft.settings, environment)
    draft.server.log_into(draft.state.folder / "logs")
    return draft.state


def _stop(draft: RunDraft, why: str) -> None:
    draft.progress.note(why)
    draft.stop.by = draft.stop.by or "a newer attempt on another machine"


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


_EARLY: dict[str, ForkServer] = {}


def early_fork_server(request: RuntimeRequest, settings: Settings, environment: EnvironmentReport) -> None:
    """Begin the heavy imports now, while whoever calls does something else; `acquire` takes the server over."""
    _EARLY[request.run_id] = _fork_server(request, settings, environment)


def close_early_fork_server(run_id: str) -> None:
    """End a server that no run has taken over."""
    server = _EARLY.pop(run_id, None)
    if server is not None:
        server.close()


def _fork_server(request: RuntimeRequest, settings: Settings, environment: EnvironmentReport) -> ForkServer:
    environ = child_environment(
        settings,
        device=environment.device,
        threads_per_rank=environment.threads_per_rank,
        max_jobs=environment.max_build_jobs,
        run_folder=live_root(request, settings) / request.run_id,
    )
    return ForkServer.start(environ, settings.mem_home / "logs")


def prepare(draft: RunDraft) -> PreparedData:
    """Ops and token shards; then wire the session. Raises DataError, EnvironmentUnfit, StoreUnavailable."""
    environment, state = known(draft.environment), known(draft.state)
    record = state.record()
    with draft.ledger.bucket("op_build"):
        prepare_ops(draft.request, draft.settings, environment.device, environment.max_build_jobs, draft.progress.note)
    with draft.ledger.bucket("data"):
        draft.model = describe_model(draft.request.model.source, draft.settings.model_cache_dir)
        draft.data = prepare_tokens(draft.request, draft.settings, draft.model.vocab_size, draft.progress, record)
    if record is None:
        record = _born(draft, environment, draft.data, draft.model)
        state.write_record(record)
    else:
        refuse_other_inputs(record, draft.data, draft.model)
    draft.request = draft.request.model_copy(
        update={"training": draft.request.training.model_copy(update={"schedule_steps": record.request.training.schedule_steps})}
    )
    record = _with_allowed_changes(record, draft.request)
    if record != state.record():
        state.write_record(record)
    draft.session = wire(draft, reshaped(record, draft.request, environment.threads_per_rank))
    return draft.data


def _with_allowed_changes(record: RunRecord, request: RuntimeRequest) -> RunRecord:
    """What the run is now: more steps and the other changes that `reconcile` let pass, so that reports and drills see them. The shape
    stays: it changes when a converted checkpoint has proven itself."""
    return record.model_copy(update={"request": with_shape(request, *shape_of(record.request))})


def _born(draft: RunDraft, environment: EnvironmentReport, data: PreparedData, model: ModelFacts) -> RunRecord:
    """What this run is from now on. The schedule's horizon and the first memory plan are frozen here."""
    training = draft.request.training
    request = draft.request.model_copy(
        update={"training": training.model_copy(update={"schedule_steps": training.schedule_steps or training.max_steps})}
    )
    rows_per_rank = training.global_batch_size // draft.request.parallel.num_ranks
    micro = draft.request.memory.micro_batch_size
    plan = MemoryPlan(
        micro_batch_rows=min(rows_per_rank, environment.micro_batch_rows if micro == "auto" else micro),
        activation_checkpointing=draft.request.model.activation_checkpointing == "on",
        offload_optimizer=draft.request.parallel.offload_optimizer,
    )
    return RunRecord(
        run_id=request.run_id, request=request, device=environment.device, dtype=environment.dtype, default_plan=plan,
        threads_per_rank=environment.threads_per_rank,
        data_fingerprint=data.fingerprint, model_fingerprint=model.fingerprint, versions=environment.versions,
        encoding=data.encoding, born_unix_s=time.time(),
    )  # fmt: skip
