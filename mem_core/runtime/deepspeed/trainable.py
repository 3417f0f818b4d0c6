"""Which parameters of a model train. The optimizer, the digest, checkpoints' parameter lists, exports and memory numbers ask here.

Every one, all but those of some names, or adapters beside a model that stays as it is: three ways to `choose`, and all the rest
follows what was marked on the module. Marks and not names are what DeepSpeed itself looks at.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from mem_core.domain.errors import RequestError
from mem_core.domain.plan import MemoryPlan
from mem_core.domain.request import LoraSection, RuntimeRequest
from mem_core.runtime.models.adapters import left_out_experts, merge_adapters, put_adapters
from mem_core.runtime.models.build import build_model, clean_name, parameter_names
from mem_core.runtime.ranks.worker.device import LocalDevice
from mem_core.runtime.ranks.worker.protocol import WorkerSpec

BASE_KEY = "mem_base_sha256"  # in a checkpoint's model states, beside DeepSpeed's own entries
_SHOWN_NAMES = 12


@dataclass(frozen=True)
class Trainable:
    """Every parameter."""

    @property
    def has_base(self) -> bool:
        """Whether a part of the model stays as it was read: checkpoints then hold its fingerprint instead of its numbers."""
        return False

    def choose(self, module: torch.nn.Module) -> torch.nn.Module:
        """Mark what trains; before the engine is built.

        Raises:
            RequestError: what the request names is not there.
        """
        return module.requires_grad_(True)

    def left_out(self, module: torch.nn.Module) -> tuple[str, ...]:
        """Weights that one could expect to be trained and that are not, for people."""
        del module
        return ()

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

    def whole(self, module: torch.nn.Module, trained: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Every weight of the model by its own name, tied ones once: `trained` on what `module`, chosen from and whole, holds beside it."""
        held = {name: parameter.detach() for name, parameter in module.named_parameters() if not parameter.requires_grad}
        return held | dict(trained)

    def base_digest(self, module: torch.nn.Module) -> str:
        """Fingerprint of what does not train, over names, number formats and bytes; empty where everything does. Before the engine is
        built: ZeRO-3 leaves a rank only a part."""
        frozen = [(clean_name(name), parameter) for name, parameter in module.named_parameters() if not parameter.requires_grad]
        return frozen_digest(frozen) if frozen else ""

    def frozen_names(self, module: torch.nn.Module) -> frozenset[str]:
        """Every name, as the module itself says it, of what does not train: a tied weight has several."""
        named = module.named_parameters(remove_duplicate=False)
        return frozenset(name for name, parameter in named if not parameter.requires_grad)


@dataclass(frozen=True)
class AllBut(Trainable):
    """Every parameter whose name matches none of the patterns. A tied weight is frozen under any of its names."""

    patterns: tuple[str, ...]

    @property
    def has_base(self) -> bool:
        """The parameters that match."""
        return True

    def choose(self, module: torch.nn.Module) -> torch.nn.Module:
        """Raises RequestError: a pattern matches nothing, or nothing is left to train."""
        module.requires_grad_(True)
        named = list(module.named_parameters(remove_duplicate=False))
        for pattern in self.patterns:
            found = [parameter for name, parameter in named if fnmatchcase(name, pattern)]
            if not found:
                raise _refused(f"no parameter of the model is called {pattern}", pattern, _shown([name for name, _ in named]))
            for parameter in found:
                parameter.requires_grad_(False)
        if not self.parameters(module):
            raise _refused("every parameter of the model is frozen, so there is nothing to train", ", ".join(self.patterns), "")
        return module


@dataclass(frozen=True)
class Adapters(Trainable):
    """Low-rank adapters, drawn from the run's seed; the model's own weights stay as they were read."""

    lora: LoraSection
    seed: int

    @property
    def has_base(self) -> bool:
        """The whole model."""
        return True

    def choose(self, module: torch.nn.Module) -> torch.nn.Module:
        """Raises RequestError: `target_modules` names what is no linear layer of the model."""
        return put_adapters(module.requires_grad_(False), self.lora, self.seed)

    def whole(self, module: torch.nn.Module, trained: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The adapters added into the weights that they belong to."""
        return merge_adapters(module, trained)

    def left_out(self, module: torch.nn.Module) -> tuple[str, ...]:
        """Experts that are held as one parameter."""
        return left_out_experts(module)


EVERY_PARAMETER = Trainable()


def trainable_of(request: RuntimeRequest) -> Trainable:
    """What trains in a run of this request."""
    if request.model.lora is not None:
        return Adapters(request.model.lora, request.training.seed)
    return AllBut(request.model.freeze) if request.model.freeze else EVERY_PARAMETER


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


def frozen_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over frozen parameters in name order, in the number format that they are used in: nothing is widened, since they are many."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
        digest.update(tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def refuse_other_base(saved: str, found: str, source: str) -> None:
    """Raises RequestError: what does not train, read anew from `source`, is not what the checkpoint was trained on."""
    if saved != found:
        raise RequestError(
            "the model has changed since the checkpoint was saved: the weights that do not train are other ones",
            field="model.source", value=f"{source} with {found[:16] or 'none'}", bound=saved[:16] or "none",
            remedy="Restore the model folder as it was, or use a new run_id.",
        )  # fmt: skip


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more


def _refused(problem: str, value: str, bound: str) -> RequestError:
    remedy = "A pattern is a parameter's whole name with * and ? in it; mend it, or leave it out to train everything."
    return RequestError(problem, field="model.freeze", value=value, bound=bound, remedy=remedy)


def build_rank_model(spec: WorkerSpec, plan: MemoryPlan, device: LocalDevice, trainable: Trainable) -> torch.nn.Module:
    """The request's model with fresh weights (the same on every rank) or those of its folder, ready to be trained under `plan`.

    What trains is chosen on the CPU, where the same seed gives the same adapters whatever the device.
    """
    request = spec.request
    model = build_model(request.model, request.data.sequence_length, request.training.seed, spec.dtype, plan.activation_checkpointing)
    return trainable.choose(model).to(device.torch_device).train()
