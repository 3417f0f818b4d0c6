"""Building a DeepSpeed engine and the few places where MEM reaches into it. With `runner` and `snapshot` the only importers."""

import logging
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.logging import logger as deepspeed_logger
from deepspeed.utils.tensor_fragment import fragment_address

from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.errors import InternalError
from mem_core.domain.plan import Hyperparams
from mem_core.domain.request import TrainingSection
from mem_core.runtime.compiled.inherited import make_ready, take_over
from mem_core.runtime.compiled.loss import TARGETS, uncompiled
from mem_core.runtime.deepspeed.engine_config import is_universal
from mem_core.runtime.deepspeed.objective import ModelOutput
from mem_core.runtime.deepspeed.one_rank import leave_out_sums_of_one, leave_out_what_ranks_need
from mem_core.runtime.deepspeed.snapshot import CollectingCheckpointEngine
from mem_core.runtime.deepspeed.trainable import BASE_KEY, EVERY_PARAMETER, Trainable, refuse_other_base, weights_digest
from mem_core.runtime.models.build import recompute_activations, switch_back_and_forth
from mem_core.runtime.ranks.place import RankPlace
from mem_core.runtime.ranks.worker.protocol import WorkerSpec

_FLOOR_WORDS = "loss scale already at minimum"  # DeepSpeed raises a bare Exception; its wording is all that tells
_ASKED_OPTIONS = ("weight_decay", "betas", "eps")  # the learning rate is set before every step
SAFE_CLASSES: list[Any] = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]


class LossScaleAtFloor(ArithmeticError):
    """Gradients overflow at the smallest loss scale: the update was not applied and no scale is left to try."""


class NonFiniteGradient(ArithmeticError):
    """The global gradient norm is not a finite number; the update was not applied."""


def initialise_distributed(place: RankPlace) -> None:
    """Join the process group of this try at the meeting point of `place`."""
    backend = "nccl" if place.device_kind == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, init_method=place.meeting.init_method, rank=place.rank, world_size=place.num_ranks)
    deepspeed_logger.setLevel(logging.WARNING)
    _leave_out_inference_op()
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    if place.num_ranks == 1:
        leave_out_sums_of_one()


def _leave_out_inference_op() -> None:
    """DeepSpeed compiles a shared-memory all-reduce for CPU inference at every first start (26 s quiet, 230 s on a busy machine).

    Training never calls it (`inference_all_reduce` is its only user), so MEM leaves it out; without this private name DeepSpeed
    would build it as ever. Decision record 0002.
    """
    backend: Any = sys.modules["deepspeed.comm.torch"]  # the attribute of that name is PyTorch itself
    if hasattr(backend, "build_shm_op"):
        backend.build_shm_op = lambda: None


def build_optimizer(model: torch.nn.Module, training: TrainingSection, trainable: Trainable = EVERY_PARAMETER) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019), fused kernel."""
    groups = trainable.groups(model, training.weight_decay)
    return torch.optim.AdamW(groups, lr=training.learning_rate, betas=training.betas, eps=training.eps, fused=True)


def is_floor(exc: BaseException) -> bool:
    """Whether DeepSpeed gave up since its loss scale cannot be halved again."""
    return _FLOOR_WORDS in str(exc)


def scale_of(optimizer: Any) -> float | None:
    """The loss scale of DeepSpeed's optimizer; None where none is used."""
    scaler = getattr(optimizer, "loss_scaler", None)
    found = getattr(scaler, "loss_scale", None) if scaler is not None else getattr(optimizer, "cur_scale", None)
    return None if found is None else float(found)


class Engine:
    """A DeepSpeed engine behind the few verbs that MEM needs."""

    def __init__(
        self,
        model: torch.nn.Module,
        config: dict[str, Any],
        training: TrainingSection,
        *,
        activation_checkpointing: bool = False,
        trainable: Trainable = EVERY_PARAMETER,
    ) -> None:
        self.num_ranks = torch.distributed.get_world_size()
        self._zero_stage = int(config["zero_optimization"]["stage"])
        self._half = "fp16" in config or "bf16" in config
        self._stage0_norm: float | None = None
        self._checkpointing = activation_checkpointing
        self.compiled = False
        self.trainable = trainable
        self.base_digest = trainable.base_digest(model)
        optimizer = build_optimizer(model, training, trainable)
        self.raw: Any
        self.optimizer: Any
        self.raw, self.optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self._files = CollectingCheckpointEngine(SAFE_CLASSES)
        self.raw.checkpoint_engine = self._files
        self.raw._copy_recovery_script = lambda *_: None  # no scripts among a checkpoint's files
        if self._zero_stage == 0:
            self.raw.clip_fp32_gradients = self._clip_and_check
        if self._zero_stage == 1 and self.num_ranks == 1 and not self._half:
            leave_out_what_ranks_need(self.raw.optimizer)
        self._check_config(config)

    def _check_config(self, config: dict[str, Any]) -> None:
        """Read the batch arithmetic back: DeepSpeed's own object is what counts."""
        if self.raw.train_batch_size() != config["train_batch_size"]:
            raise InternalError(
                "DeepSpeed took another batch size", field="train_batch_size", value=self.raw.train_batch_size(), remedy="Report this."
            )

    def _clip_and_check(self) -> None:
        """Stage 0 clips without telling the norm and applies non-finite updates; this tells and refuses."""
        trained = self.trainable.parameters(self.raw.module)
        norm = torch.nn.utils.clip_grad_norm_(trained, self.raw.gradient_clipping(), foreach=True)
        self._stage0_norm = float(norm)
        if not torch.isfinite(norm):
            raise NonFiniteGradient(f"gradient norm {self._stage0_norm}")

    def use_compiled(self, spec: WorkerSpec) -> None:
        """From now on `summed_loss` is compiled. Raises EnvironmentUnfit: this process was not born with what that needs."""
        switch_back_and_forth(self.raw.module)
        planned = self._checkpointing  # the plan of now may recompute activations, what was compiled follows the first one
        self.set_activation_checkpointing(spec.default_plan.activation_checkpointing)
        make_ready(self.raw.module, spec)
        self.set_activation_checkpointing(planned)
        take_over(self.raw.module)
        self.compiled = True

    def forward(self, **inputs: torch.Tensor) -> ModelOutput:
        """What the model returns: logits of shape [rows, tokens, vocabulary], and whatever else it gives."""
        return self.raw(**inputs)

    def summed_loss(self, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """Summed cross-entropy of labels [rows, tokens]; only where the engine is `compiled`."""
        summed: Any = self.forward(**inputs, **{TARGETS: labels})  # one way into the model, for whoever watches passes
        return summed

    def take_uncompiled_passes(self) -> int:
        """How many passes since the last time were computed uncompiled, though the engine is `compiled`."""
        found, uncompiled().passes = uncompiled().passes, 0
        return found

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate gradients of a loss that is already divided by the global token count."""
        self.raw.backward(loss, scale_wrt_gas=False)

    def step(self) -> bool:
        """Apply the accumulated update; returns False where DeepSpeed skipped it (overflow).

        Raises:
            NonFiniteGradient: at stage 0. LossScaleAtFloor: it overflows at the smallest loss scale.
        """
        skipped = self.raw.skipped_steps
        try:
            self.raw.step()
        except Exception as exc:
            if is_floor(exc):
                raise LossScaleAtFloor(str(exc)) from exc
            raise
        return self.raw.skipped_steps == skipped

    def loss_scale(self) -> float | None:
        """The loss scale of the next step; None where none is used."""
        return scale_of(self.raw.optimizer)

    def grad_norm(self) -> float | None:
        """Global gradient norm of the last step before clipping."""
        norm = self._stage0_norm if self._zero_stage == 0 else self.raw.get_global_grad_norm()
        return None if norm is None else float(norm)

    def apply(self, hyperparams: Hyperparams) -> None:
        """Set the clip norm. Loading a checkpoint overwrites it with the saved one, so this follows every load."""
        self.raw._config.gradient_clipping = hyperparams.gradient_clip_norm
        for optimizer in (self.optimizer, self.raw.optimizer):
            if hasattr(optimizer, "clip_grad"):
                optimizer.clip_grad = hyperparams.gradient_clip_norm

    def set_learning_rate(self, value: float) -> None:
        """Set the rate of every group for the next step."""
        for group in self.raw.optimizer.param_groups:
            group["lr"] = value

    def discard_gradients(self) -> None:
        """Forget accumulated gradients: proven equal to the bit at stages 0 and 1 where nothing was reduced yet (FACTS)."""
        self.raw.optimizer.zero_grad()
        self.raw.module.zero_grad(set_to_none=True)
        for parameter in self.raw.module.parameters():
            parameter.grad = None
        if hasattr(self.raw, "_unmanaged_backward_count"):  # counts samples for DeepSpeed's own report, nothing else
            self.raw._unmanaged_backward_count = 0

    def set_activation_checkpointing(self, wanted: bool) -> None:
        """Recompute activations in the backward pass from the next forward on, or keep them: the same numbers up to rounding."""
        if wanted == self._checkpointing:
            return
        recompute_activations(self.raw.module, wanted)
        self._checkpointing = wanted

    def trained_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """(name, parameter) in name order, wrapper prefixes removed; tied weights come once."""
        return self.trainable.named(self.raw.module)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> full shape, also where ZeRO-3 holds only a part."""
        return self.trainable.shapes(self.raw.module)

    def collect_state(self, folder: Path) -> tuple[list[tuple[dict[str, Any], str]], list[tuple[str, torch.Tensor]], str]:
        """Files to write, tensors to digest in the writer, and the digest itself where it needs a collective.

        Every rank must call it. Where the weights are whole and in float32 on rank 0, the writer can hash them off the
        critical path; a partitioned or half-precision engine gathers its master copy here.
        """
        files = self._files_of(folder)
        if self._zero_stage <= 2 and not self._half:
            first = torch.distributed.get_rank() == 0
            return files, [(name, p.detach()) for name, p in self.trained_parameters()] if first else [], ""
        return files, [], self.gathered_digest()

    def _files_of(self, folder: Path) -> list[tuple[dict[str, Any], str]]:
        """DeepSpeed's files, without what does not train: of that the fingerprint is kept (decision record 0008)."""
        base: dict[str, Any] = {BASE_KEY: self.base_digest} if self.base_digest else {}
        self.raw.save_checkpoint(
            str(folder.parent), tag=folder.name, save_latest=False, client_state=base, exclude_frozen_parameters=bool(base)
        )
        files = self._files.take()
        for state, _ in files if base else ():
            if "module" in state:  # DeepSpeed leaves a frozen tied weight in under its second name
                frozen = self.trainable.frozen_names(self.raw.module)
                state["module"] = {name: value for name, value in state["module"].items() if name not in frozen}
        return files

    def gathered_digest(self) -> str:
        """Digest of the master weights, gathered over all ranks.

        At stage 0 DeepSpeed tells no master copy: there the weights themselves are hashed, whole on every rank, as they are exported.
        """
        full = [(name, p.detach() if self._zero_stage == 0 else safe_get_full_fp32_param(p)) for name, p in self.trained_parameters()]
        return weights_digest([(name, tensor) for name, tensor in full if tensor is not None])

    def load(self, folder: Path, position: TrainingPosition, hyperparams: Hyperparams, source: str = "") -> None:
        """Take the state of a checkpoint folder and verify that it is the step that was asked for, on the base from `source` that it
        was trained on.

        Raises:
            InternalError: DeepSpeed loaded nothing, or another step. RequestError: what does not train is not what it was.
        """
        options = [{name: value for name, value in group.items() if name != "params"} for group in self.raw.optimizer.param_groups]
        take = self._take_trained if self.base_digest else None
        path, state = self.raw.load_checkpoint(str(folder.parent), tag=folder.name, load_lr_scheduler_states=False, custom_load_fn=take)
        if is_universal(folder):
            self._mend_universal(options)
        self._keep_asked(options)
        batches = self.raw.global_steps + len(position.passed_batches)  # the engine counts what it was given
        if path is None or batches != position.batch_index:
            raise InternalError(
                "DeepSpeed did not restore the checkpoint's step",
                field="global_steps",
                value=batches if path else "nothing loaded",
                bound=str(position.batch_index),
                remedy="Run mem checkpoints verify; the checkpoint is quarantined if it is bad.",
            )
        refuse_other_base(str((state or {}).get(BASE_KEY, "")), self.base_digest, source)
        self.apply(hyperparams)

    def _keep_asked(self, options: list[dict[str, Any]]) -> None:
        """A checkpoint brings the options that it was saved with; what counts is what is asked for, as in a fork that changed it."""
        for group, own in zip(self.raw.optimizer.param_groups, options, strict=True):
            group.update({name: own[name] for name in _ASKED_OPTIONS if name in own})

    def _take_trained(self, src: dict[str, torch.Tensor], dst: torch.nn.Module) -> None:
        """A module's weights from a checkpoint that holds only those which train; raises InternalError where one of them is missing."""
        missing = set(dst.load_state_dict(src, strict=False).missing_keys) - self.trainable.frozen_names(dst)
        if missing:
            raise InternalError(f"the checkpoint lacks trained weights: {', '.join(sorted(missing)[:5])}", remedy="Report this as a bug.")

    def _mend_universal(self, options: list[dict[str, Any]]) -> None:
        """Stage 3 gives every group the first one's weight decay there, and all groups one step counter, which then runs too fast."""
        for group, own in zip(self.raw.optimizer.param_groups, options, strict=True):
            group.update(own)
        for state in self.raw.optimizer.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()
