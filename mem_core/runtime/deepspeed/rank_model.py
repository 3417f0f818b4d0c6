"""The model of one rank, on the device of that rank."""

import torch

from mem_core.domain.plan import MemoryPlan
from mem_core.runtime.deepspeed.trainable import Trainable
from mem_core.runtime.models.build import build_model
from mem_core.runtime.ranks.worker.device import LocalDevice
from mem_core.runtime.ranks.worker.protocol import WorkerSpec


def build_rank_model(spec: WorkerSpec, plan: MemoryPlan, device: LocalDevice, trainable: Trainable) -> torch.nn.Module:
    """The request's model with fresh weights (the same on every rank) or those of its folder, ready to be trained under `plan`.

    What trains is chosen on the CPU, where the same seed gives the same adapters whatever the device.
    """
    request = spec.request
    model = build_model(request.model, request.data.sequence_length, request.training.seed, spec.dtype, plan.activation_checkpointing)
    return trainable.choose(model).to(device.torch_device).train()
