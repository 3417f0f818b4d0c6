"""Loss and gradients of adapters and of a partly frozen model are those of plain torch in float64, per tensor."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from torch.func import functional_call

from mem_core.domain.request import LoraSection, ModelSection
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.data.serving.shards import ShardWriter
from mem_core.runtime.deepspeed.objective import NextToken, labels_of
from mem_core.runtime.deepspeed.trainable import Adapters, AllBut, Trainable
from mem_core.runtime.models.build import build_model

RANK, ALPHA = 3, 7.0
LENGTHS = (40, 3, 17, 25)
Tensors = dict[str, torch.Tensor]


def model() -> torch.nn.Module:
    return build_model(ModelSection(), 64, 0, "float32", activation_checkpointing=False).double()


def rows() -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(3, 300, length).tolist() for length in LENGTHS]


def dataset(folder: Path, texts: list[list[int]]) -> TokenDataset:
    writer = ShardWriter(folder, 384, has_mask=False)
    writer.write(np.concatenate([np.array(text) for text in texts]), np.array([len(text) for text in texts]), None)
    writer.finish()
    return TokenDataset.open(folder)


def trained_by_mem(
    trainable: Trainable, module: torch.nn.Module, data: TokenDataset, parts: tuple[tuple[int, ...], ...]
) -> tuple[float, Tensors]:
    """Loss per token and gradients by name, as a rank accumulates them over micro-batches of these rows. The objective's own
    cross-entropy is in float32 whatever the model, so here it is taken in float64 over the labels that the objective counts."""
    objective, ids = NextToken(0), np.arange(len(data))
    total = 0.0
    for positions in parts:
        batch = objective.batch(data, ids, positions, max(LENGTHS[position] for position in positions))
        logits = module(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[:, :-1]
        labels = labels_of(batch)[:, 1:]
        loss = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum") / objective.weight(data, ids)
        loss.backward()
        total += float(loss.detach())
    return total, {name: parameter.grad for name, parameter in trainable.named(module) if parameter.grad is not None}


def plain_loss(module: torch.nn.Module, weights: Tensors, texts: list[list[int]]) -> torch.Tensor:
    """Row by row, without padding or mask: mean over the labels of all rows of the model that has these weights."""
    losses = []
    for text in texts:
        tokens = torch.tensor([text])
        logits: Any = functional_call(module, weights, args=(), kwargs={"input_ids": tokens}).logits
        losses.append(functional.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="sum"))
    return torch.stack(losses).sum() / sum(len(text) - 1 for text in texts)


def worst(found: Tensors, wanted: Tensors) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted)


@pytest.mark.parametrize("parts", [((0, 1, 2, 3),), ((0,), (1, 2), (3,))])
@pytest.mark.parametrize("targets", ["auto", ("q_proj", "down_proj")])
def test_adapters(parts: tuple[tuple[int, ...], ...], targets: Any, tmp_path: Path) -> None:
    """`W + alpha / rank * B A` written out by hand, gradients by the chain rule of plain autograd."""
    texts, base = rows(), model()
    trainable = Adapters(LoraSection(rank=RANK, alpha=ALPHA, target_modules=targets), 11)
    adapted = trainable.choose(model())
    draw = torch.Generator().manual_seed(3)
    for name, parameter in trainable.named(adapted):
        if "lora_B" in name:  # zero at first, which would leave every A without a gradient
            parameter.data = torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * 0.05
    leaves = {name: parameter.detach().clone().requires_grad_() for name, parameter in trainable.named(adapted)}
    weights = {name: parameter.detach() for name, parameter in base.named_parameters()}
    layers = {name.split(".lora_")[0] for name in leaves}
    assert len(layers) == (7 if targets == "auto" else 2)
    for layer in layers:
        a, b = (leaves[f"{layer}.lora_{part}.default.weight"] for part in "AB")
        weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + ALPHA / RANK * (b @ a)
    wanted = plain_loss(base, weights, texts)
    gradients = dict(zip(leaves, torch.autograd.grad(wanted, list(leaves.values())), strict=True))
    loss, found = trained_by_mem(trainable, adapted, dataset(tmp_path / "d", texts), parts)
    assert loss == pytest.approx(float(wanted.detach()), rel=1e-12)
    assert worst(found, gradients) < 1e-10


@pytest.mark.parametrize("patterns", [("model.embed_tokens.*",), ("*.mlp.*", "*.q_proj.*"), ("model.layers.*",)])
def test_frozen_layers(patterns: tuple[str, ...], tmp_path: Path) -> None:
    """What trains has the gradient that it has when everything trains; what is frozen has none."""
    texts, base = rows(), model()
    trainable = AllBut(patterns)
    partly = trainable.choose(model())
    leaves = {name: parameter.detach().clone().requires_grad_() for name, parameter in base.named_parameters()}
    wanted = plain_loss(base, leaves, texts)
    gradients = dict(zip(leaves, torch.autograd.grad(wanted, list(leaves.values())), strict=True))
    loss, found = trained_by_mem(trainable, partly, dataset(tmp_path / "d", texts), ((0, 1), (2, 3)))
    assert loss == pytest.approx(float(wanted.detach()), rel=1e-12)
    assert 0 < len(found) < len(gradients)
    assert worst(found, {name: gradients[name] for name in found}) < 1e-10
    assert all(parameter.grad is None for parameter in partly.parameters() if not parameter.requires_grad)
