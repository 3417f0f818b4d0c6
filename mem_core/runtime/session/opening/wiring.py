"""From a held run and its data to a session: which part gets which other parts."""

from collections.abc import Callable

from mem_core.core.policy.local_policy_engine import request_values
from mem_core.core.results.evaluations import EvaluationBook
from mem_core.core.results.samples import SampleBook
from mem_core.core.run.belonging import CheckpointWords, birth_of
from mem_core.core.run.state_manager import RunRecord, StateManager
from mem_core.domain.checkpoint import CheckpointExpectation, TrainingPosition
from mem_core.domain.plan import MemoryPlanChange
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.settings import child_environment
from mem_core.runtime.checkpoint_manager.inspection.validator import IntegrityValidator
from mem_core.runtime.checkpoint_manager.manager import CheckpointManager
from mem_core.runtime.checkpoint_manager.ports import CheckpointPorts, CheckpointScope
from mem_core.runtime.data.values import PreparedRows
from mem_core.runtime.proof.replay_service import ReplayService
from mem_core.runtime.proof.reshard_service import ReshardService, reshard_run
from mem_core.runtime.proof.validator_process import ValidatorProcess
from mem_core.runtime.ranks.port import Ranks
from mem_core.runtime.ranks.worker.protocol import WorkerSpec
from mem_core.runtime.session.advice_service import AdviceService
from mem_core.runtime.session.attempt import Attempt
from mem_core.runtime.session.checkpoint_service import BornWith, CheckpointService
from mem_core.runtime.session.ending import Ending
from mem_core.runtime.session.live_ranks import LiveRanks, RanksSetup, Standing
from mem_core.runtime.session.memory_service import MemoryService
from mem_core.runtime.session.opening.compiling import compiled_as_recorded
from mem_core.runtime.session.opening.prepare_service import with_model_at_hand
from mem_core.runtime.session.opening.stages import Held
from mem_core.runtime.session.results.evaluation_service import EvaluationService
from mem_core.runtime.session.results.export_service import ExportService
from mem_core.runtime.session.results.result_log import ResultLog, result_log
from mem_core.runtime.session.results.sampling_service import SamplingService
from mem_core.runtime.session.run_session import RunSession, folded_limits
from mem_core.runtime.session.segment_service import SegmentService
from mem_core.runtime.session.segment_watch import SegmentWatch
from mem_core.runtime.session.skip_list import SkipList


def wire(held: Held, ranks: Ranks, request: RuntimeRequest, rows: PreparedRows, record: RunRecord) -> RunSession:
    """Everything of one attempt, whose ranks live where `ranks` starts them.

    Brings a newer checkpoint from the mirror and converts to another shape where that is due.

    Raises:
        StoreUnavailable, RunHeld: the mirror cannot be used. RequestError, NoValidCheckpoint: the conversion is not possible or not proven.
    """
    attempt, environment = held.attempt(request), held.examined.environment
    validator = ValidatorProcess(held.server, IntegrityValidator(signature_key=_key(held)))
    book = _book(held.state)
    manager = _manager(held, request, validator, record, book.held if request.evaluation.keep_best else frozenset)
    limit_bytes = next((budget.budget_bytes for budget in environment.memory if budget.kind == "host"), 0)
    checkpoints = _checkpoints(held, manager, limit_bytes, result_log(attempt, held.order.settings))
    spec = worker_spec(held, request, rows, record)
    skips = SkipList(spec, held.state)
    if record != held.state.record():
        _reshard(held, ranks, manager, spec, record, skips)
    failures, highest_step, pace = folded_limits(held.state)
    standing = Standing(highest_step=highest_step)
    memory = MemoryService(spec, held.state, attempt.progress)
    fresh = fresh_position(request, held.order.options.first_plan_changes)
    live = LiveRanks(attempt, RanksSetup(ranks, spec, fresh, limit_bytes), checkpoints, memory, standing)
    segments = SegmentService(
        attempt=attempt,
        ranks=live,
        checkpoints=checkpoints,
        skips=skips,
        watch=SegmentWatch(attempt, standing, limit_bytes, rows.train.epoch_rows / request.training.global_batch_size),
        pace=pace,
        born_with=BornWith(environment.versions, record.data_fingerprint),
    )
    validator.replay = ReplayService(ranks, spec, live.replay_evidence, lambda: skips.batches, lambda: segments.failed_batches)
    segments.watch.logs.bound()
    ending = Ending(attempt, segments, validator, ranks, held.remote)
    evaluations = EvaluationService(attempt, segments, bool(spec.evaluation_sets), book)
    samples = SamplingService(attempt, segments, _samples(held.state))
    settings = held.order.settings
    exports = ExportService(attempt, held.server, settings.model_cache_dir, settings.manifest_key or "")
    return RunSession(attempt, segments, checkpoints, _advice(attempt, held, record), ending, evaluations, samples, exports, failures)


def fresh_position(request: RuntimeRequest, first_plan_changes: tuple[MemoryPlanChange, ...] = ()) -> TrainingPosition:
    """Step 0. An engine is built with these values, before the first decision: the loss scale is taken there and never again."""
    values = request_values(request)
    return TrainingPosition(applied_steps=0, batch_index=0, hyperparams=values, memory_plan_changes=first_plan_changes)


def _key(held: Held) -> bytes | None:
    text = held.order.settings.manifest_key
    return text.encode() if text else None


def _manager(
    held: Held, request: RuntimeRequest, validator: ValidatorProcess, record: RunRecord, best: Callable[[], frozenset[int]]
) -> CheckpointManager:
    """Of this attempt, with what is not this run's set aside, and a newer checkpoint from the mirror brought in. `best` stays."""
    state, remote = held.state, held.remote
    expectation = CheckpointExpectation(num_ranks=request.parallel.num_ranks, zero_stage=request.parallel.zero_stage)
    scope = CheckpointScope(state.folder, request.run_id, state.attempt, request.checkpoint, expectation, birth_of(record))
    ports = CheckpointPorts(
        fence=state.fence, emit=state.emit, words=_words(state), tell=held.order.progress.note,
        held=lambda: best() | (remote.held() if remote is not None else frozenset()),
    )  # fmt: skip
    manager = CheckpointManager(scope, ports, validator, signature_key=_key(held))
    if remote is not None:
        remote.mirror.also_keep = best
    manager.set_strangers_aside()
    brought = remote.catch_up(manager) if remote is not None else None
    if remote is not None and brought is not None:
        held.order.progress.note(f"the checkpoint of step {brought.step:,} was brought from {remote.mirror.url} and proven")
    return manager


def _book(state: StateManager) -> EvaluationBook:
    """What evaluations say of the run, kept up to date."""
    book = EvaluationBook(state.lines())
    state.listeners.append(lambda line: book.add(line.event))
    return book


def _samples(state: StateManager) -> SampleBook:
    """Which steps have answers to the prompts, kept up to date."""
    book = SampleBook(state.lines())
    state.listeners.append(lambda line: book.add(line.event))
    return book


def _words(state: StateManager) -> CheckpointWords:
    """What the journal says about checkpoints, kept up to date."""
    words = CheckpointWords(line.event for line in state.lines())
    state.listeners.append(lambda line: words.add(line.event))
    return words


def _checkpoints(held: Held, manager: CheckpointManager, limit_bytes: int, results: ResultLog) -> CheckpointService:
    remote = held.remote
    if remote is None:
        return CheckpointService(manager, held.state.folder, limit_bytes, results=results)
    bring_back = lambda: remote.catch_up(manager) is not None  # noqa: E731
    return CheckpointService(manager, held.state.folder, limit_bytes, remote.submit, bring_back, remote.offer, results)


def _reshard(held: Held, ranks: Ranks, manager: CheckpointManager, spec: WorkerSpec, record: RunRecord, skips: SkipList) -> None:
    environ = child_environment(held.order.settings, device="cpu")
    told = held.order.options.on_converted
    service = ReshardService(manager, ranks, spec, environ, held.state.emit, _key(held), told, skips.batches)
    reshard_run(service, held.state, record, held.remote.submit if held.remote is not None else lambda step, folder: None)


def _advice(attempt: Attempt, held: Held, record: RunRecord) -> AdviceService:
    examined, metrics = held.examined, held.state.folder / "metrics"
    return AdviceService(
        attempt.request, attempt.environment, held.state, examined.policy, record.default_plan, examined.planner, metrics
    )  # fmt: skip


def worker_spec(held: Held, request: RuntimeRequest, rows: PreparedRows, record: RunRecord) -> WorkerSpec:
    """What the ranks of this attempt are told."""
    environment, data = held.examined.environment, rows.train
    request = with_model_at_hand(request, held.order.settings)
    evaluation_folders = {name: prepared.train_dir for name, prepared in rows.evaluation.items()}
    return WorkerSpec(
        request=request, device=environment.device, dtype=environment.dtype, num_threads=record.threads_per_rank,
        data_folder=data.train_dir, validation_folder=data.validation_dir, pad_token_id=data.pad_token_id,
        default_plan=record.default_plan, evaluation_folders=evaluation_folders, on_built=held.order.options.on_built,
        router_loss=record.router_loss, compiled=compiled_as_recorded(record), samples=rows.samples,
    )  # fmt: skip
