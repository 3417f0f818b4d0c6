"""The gradient of a global batch is that of plain torch, row by row, however it is split over micro-batches and ranks (I1).

The engine's gradient is read from the optimizer after the first update: AdamW's first moment is then (1 - beta1) × gradient,
so that forward, accumulation, reduction over ranks and the division by the global token count are all in it.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.data.serving.order import sample_ids
from mem_core.runtime.deepspeed.trainable import trainable_of
from mem_core.runtime.models.build import build_model

pytestmark = pytest.mark.integration
BATCH = 16
BETA1 = 0.9
LENGTHS = (1, 250, 3, 40, 7, 120, 2, 90)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JSONL whose texts differ in length by a factor of over a hundred."""
    path = tmp_path_factory.mktemp("gradient-data") / "rows.jsonl"
    random = np.random.default_rng(7)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    texts = ["".join(random.choice(letters, LENGTHS[i % len(LENGTHS)])) for i in range(2 * BATCH)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def one_step(nano: Callable[..., RuntimeRequest], rows: Path, run_id: str, ranks: int, micro: int, **part: Any) -> RuntimeRequest:
    """One update with a clip norm that never acts, so that the first moment holds the whole gradient. `part`: what of the model trains."""
    return nano(
        run_id,
        model=part,
        data={"train": [str(rows)], "validation": None, "sequence_length": 256, "packing": False},
        training={
            "max_steps": 1, "segment_steps": 1, "global_batch_size": BATCH, "betas": [BETA1, 0.95], "gradient_clip_norm": 1000.0,
            "warmup_steps": 0,
        },
        parallel={"num_ranks": ranks, "zero_stage": 0},
        memory={"micro_batch_size": micro},
    )  # fmt: skip


def engine_gradients(folder: Path) -> list[torch.Tensor]:
    """Gradients in the optimizer's order: matrices, then the rest."""
    state: dict[str, Any] = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)["optimizer"]["state"]
    return [state[index]["exp_avg"] / (1 - BETA1) for index in sorted(state)]


def plain_gradients(data: TokenDataset, request: RuntimeRequest) -> Iterator[torch.Tensor]:
    """The same in plain torch: each row alone, without padding, mask or MEM's collation; sum of losses ÷ trained tokens."""
    model = build_model(request.model, request.data.sequence_length, request.training.seed, "float32", False)
    trainable_of(request).choose(model)
    ids = sample_ids(request.training.seed, 0, BATCH, len(data))
    texts = [row.tolist() for row, _ in data.rows(ids)]
    trained_tokens = sum(len(text) - 1 for text in texts)
    assert max(map(len, texts)) > 50 * min(map(len, texts)), "rows of one length would prove nothing"
    for text in texts:
        tokens = torch.tensor([text])
        logits = model(input_ids=tokens).logits[0, :-1]
        (torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum") / trained_tokens).backward()
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    yield from (parameter.grad for parameter in parameters if parameter.dim() >= 2 and parameter.grad is not None)
    yield from (parameter.grad for parameter in parameters if parameter.dim() < 2 and parameter.grad is not None)


def test_the_gradient_is_that_of_plain_torch_for_any_micro_batch_and_number_of_ranks(
    drive: Callable[..., RunResult], nano: Callable[..., RuntimeRequest], rows: Path
) -> None:
    expected: list[torch.Tensor] = []
    digests = set()
    for ranks in (1, 2):
        for micro in (1, 2, 4, 8):
            request = one_step(nano, rows, f"ranks-{ranks}-micro-{micro}", ranks, micro)
            seen: list[TokenDataset] = []
            result = drive(request, prepared=lambda draft, seen=seen: seen.append(TokenDataset.open(draft.data.train_dir)))
            folder = Path(result.run_folder)
            expected = expected or list(plain_gradients(seen[0], request))
            found = engine_gradients(folder / "checkpoints" / "step-000000001")
            assert len(found) == len(expected) > 5
            distances = [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
            assert max(distances) <= 1e-6, (ranks, micro, distances)
            with np.load(folder / "metrics" / "step-000000001.npz") as columns:
                assert columns["micro_batches"].tolist() == [BATCH // ranks // micro], "the split that was asked for was used"
            digests.add(result.trajectory_digest)
    assert len(digests) == 8, "each split is recorded as another trajectory"


@pytest.mark.parametrize(
    ("part", "ranks", "micro"), [({"lora": {"rank": 4}}, 2, 2), ({"freeze": ["model.embed_tokens.*", "*.mlp.*"]}, 1, 4)]
)
def test_so_is_that_of_adapters_and_of_a_partly_frozen_model(
    part: dict[str, Any], ranks: int, micro: int, drive: Callable[..., RunResult], nano: Callable[..., RuntimeRequest], rows: Path
) -> None:
    """Taken together: before the first update half of the adapters' gradients are zero."""
    request = one_step(nano, rows, "part", ranks, micro, **part)
    seen: list[TokenDataset] = []
    result = drive(request, prepared=lambda draft: seen.append(TokenDataset.open(draft.data.train_dir)))
    expected = list(plain_gradients(seen[0], request))
    found = engine_gradients(Path(result.run_folder) / "checkpoints" / "step-000000001")
    assert [value.shape for value in found] == [value.shape for value in expected]
    away = sum(float((a - b).double().square().sum()) for a, b in zip(found, expected, strict=True))
    assert (away / sum(float(value.double().square().sum()) for value in expected)) ** 0.5 <= 1e-6
