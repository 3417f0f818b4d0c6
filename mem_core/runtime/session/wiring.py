"""From a prepared draft to a session: which part gets which other parts."""

from mem_core.core.run.state_manager import RunRecord
from mem_core.domain.checkpoint import CheckpointExpectation, TrainingPosition
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.settings import child_environment
from mem_core.runtime.checkpoint_manager.inspection.validator import IntegrityValidator
from mem_core.runtime.checkpoint_manager.manager import CheckpointManager
from mem_core.runtime.data.values import PreparedData
from mem_core.runtime.proof.replay_service import ReplayService
from mem_core.runtime.proof.reshard_service import ReshardService, reshard_run
from mem_core.runtime.proof.validator_process import ValidatorProcess
from mem_core.runtime.ranks.local.ranks import LocalRanks
from mem_core.runtime.ranks.worker.protocol import WorkerSpec
from mem_core.runtime.session.advice_service import AdviceService
from mem_core.runtime.session.checkpoint_service import CheckpointService
from mem_core.runtime.session.opening import RunDraft, known
from mem_core.runtime.session.prepare_service import with_model_at_hand
from mem_core.runtime.session.run_session import RunSession, folded_limits
from mem_core.runtime.session.segment_service import SegmentService
from mem_core.runtime.session.skip_list import SkipList


def wire(draft: RunDraft, record: RunRecord) -> RunSession:
    """Everything of one attempt. Brings a newer checkpoint from the mirror and converts to another shape where that is due.

    Raises:
        StoreUnavailable, RunHeld: the mirror cannot be used. RequestError, NoValidCheckpoint: the conversion is not possible or not proven.
    """
    request, environment = draft.request, known(draft.environment)
    state, server, data = known(draft.state), known(draft.server), known(draft.data)
    key = draft.settings.manifest_key.encode() if draft.settings.manifest_key else None
    ranks = LocalRanks(server, state.folder / "live")
    validator = ValidatorProcess(server, IntegrityValidator(signature_key=key))
    manager = CheckpointManager(
        state.folder,
        request.run_id,
        state.attempt,
        request.checkpoint,
        CheckpointExpectation(num_ranks=request.parallel.num_ranks, zero_stage=request.parallel.zero_stage),
        fence=state.fence,
        emit=state.emit,
        validator=validator,
        held=draft.remote.held if draft.remote is not None else tuple,
        signature_key=key,
    )
    if draft.remote is not None:
        brought = draft.remote.catch_up(manager)
        if brought is not None:
            draft.progress.note(f"the checkpoint of step {brought.step:,} was brought from {draft.remote.mirror.url} and proven")
    budget = next((item for item in environment.memory if item.kind == "host"), None)
    limit_bytes = budget.budget_bytes if budget is not None else 0
    on_valid = draft.remote.submit if draft.remote is not None else lambda step, folder: None
    remote = draft.remote
    bring_back = (lambda: remote.catch_up(manager) is not None) if remote is not None else lambda: False
    checkpoints = CheckpointService(manager, state.folder, limit_bytes, on_valid, bring_back)
    at_hand = with_model_at_hand(request, draft.settings)
    spec = _worker_spec(at_hand, environment, data, record, draft.on_built)
    if record != state.record():
        environ = child_environment(draft.settings, device="cpu")
        skips = SkipList(spec, state).batches
        service = ReshardService(manager, ranks, spec, environ, state.emit, key, draft.on_converted, skips)
        reshard_run(service, state, record, on_valid)
    failures, highest_step, pace = folded_limits(state)
    segments = SegmentService(
        ranks=ranks,
        spec=spec,
        state=state,
        checkpoints=checkpoints,
        ledger=draft.ledger,
        progress=draft.progress,
        fresh=TrainingPosition(applied_steps=0, batch_index=0),
        versions=environment.versions,
        data_fingerprint=data.fingerprint,
        memory_limit_bytes=limit_bytes,
        stop=draft.stop,
        highest_step=highest_step,
        pace=pace,
    )
    advice = AdviceService(request, environment, state, known(draft.policy), record.default_plan, draft.planner, state.folder / "metrics")
    validator.replay = ReplayService(
        ranks, segments.spec, segments.replay_evidence, lambda: segments.skips.batches, lambda: segments.failed_batches
    )  # fmt: skip
    return RunSession(
        request=request, environment=environment, state=state, ranks=ranks, segments=segments, checkpoints=checkpoints,
        validator=validator, remote=draft.remote, advice=advice,
        progress=draft.progress, stop=draft.stop, failures_without_progress=failures,
    )  # fmt: skip


def _worker_spec(
    request: RuntimeRequest, environment: EnvironmentReport, data: PreparedData, record: RunRecord, on_built: str
) -> WorkerSpec:
    return WorkerSpec(
        request=request, device=environment.device, dtype=environment.dtype, num_threads=record.threads_per_rank,
        data_folder=data.train_dir, validation_folder=data.validation_dir, pad_token_id=data.pad_token_id,
        default_plan=record.default_plan, on_built=on_built,
    )  # fmt: skip
