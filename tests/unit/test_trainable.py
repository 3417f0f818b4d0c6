"""Which parameters train: the order and names that optimizer, digest, checkpoints and exports rest on."""

import hashlib

import torch

from mem_core.runtime.deepspeed.trainable import EVERY_PARAMETER, Trainable, weights_digest


class Tied(torch.nn.Module):
    """Two names of one matrix, a vector and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(2, 3, bias=True)
        self.embedding = torch.nn.Embedding(3, 2)
        self.last.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros(1))


class Frozen(Trainable):
    """The seam: another choice of what trains."""

    def choose(self, module: torch.nn.Module) -> torch.nn.Module:
        """Only vectors."""
        for parameter in module.parameters():
            parameter.requires_grad_(parameter.dim() < 2)
        return module


def test_every_parameter_trains_tied_ones_once_in_name_order() -> None:
    module = EVERY_PARAMETER.choose(Tied().requires_grad_(False))
    assert [name for name, _ in EVERY_PARAMETER.named(module)] == ["last.bias", "last.weight"]
    assert EVERY_PARAMETER.shapes(module) == {"last.bias": (3,), "last.weight": (3, 2)}
    assert EVERY_PARAMETER.parameters(module) == list(module.parameters())
    assert EVERY_PARAMETER.num_parameters(module) == 9


def test_only_matrices_decay_and_the_module_s_order_is_kept() -> None:
    module = EVERY_PARAMETER.choose(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2), torch.nn.Linear(2, 4)))
    matrices, vectors = EVERY_PARAMETER.groups(module, 0.1)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    ordered = list(module.parameters())
    assert [[id(p) for p in group["params"]] for group in (matrices, vectors)] == [
        [id(p) for p in ordered if p.dim() == 2],
        [id(p) for p in ordered if p.dim() == 1],
    ]
    assert [group["weight_decay"] for group in EVERY_PARAMETER.groups(torch.nn.LayerNorm(2), 0.1)] == [0.0]


def test_another_choice_is_followed_by_all_that_ask() -> None:
    trainable, module = Frozen(), Frozen().choose(Tied())
    assert list(trainable.shapes(module)) == [name for name, _ in trainable.named(module)] == ["last.bias"]
    assert trainable.num_parameters(module) == 3
    assert [len(group["params"]) for group in trainable.groups(module, 0.1)] == [1]


def test_the_digest_is_over_name_shape_and_float32_bytes_in_name_order() -> None:
    """The recipe that every recorded digest was made by, written out; half precision is widened first."""
    one, two = torch.arange(4, dtype=torch.float32).reshape(2, 2), torch.tensor([1.5])
    expected = hashlib.sha256(b"a:(2, 2);" + one.numpy().tobytes() + b"b:(1,);" + two.numpy().tobytes()).hexdigest()
    assert weights_digest([("b", two), ("a", one)]) == weights_digest([("a", one.bfloat16()), ("b", two)]) == expected
    assert weights_digest([("b", two), ("a", one.t())]) != expected
