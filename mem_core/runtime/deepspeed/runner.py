"""The training loop inside a rank. It decides nothing about the run: it is told a step to reach and says how that went."""

import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from mem_core.core.memory.ladder import MicroBatch, largest_micro_batch
from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.errors import InternalError
from mem_core.domain.plan import Hyperparams, MemoryPlan
from mem_core.domain.segment import Evidence, NonFinite, OutOfMemory
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.data.serving.order import sample_ids
from mem_core.runtime.data.serving.splits import split_batch
from mem_core.runtime.deepspeed.engine import Engine, LossScaleAtFloor, NonFiniteGradient, initialise_distributed
from mem_core.runtime.deepspeed.engine_config import engine_config, is_universal
from mem_core.runtime.deepspeed.evaluation import Evaluation, PromptAnswers
from mem_core.runtime.deepspeed.first_plan import FirstPlan, plan_bounds
from mem_core.runtime.deepspeed.objective import objective_of, pad_token_for
from mem_core.runtime.deepspeed.passes import NonFiniteStep, OutOfMemoryStep, Passes
from mem_core.runtime.deepspeed.schedule import learning_rate
from mem_core.runtime.deepspeed.snapshot import Snapshot
from mem_core.runtime.deepspeed.step_columns import LossScaleHistory, StepColumns
from mem_core.runtime.deepspeed.trainable import build_rank_model, trainable_of
from mem_core.runtime.deepspeed.trajectory import Split, chain_step
from mem_core.runtime.memory.adaptive_memory import AdaptiveMemory, RecordEvents
from mem_core.runtime.models.router import RouterLoss
from mem_core.runtime.ranks.agreement import Agreement
from mem_core.runtime.ranks.place import RankPlace
from mem_core.runtime.ranks.port import Pulse
from mem_core.runtime.ranks.worker import protocol
from mem_core.runtime.ranks.worker.classify import classify, memory_kind
from mem_core.runtime.ranks.worker.device import LocalDevice
from mem_core.runtime.ranks.worker.protocol import ReplayEvidence, Saved, SegmentDone, Train, WorkerSpec

RNG_MULTIPLIER = 1_000_003  # a prime: (seed, batch, rank) triples of one run do not collide
REPLAY_STEPS = 2
MAX_TRIES_OF_A_BATCH = 64  # the ladder ends long before


class DeepSpeedRunner:
    """One rank's engine, data and position. Used again over segments; thrown away with its process after any failure."""

    def __init__(
        self, spec: WorkerSpec, place: RankPlace, device: LocalDevice, pulse: Pulse, agreement: Agreement, record: RecordEvents
    ) -> None:
        self.spec = spec
        self.place = place
        self.request = spec.request
        self._pulse = pulse
        self._agreement = agreement
        self.position = TrainingPosition(applied_steps=0, batch_index=0)
        self._data = TokenDataset.open(Path(spec.data_folder))
        self._local = device
        self._device = device.torch_device
        self._phase = "start"
        self._warm = False
        self._scales = LossScaleHistory()
        self.build_s = 0.0
        self.restore_s = 0.0
        self._computed_s = 0.0
        self._prompts = PromptAnswers(spec, place, device)
        self.memory = AdaptiveMemory(spec, place, device, agreement, plan_bounds(spec, place.num_ranks, self._data), record)

    def build(self, folder: str | None, position: TrainingPosition, replay_until: int = 0) -> None:
        """Join the process group, build model and engine, take the state of `folder` (None: fresh weights)."""
        started_s = time.monotonic()
        spec = self.spec
        self.beat("start")
        initialise_distributed(self.place)
        plan = self.memory.plan(position)
        trainable = trainable_of(self.request)
        model = build_rank_model(spec, plan, self._local, trainable)
        num_trained = trainable.num_parameters(model)
        config = engine_config(self.request, spec.dtype, plan, position.hyperparams, num_trained, is_universal(folder))
        self.engine = Engine(
            model, config, self.request.training, activation_checkpointing=plan.activation_checkpointing, trainable=trainable
        )
        if spec.compiled:
            self.engine.use_compiled(spec)
        router = RouterLoss.of(model) if spec.router_loss else None
        pad = pad_token_for(model, spec.pad_token_id)
        objective = objective_of(self.request, pad, router, apart=self._data.index.documents_apart)
        self._passes = Passes(self.engine, self._data, self._device, self.request.data.sequence_length, objective)
        self.build_s = time.monotonic() - started_s
        self.beat("restore")
        if folder is not None:
            self.engine.load(Path(folder), position, position.hyperparams, self.request.model.source)
        self.engine.apply(position.hyperparams)
        self.position = position
        spec.built(self)
        self.beat("calibrate")
        first_plan = FirstPlan(spec, self.place, self.memory, self.engine.raw.module, self._data, self._local)
        self.position = first_plan.prepare(position, replay_until)
        self.restore_s = time.monotonic() - started_s - self.build_s
        self.beat("idle")

    def beat(self, phase: str) -> None:
        """Heartbeat outside the step loop."""
        self._phase = phase
        self._pulse.beat(phase, self.position.batch_index, self.position.applied_steps)

    @property
    def phase(self) -> str:
        """What the rank is doing, for evidence."""
        return self._passes.phase if self._phase in ("step", "first_step") else self._phase

    @property
    def has_stepped(self) -> bool:
        """Whether this process has done a step."""
        return self._warm

    @property
    def micro_batch(self) -> MicroBatch | None:
        """The forward pass that the rank is in or did last."""
        return self._passes.micro_batch if self._phase in ("step", "first_step") else None

    # -- training -------------------------------------------------------------------------------------------------------

    def train(self, order: Train, on_saved: Callable[[Saved | ReplayEvidence], None]) -> SegmentDone:
        """Run steps until `order.until_step` applied updates, an order to stop, or `every_s`; then snapshot."""
        started_s = time.monotonic()
        self._enter_segment(order.hyperparams)
        self.beat("step" if self._warm else "first_step")
        columns = StepColumns()
        while self.position.applied_steps < order.until_step:
            if self.position.batch_index in order.skip_batches:
                self._pass_over()
                continue
            overdue = order.every_s is not None and time.monotonic() - started_s >= order.every_s
            ending = len(columns) > 0 and (overdue or (bool(self.memory.replace_reason) and order.staging is not None))
            if not self._agreement.may_start(self.position.batch_index, stop_wanted=ending):
                break
            self._step(order.hyperparams, columns)
            self._warm = True
            if order.replay_of is not None and len(columns) == min(REPLAY_STEPS, order.until_step - order.replay_of):
                on_saved(self._replay_evidence(order.replay_of, columns, order.hyperparams))
        interrupted = self.position.applied_steps < order.until_step
        trained_s = time.monotonic()
        self._finish_losses(columns)
        if order.staging is not None:
            self._snapshot(Path(order.staging), on_saved)
        self.memory.at_boundary()
        self.beat("idle")
        done_s = time.monotonic()
        return SegmentDone(
            position=self.position,
            interrupted=interrupted,
            duration_s=trained_s - started_s,
            save_stall_s=done_s - trained_s,
            columns=columns.arrays() if self.place.rank == 0 else {},
            uncompiled_passes=self.engine.take_uncompiled_passes(),
            replace_reason=self.memory.replace_reason,
        )

    def _enter_segment(self, hyperparams: Hyperparams) -> None:
        history = self.position.hyperparams_history
        if not history or history[-1][1] != hyperparams:
            history = (*history, (self.position.batch_index, hyperparams))
        self.position = self.position.model_copy(update={"hyperparams": hyperparams, "hyperparams_history": history})
        self.engine.apply(hyperparams)

    def _step(self, hyperparams: Hyperparams, columns: StepColumns) -> None:
        started_s = time.perf_counter()
        self.position = self.memory.follow(self.position)
        position, training = self.position, self.request.training
        index = position.batch_index
        ids = sample_ids(training.seed, index, training.global_batch_size, self._data.samples(self.request.data))
        lengths = np.asarray(self._data.lengths[ids])
        trained_tokens = self._passes.objective.weight(self._data, ids)
        rate = learning_rate(training, index) * hyperparams.lr_multiplier
        self.engine.set_learning_rate(rate)
        loss, split = self._accumulate(ids, lengths, trained_tokens)
        try:
            applied = self.engine.step()
        except NonFiniteGradient as exc:
            raise NonFiniteStep(self._non_finite("gradient", ids)) from exc
        except LossScaleAtFloor as exc:
            raise NonFiniteStep(self._non_finite("loss_scale", (), self._scales.words())) from exc
        self._scales.add(index, self.engine.loss_scale(), applied=applied)
        norm = self.engine.grad_norm()
        self._check_finite(loss + self._passes.added, norm, applied, ids)
        step_s = time.perf_counter() - started_s
        self._advance(applied, trained_tokens)
        reading = self.memory.observe(index, self._passes.largest)
        columns.add(
            index, self.position.applied_steps, loss, norm, rate, trained_tokens, step_s, len(split[0]), reading.peak_bytes, split
        )  # fmt: skip
        if self.spec.router_loss:
            columns.add_apart(self._passes.added / self.place.num_ranks)
        self._pulse.beat(
            "step", self.position.batch_index, self.position.applied_steps, micro_batches=len(split[0]),
            loss=loss * self.place.num_ranks, grad_norm=norm or 0.0, learning_rate=rate, tokens=self.position.tokens,
            memory_bytes=reading.used_bytes, step_s=step_s, peak_bytes=reading.peak_bytes, compute_s=self._computed_s - started_s,
        )  # fmt: skip

    def _accumulate(self, ids: np.ndarray, lengths: np.ndarray, trained_tokens: int) -> tuple[float, Split]:
        """Forward and backward over this rank's micro-batches; returns its part of the loss per trained token, and the split.

        The loss is a sum over trained tokens ÷ trained tokens of the whole global batch (I1). DeepSpeed averages gradients
        over ranks, hence the factor num_ranks. A pass that does not fit is absorbed where that is proven equal (I5): the
        gradients are thrown away and the same batch is done again under a smaller plan.
        """
        scale = self.place.num_ranks / max(1, trained_tokens)
        for _ in range(MAX_TRIES_OF_A_BATCH):
            split = split_batch(lengths, self.place.num_ranks, self._use_plan(), self._passes.bucket)
            self._seed_dropout()
            loss, failure = 0.0, None
            try:
                loss = self._passes.accumulate(split[self.place.rank], ids, lengths, scale)
            except Exception as exc:
                failure = self._absorbable(exc)
                if failure is None:
                    raise
                traceback.clear_frames(exc.__traceback__)  # they hold the activations
            self._computed_s = time.perf_counter()  # before any rank waits for another
            failed = self.memory.agree(self._passes.micro_batch if failure else None)
            if failed is None:
                return loss / self.place.num_ranks, split
            self._absorb(failed, failure)
        raise InternalError("a batch was shrunk again and again and never fitted", remedy="Report this as a bug.")

    def _use_plan(self) -> MemoryPlan:
        plan = self.memory.plan(self.position)
        self.engine.set_activation_checkpointing(plan.activation_checkpointing)
        return plan

    def _seed_dropout(self) -> None:
        seed = (self.request.training.seed * RNG_MULTIPLIER + self.position.batch_index) * RNG_MULTIPLIER + self.place.rank
        self._local.seed(seed)

    def _absorbable(self, exc: Exception) -> OutOfMemory | None:
        """The failed allocation that `exc` is, where the batch may be tried again in this engine; else None."""
        if not self.memory.retries_in_step or memory_kind(exc) is None:
            return None
        return self.memory.absorbable(classify(exc, self.place.rank, self.phase, self.position.batch_index, failed=self.micro_batch))

    def _absorb(self, failed: MicroBatch, failure: OutOfMemory | None) -> None:
        """Every rank comes here when a pass failed on any of them; `failure` is this rank's own."""
        self.engine.discard_gradients()
        self._local.release_free_memory()
        outcome = failure or OutOfMemory(
            memory="device" if self._device.type == "cuda" else "host",
            evidence=Evidence(phase="forward", batch_index=self.position.batch_index, exception="on another rank"),
        )
        phase = (outcome.evidence.phase or "forward") if failure else "forward or backward"
        position = self.memory.absorb(self.position, failed, outcome.memory, phase, outcome.evidence.exception)
        if position is None:
            size = {"failed_rows": failed.rows, "failed_length": failed.length}
            raise OutOfMemoryStep(outcome.model_copy(update={"evidence": outcome.evidence.model_copy(update=size)}))
        self.position = position

    def _check_finite(self, loss: float, norm: float | None, applied: bool, ids: np.ndarray) -> None:
        """MEM's own guard, the same at every stage: DeepSpeed is silent at stage 0 and skips in silence elsewhere."""
        if self.spec.dtype == "float16" and not applied:
            return  # an overflow while the loss scale is found: a skipped update, counted apart (I3)
        if not np.isfinite(loss):
            raise NonFiniteStep(self._non_finite("loss", ids))
        if not applied or (norm is not None and not np.isfinite(norm)):
            raise NonFiniteStep(self._non_finite("gradient", ids))

    def _non_finite(self, what: str, ids: Iterable[int], words: str = "") -> NonFinite:
        index = self.position.batch_index
        evidence = Evidence(rank=self.place.rank, phase="step", batch_index=index, exception=words)
        return NonFinite(what=what, batch_index=index, sample_ids=tuple(int(i) for i in ids), evidence=evidence)  # type: ignore[arg-type]

    def _pass_over(self) -> None:
        """Leave the next batch out: no forward, no update; the engine never sees it."""
        index = self.position.batch_index
        skipped, passed = (*self.position.skipped_batches, index), (*self.position.passed_batches, index)
        self.position = self.position.model_copy(update={"batch_index": index + 1, "skipped_batches": skipped, "passed_batches": passed})

    def _advance(self, applied: bool, tokens: int) -> None:
        old = self.position
        self.position = old.model_copy(
            update={
                "batch_index": old.batch_index + 1,
                "applied_steps": old.applied_steps + (1 if applied else 0),
                "skipped_batches": old.skipped_batches if applied else (*old.skipped_batches, old.batch_index),
                "tokens": old.tokens + tokens,
            }
        )

    def _replay_evidence(self, step: int, columns: StepColumns, hyperparams: Hyperparams) -> ReplayEvidence:
        losses = self._summed(columns.losses())
        return ReplayEvidence(step, hyperparams, tuple(losses), tuple(norm for _, _, norm, _ in columns.trajectory()))

    def _summed(self, losses: list[float]) -> list[float]:
        """Each rank's part of each loss, summed over the ranks; every rank must call it."""
        parts = torch.tensor(losses, dtype=torch.float64)
        if self.place.num_ranks > 1 and losses:
            on_device = parts.to(self._device)
            torch.distributed.all_reduce(on_device)
            parts = on_device.cpu()
        return parts.tolist()

    def _finish_losses(self, columns: StepColumns) -> None:
        """Sum the ranks' parts of the losses, once per segment, and chain the trajectory digest."""
        columns.replace_losses(self._summed(columns.losses()))
        columns.replace_added(self._summed(columns.added()))
        digest = self.position.trajectory_digest
        for index, loss, norm, split in columns.trajectory():
            digest = chain_step(digest, index, split, loss, norm)
        self.position = self.position.model_copy(update={"trajectory_digest": digest})

    # -- state ----------------------------------------------------------------------------------------------------------

    def _snapshot(self, staging: Path, on_saved: Callable[[Saved], None]) -> None:
        self.beat("save")
        files, tensors, digest = self.engine.collect_state(staging)
        snapshot = Snapshot(self.position.applied_steps, files, tensors, digest, on_saved)
        if self._device.type != "cpu":
            snapshot.write_threaded()
            return
        try:
            snapshot.write_forked(self.memory.room_for_a_writer())
        except OSError as exc:
            if memory_kind(exc) is None:
                raise
            snapshot.write_foreground()  # out of memory in a save: acted on for the save, training's plan stays

    # -- between segments -----------------------------------------------------------------------------------------------

    def evaluate(self, order: protocol.Evaluate) -> protocol.Evaluated:
        """Figures of the held-out rows."""
        with self._not_training() as most_tokens:
            evaluation = Evaluation(self.spec, self.place, self._passes, self._local, most_tokens)
            return evaluation.run(order, lambda: self.beat("evaluate"))

    def answer_prompts(self, order: protocol.AnswerPrompts) -> protocol.Answered:
        """Answers to the run's prompts."""
        with self._not_training() as most_tokens:
            return self._prompts.answer(order, self.engine.raw.module, most_tokens, lambda: self.beat("sample"))

    @contextmanager
    def _not_training(self) -> Iterator[int]:
        """Gives the padded tokens of training's largest pass. What is taken meanwhile is forgotten again, so that the next step sees
        the memory of training alone."""
        plan = self.memory.plan(self.position)
        self.engine.raw.eval()
        try:
            yield largest_micro_batch(plan, self.memory.bounds).tokens
        finally:
            self.engine.raw.train()
            self.memory.forget_peak()
            self.beat("idle")
