"""The gradient of one global batch does not depend on how it is cut (I1; field reports 65 to 67), against plain torch."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from mem_core.domain.plan import MemoryPlan
from mem_core.domain.request import ModelSection
from mem_core.runtime.data.serving.collate import Batch, collate
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.data.serving.order import sample_ids
from mem_core.runtime.data.serving.shards import ShardWriter
from mem_core.runtime.data.serving.splits import padded_length, split_batch
from mem_core.runtime.deepspeed.objective import labels_of
from mem_core.runtime.models.build import build_model

LENGTHS = [3, 300, 17, 5, 130, 64, 2, 299, 40, 8]
PAD_AND_END = 1
BATCH = 8


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenDataset]:
    """Rows of 2 to 300 tokens, some with half of their labels masked; the pad token also ends rows."""
    folder = tmp_path_factory.mktemp("gradient") / "d"
    random = np.random.default_rng(0)
    tokens = [np.append(random.integers(3, 259, length - 1), PAD_AND_END) for length in LENGTHS]
    masks = [np.ones(length, np.uint8) for length in LENGTHS]
    masks[1][:150] = 0
    writer = ShardWriter(folder, 384, has_mask=True)
    writer.write(np.concatenate(tokens), np.array(LENGTHS), np.concatenate(masks))
    writer.finish()
    with TokenDataset.open(folder) as opened:
        yield opened


def loss_sum(model: torch.nn.Module, batch: Batch, attention: bool = True) -> torch.Tensor:
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask if attention else None).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels_of(batch)[:, 1:].flatten(), reduction="sum")


def gradients(model: torch.nn.Module, batches: list[Batch], trained_tokens: int, attention: bool = True) -> list[torch.Tensor]:
    model.zero_grad()
    for batch in batches:
        (loss_sum(model, batch, attention) / trained_tokens).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def furthest(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 0), (2, 0), (4, 0), (8, 0), (0, 384), (0, 0)])
def test_any_split_gives_the_gradient_of_the_rows_one_by_one(dataset: TokenDataset, num_ranks: int, rows: int, tokens: int) -> None:
    """Reference: each row alone, without padding, without MEM's collation. Per tensor, norm-wise, 1e-6 in float32."""
    model = build_model(ModelSection(source="preset:llama-nano"), 512, 0, "float32", False)
    ids = sample_ids(0, 3, BATCH, len(dataset))
    trained_tokens = int(dataset.trained_tokens[ids].sum())
    reference = []
    for row, mask in dataset.rows(ids):
        reference.append(Batch(torch.tensor([row.tolist()]), torch.tensor([mask.tolist()]) != 0, None))
    expected = gradients(model, reference, trained_tokens)
    bucket = partial(padded_length, sequence_length=512)
    split = split_batch(dataset.lengths[ids], num_ranks, MemoryPlan(micro_batch_rows=rows, micro_batch_tokens=tokens), bucket)
    batches = [
        collate(dataset, ids, micro, bucket(int(dataset.lengths[ids[list(micro)]].max())), PAD_AND_END) for rank in split for micro in rank
    ]
    assert sum(int((labels_of(batch)[:, 1:] != -100).sum()) for batch in batches) == trained_tokens
    assert furthest(gradients(model, batches, trained_tokens), expected) < 1e-6
    assert furthest(gradients(model, batches, trained_tokens, attention=False), expected) < 1e-6, "padding on the right needs no mask"


def test_the_rows_of_a_batch_are_really_of_different_length(dataset: TokenDataset, tmp_path: Path) -> None:
    """Otherwise the test above would prove nothing."""
    lengths = dataset.lengths[sample_ids(0, 3, BATCH, len(dataset))]
    assert lengths.max() > 50 * lengths.min()
