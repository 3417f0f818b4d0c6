"""What is trained: which labels count, the summed loss, and that a model is never asked for a loss of its own."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mem_core.core.memory.ladder import MicroBatch
from mem_core.domain.request import RuntimeRequest
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.data.serving.shards import ShardWriter
from mem_core.runtime.deepspeed.objective import NextToken, labels_of, objective_of, pad_token_for, summed_cross_entropy

CPU = torch.device("cpu")


def dataset(folder: Path, rows: list[list[int]], masks: list[list[int]] | None) -> TokenDataset:
    writer = ShardWriter(folder, 384, has_mask=masks is not None)
    tokens = np.concatenate([np.array(row) for row in rows])
    mask = None if masks is None else np.concatenate([np.uint8(mask) for mask in masks])
    writer.write(tokens, np.array([len(row) for row in rows]), mask)
    writer.finish()
    return TokenDataset.open(folder)


class Recorder:
    """A model of five tokens whose logits are a table; remembers what it was called with."""

    def __init__(self) -> None:
        self.table = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
        self.inputs: dict[str, Any] = {}

    def __call__(self, **inputs: Any) -> Any:
        self.inputs = inputs
        return SimpleNamespace(logits=self.table[inputs["input_ids"]])


def test_the_loss_is_that_of_each_counted_token_given_those_before_it(tmp_path: Path) -> None:
    """By hand, token by token: row 0 counts its last two labels, row 1 is shorter and padded with a token that it also ends with."""
    data = dataset(tmp_path / "d", [[1, 2, 3, 4], [3, 0]], [[0, 0, 1, 1], [1, 1]])
    objective, model, ids = NextToken(pad_token_id=0), Recorder(), np.array([0, 1])
    batch = objective.batch(data, ids, (0, 1), 4)
    assert labels_of(batch).tolist() == [[-100, -100, 3, 4], [3, 0, -100, -100]]
    log = model.table.log_softmax(-1)
    expected = -(log[2, 3] + log[3, 4] + log[3, 0])
    assert float(objective.loss(model, batch).total) == pytest.approx(float(expected))
    assert objective.weight(data, ids) == 3
    assert set(model.inputs) == {"input_ids", "attention_mask"}, "given labels, a model adds losses of its own unseen"


def test_parts_of_a_batch_add_up_to_the_whole(tmp_path: Path) -> None:
    rows = [[1, 2, 3, 4], [4, 3, 2, 1], [1, 1, 2, 2]]
    data = dataset(tmp_path / "d", rows, None)
    objective, model, ids = NextToken(0), Recorder(), np.arange(3)
    whole = objective.loss(model, objective.batch(data, ids, (0, 1, 2), 4)).total
    assert model.inputs.keys() == {"input_ids"}, "no row is padded, so there is no mask to pay for"
    parts = [objective.loss(model, objective.batch(data, ids, (position,), 4)).total for position in range(3)]
    assert float(sum(parts)) == pytest.approx(float(whole))
    assert objective.weight(data, ids) == sum(objective.weight(data, ids[[position]]) for position in range(3)) == 9


def test_a_probe_has_the_size_of_a_real_batch_and_brings_a_mask() -> None:
    batch = NextToken(0).probe(MicroBatch(2, 6), vocabulary=5, device=CPU)
    assert batch.input_ids.shape == (2, 6)
    assert int(batch.input_ids.max()) < 5
    assert batch.attention_mask is not None
    assert int(batch.attention_mask.sum()) == 11


def test_the_last_position_has_nothing_to_predict() -> None:
    logits, labels = torch.zeros(1, 3, 4), torch.tensor([[1, 2, 3]])
    assert float(summed_cross_entropy(logits, labels)) == pytest.approx(2 * np.log(4))


def test_a_request_trains_the_next_token() -> None:
    assert objective_of(RuntimeRequest(run_id="a"), 7) == NextToken(7)


@pytest.mark.parametrize(("wanted", "taken"), [(4, 4), (5, 0), (32_000, 0)])
def test_a_pad_token_that_the_model_never_had_is_replaced(wanted: int, taken: int) -> None:
    """Tokenizers bring a pad token along that lies beyond the embeddings; what stands in padding is looked up although nobody sees it."""

    class Small(torch.nn.Module):
        """Five tokens."""

        def __init__(self) -> None:
            super().__init__()
            self.embeddings = torch.nn.Embedding(5, 2)

        def get_input_embeddings(self) -> torch.nn.Module:
            return self.embeddings

    assert pad_token_for(Small(), wanted) == taken
    assert pad_token_for(torch.nn.Linear(2, 2), wanted) == wanted, "a model that does not tell is asked nothing"
