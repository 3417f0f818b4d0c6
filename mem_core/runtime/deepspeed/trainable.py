"""Which parameters of a model train. The optimizer, the digest, checkpoints' parameter lists, exports and memory numbers ask here.

Today every one trains. Frozen patterns and adapters are another `choose` (and for adapters another `exported`): all the rest follows
what `choose` has marked on the module. Marks and not names are what DeepSpeed itself looks at.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mem_core.domain.request import RuntimeRequest
from mem_core.runtime.models.build import clean_name, parameter_names


@dataclass(frozen=True)
class Trainable:
    """Every parameter."""

    def choose(self, module: torch.nn.Module) -> torch.nn.Module:
        """Mark what trains; before the engine is built."""
        return module.requires_grad_(True)

    def parameters(self, module: torch.nn.Module) -> list[torch.nn.Parameter]:
        """In the module's own order, tied weights once: flat buffers and the order of sums hang on it."""
        return [parameter for parameter in module.parameters() if parameter.requires_grad]

    def named(self, module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
        """(name, parameter) in name order, wrapper prefixes removed, tied weights once: the order of the digest."""
        named = ((clean_name(name), parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)
        return sorted(named, key=lambda item: item[0])

    def shapes(self, module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
        """Name -> full shape, also where ZeRO-3 holds only a part."""
        return parameter_names(module)

    def groups(self, module: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        """Parameter groups of the optimizer: weight decay on matrices only, as GPT-3 and Llama train. Empty ones are left out."""
        trained = self.parameters(module)
        matrices = [parameter for parameter in trained if parameter.dim() >= 2]
        others = [parameter for parameter in trained if parameter.dim() < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        return [group for group in groups if group["params"]]

    def num_parameters(self, module: torch.nn.Module) -> int:
        """Trained numbers, whole also where ZeRO-3 holds a part."""
        return sum(whole_size(parameter) for parameter in self.parameters(module))

    def exported(self, merged: Mapping[str, torch.Tensor], trained: Collection[str]) -> dict[str, torch.Tensor]:
        """What a Hugging Face folder holds, by clean name: `merged` is a whole checkpoint, `trained` the names in its manifest."""
        return {name: merged[name] for name in trained}


EVERY_PARAMETER = Trainable()


def trainable_of(request: RuntimeRequest) -> Trainable:
    """What trains in a run of this request."""
    del request  # every request trains every parameter today
    return EVERY_PARAMETER


def whole_size(parameter: torch.nn.Parameter) -> int:
    """Numbers of a parameter, whole also where ZeRO-3 holds a part."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def weights_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over trained parameters as float32, in name order: name, shape, bytes of each."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        digest.update(f"{name}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().to("cpu", torch.float32).contiguous().numpy().data)
    return digest.hexdigest()
