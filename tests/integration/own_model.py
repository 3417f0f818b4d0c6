"""The model as a run itself has it at a checkpoint, to compare with what others make of its exports."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from mem_core.domain.request import RuntimeRequest
from mem_core.runtime.deepspeed.trainable import trainable_of
from mem_core.runtime.models.build import build_model
from mem_core.runtime.ranks.local.processes import ForkServer


def own_model(request: RuntimeRequest, server: ForkServer, checkpoint: Path, log_folder: Path) -> Any:
    """The float32 model as the run built it, with the trained weights of its checkpoint as DeepSpeed reads them."""
    server.log_into(log_folder)
    child = server.fork("stage_weights:fp32_weights", "weights.log")
    child.connection.send(str(checkpoint))
    weights: dict[str, np.ndarray] = child.connection.recv()
    child.close()
    model = build_model(request.model, request.data.sequence_length, request.training.seed, "float32", activation_checkpointing=False)
    trainable = trainable_of(request)
    trainable.choose(model)
    assert weights.keys() >= trainable.shapes(model).keys()
    assert model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()}, strict=False).unexpected_keys == []
    return model
