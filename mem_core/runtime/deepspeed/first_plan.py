"""After the engine is built: is there room for the planned passes, and if not for certain, measure and choose."""

import time
from typing import Any

import numpy as np
import torch

from mem_core.core.doctor.memory import RETAINED, estimate_memory
from mem_core.core.memory.ladder import MicroBatch, PlanBounds, largest_micro_batch
from mem_core.core.memory.model import PeakLine, PeakSample, fit_line
from mem_core.core.memory.start import Limit, Needs, could_bind, moments_to_come, room_for_activations, starting_plan
from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.environment import ModelNumbers
from mem_core.domain.plan import MemoryPlan
from mem_core.domain.units import format_bytes
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.data.serving.splits import padded_length
from mem_core.runtime.deepspeed.calibration import Pass, measure_forked, measure_in_place, sizes_to_try
from mem_core.runtime.deepspeed.objective import objective_of
from mem_core.runtime.deepspeed.trainable import Trainable, trainable_of, whole_size
from mem_core.runtime.memory.adaptive_memory import AdaptiveMemory
from mem_core.runtime.models.build import build_model
from mem_core.runtime.ranks.place import RankPlace
from mem_core.runtime.ranks.worker.device import LocalDevice
from mem_core.runtime.ranks.worker.protocol import WorkerSpec


class FirstPlan:
    """Measures where a limit could bind, and lets rank 0 choose for all. Used once for each engine."""

    def __init__(
        self, spec: WorkerSpec, place: RankPlace, memory: AdaptiveMemory, module: Any, data: TokenDataset, device: LocalDevice
    ) -> None:
        self._spec, self._memory, self._module, self._data, self._device = spec, memory, module, data, device
        self._trainable = trainable_of(spec.request)
        self._pass = Pass(objective_of(spec.request, spec.pad_token_id), self._trainable)
        self._rank, self._num_ranks = place.rank, place.num_ranks

    def prepare(self, position: TrainingPosition, replay_until: int) -> TrainingPosition:
        """The position with a plan that is predicted to fit. Every rank must call it; costs a millisecond where nothing can bind."""
        memory = self._memory
        if not memory.adaptive:
            memory.begin(position, replay_until, None)
            return position
        limits = memory.limits_now()
        if self._num_ranks > 1:
            torch.distributed.barrier()  # every rank has posted its reading
            limits = memory.limits_now()
        chosen: list[Any] = [None]
        if self._rank == 0:
            position, chosen[0] = self._choose(position, replay_until, limits)
        if self._num_ranks > 1:
            torch.distributed.broadcast_object_list(chosen, src=0)
        if self._rank != 0:
            memory.begin(position, replay_until, None)
            if chosen[0] is not None:
                position = memory.choose(position, chosen[0], "as rank 0 recorded", limits[0])
        return position

    def _choose(self, position: TrainingPosition, replay_until: int, limits: list[Limit]) -> tuple[TrainingPosition, MemoryPlan | None]:
        """Rank 0: measure if need be; returns the position and the plan that all ranks change to, if any."""
        memory, bounds = self._memory, self._memory.bounds
        current = memory.plan(position)
        needs, per_token = self._needs(position)
        largest = largest_micro_batch(current, bounds)
        if not any(could_bind(limit, needs, int(per_token * largest.tokens)) for limit in limits):
            memory.begin(position, replay_until, None)
            return position, None
        started_s = time.monotonic()
        high = self._spec.request.memory.high_watermark
        room, limit = min(((room_for_activations(limit, needs, high), limit) for limit in limits), key=lambda pair: pair[0])
        free = min((limit.limit_bytes - limit.used_bytes) / limit.shares for limit in limits)
        plain = self._line(free, recompute=current.activation_checkpointing) or PeakLine(0.0, per_token)
        memory.begin(position, replay_until, plain)
        if not memory.may_choose(position):
            return position, None
        checkpointed = None
        if not current.activation_checkpointing and plain.tokens_that_fit(room, bounds.longest_tokens) < bounds.longest_tokens:
            checkpointed = self._line(free, recompute=True)
        plan = starting_plan(current, bounds, plain, checkpointed, room)
        text = _describe(plain, limit, room, time.monotonic() - started_s)
        memory.note(text)
        if plan == current:
            return position, None
        return memory.choose(position, plan, text, limit), plan

    def _line(self, free_bytes: float, *, recompute: bool) -> PeakLine | None:
        """The measured line; None where too little could be measured."""
        bounds = self._memory.bounds
        lengths = np.asarray(self._data.lengths)
        typical = padded_length(int(np.median(lengths)), self._spec.request.data.sequence_length)
        sizes = sizes_to_try(bounds.longest_tokens, typical, bounds.most_rows)
        return fit_line(self._measure(sizes, free_bytes, recompute=recompute))

    def _measure(self, sizes: list[MicroBatch], free_bytes: float, *, recompute: bool) -> list[PeakSample]:
        stage = self._spec.request.parallel.zero_stage
        if self._device.kind == "cpu":
            model = self._fresh_model if stage == 3 else lambda: self._module
            return measure_forked(model, self._pass, sizes, free_bytes, recompute=recompute)
        if stage == 3:
            return []  # its forward is a collective: the formula has to do until the first steps are read
        return measure_in_place(self._module, self._pass, sizes, free_bytes, self._device, recompute=recompute)

    def _fresh_model(self) -> Any:
        """The same model whole, since ZeRO-3's own cannot run in a process without peers."""
        request = self._spec.request
        model = build_model(request.model, request.data.sequence_length, request.training.seed, self._spec.dtype, False)
        return self._trainable.choose(model)

    def _needs(self, position: TrainingPosition) -> tuple[Needs, float]:
        """What is still to be allocated beside activations, and predicted activation bytes per token, by the doctor's formula."""
        spec, device, current = self._spec, self._device.kind, self._memory.plan(position)
        estimate = estimate_memory(
            model_numbers(self._module, self._trainable), spec.request, spec.dtype, device=device,
            activation_checkpointing=current.activation_checkpointing,
        )  # fmt: skip
        stage = spec.request.parallel.zero_stage
        offloaded = device == "cuda" and stage >= 1 and "cpu" in (spec.request.parallel.offload_optimizer, current.offload_optimizer)
        needs = Needs(
            to_come=moments_to_come(
                estimate["optimizer"], stage=stage, dtype=spec.dtype, applied_steps=position.applied_steps, offloaded=offloaded
            ),
            gradients=estimate["gradients"],
            step=estimate["step_transient"],
            retained=1.0 if stage == 3 else RETAINED if device == "cpu" else 0.0,
        )
        return needs, (estimate["activations"] + estimate["logits"]) / spec.request.data.sequence_length


def model_numbers(module: Any, trainable: Trainable) -> ModelNumbers:
    """The sizes of a built model, whole also where ZeRO-3 holds a part."""
    config = module.config
    return ModelNumbers(
        num_parameters=sum(whole_size(parameter) for parameter in module.parameters()),
        num_trainable_parameters=trainable.num_parameters(module),
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 0,
        vocab_size=config.vocab_size,
        num_heads=getattr(config, "num_attention_heads", 1),
        num_kv_heads=getattr(config, "num_key_value_heads", None),
    )


def _describe(line: PeakLine, limit: Limit, room_bytes: float, duration_s: float) -> str:
    kind = f"measured in {line.num_samples} passes" if line.num_samples else "by the doctor's formula"
    return (
        f"memory calibrated ({kind}, {duration_s:.1f} s): a pass takes {format_bytes(line.fixed_bytes)} + {format_bytes(line.per_token)} "
        f"per token ± {format_bytes(line.error_bytes)}; room for it {format_bytes(room_bytes)} under {limit.name} "
        f"({format_bytes(limit.used_bytes)} of {format_bytes(limit.limit_bytes)} used)"
    )


def plan_bounds(spec: WorkerSpec, num_ranks: int, data: TokenDataset) -> PlanBounds:
    """What the ladder may do inside a rank; the optimizer can only be moved when the engine is built anew."""
    share = spec.request.training.global_batch_size // num_ranks
    asked = spec.request.memory.micro_batch_size
    return PlanBounds(
        most_rows=share if asked == "auto" else min(share, asked),
        longest_tokens=padded_length(int(data.lengths.max()), spec.request.data.sequence_length),
        may_checkpoint=spec.request.model.activation_checkpointing != "off",
    )
