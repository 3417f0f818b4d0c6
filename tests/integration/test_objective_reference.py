"""Loss and gradients of what a request trains equal those of plain torch, row by row, without MEM's packing, padding or masks (I1)."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mem_core.domain.request import DataSection, RuntimeRequest
from mem_core.runtime.data.encoding.huggingface import HuggingFaceEncoder
from mem_core.runtime.data.encoding.tokenize_process import prepare_here
from mem_core.runtime.data.reading.rows import Document
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.data.serving.order import sample_ids
from mem_core.runtime.data.serving.shards import ShardWriter
from mem_core.runtime.data.serving.splits import padded_length
from mem_core.runtime.data.values import PrepareJob
from mem_core.runtime.deepspeed.objective import NextToken
from mem_core.runtime.models.router import RouterLoss, is_computable
from mem_core.testing.model_folders import model_folder

pytestmark = pytest.mark.integration
LENGTH = 256
Sample = tuple[list[int], list[int]]
SETTINGS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 16}, "falcon": {"alibi": True}, "gpt2": dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}  # fmt: skip
WORDS = ["The", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "x", "10", "y", "20", "z", "30", "again"]


def words(number: int, count: int) -> str:
    return " ".join(WORDS[(number * 5 + i * 3) % len(WORDS)] for i in range(count))


def conversation(number: int) -> list[dict[str, Any]]:
    """One to three exchanges of different length, of which some answers are not to be trained."""
    turns: list[dict[str, Any]] = []
    for turn in range(1 + number % 3):
        answer: dict[str, Any] = {"role": "assistant", "content": words(number + turn, 1 + (number * 7 + turn) % 9)}
        turns += [{"role": "user", "content": words(number, 2 + turn)}, {**answer, **({"train": False} if turn == 1 else {})}]
    return turns


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    root = tmp_path_factory.mktemp("models")

    def make(model_type: str, **settings: Any) -> Path:
        folder = root / "-".join(map(str, [model_type, *settings.values()])).replace(" ", "-")
        return folder if folder.exists() else model_folder(folder, model_type, **settings)

    return make


def load(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, attn_implementation="sdpa", use_cache=False).train()


def prepared(tmp_path: Path, folder: Path, rows: Sequence[dict[str, Any]], **settings: Any) -> TokenDataset:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSection(train=(str(path),), validation=None, sequence_length=LENGTH, **settings)
    job = PrepareJob(data=data, tokenizer_source=str(folder), vocab_size=None, cache_dir=tmp_path / "cache", parent_pid=0)
    return TokenDataset.open(prepare_here(job, lambda progress: None).train_dir)


def plain(model: Any, samples: Sequence[Sample]) -> tuple[float, float, list[torch.Tensor]]:
    """(loss, what the model adds, gradients): each sample alone, as the library computes it; the sum over labels ÷ all labels."""
    model.zero_grad()
    weights = [sum(mask[1:]) for _, mask in samples]
    losses = torch.zeros(2, dtype=torch.float64)
    for (ids, mask), weight in zip(samples, weights, strict=True):
        tokens = torch.tensor([ids])
        output = model(input_ids=tokens)
        log = output.logits[0, :-1].log_softmax(-1)
        each = -log[torch.arange(len(ids) - 1), tokens[0, 1:]]
        loss = (each * torch.tensor(mask[1:])).sum()
        added = torch.zeros(())
        if model.config.to_dict().get("output_router_logits"):
            added = model.router_aux_loss_coef * switch_loss(model, output.router_logits) * weight
        if weight:
            ((loss + added) / sum(weights)).backward()
        losses += torch.tensor([float(loss.detach()), float(added.detach())], dtype=torch.float64) / sum(weights)
    return float(losses[0]), float(losses[1]), gradients(model)


def switch_loss(model: Any, router_logits: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of one row: experts × sum of (tokens sent to an expert ÷ tokens) × (its mean probability), over the layers end to end."""
    probabilities = torch.cat(list(router_logits)).softmax(-1)
    sent = torch.zeros(model.num_experts, dtype=probabilities.dtype)
    for token in probabilities.tolist():
        for expert in sorted(range(model.num_experts), key=lambda expert: -token[expert])[: model.num_experts_per_tok]:
            sent[expert] += 1
    return model.num_experts * (sent / len(probabilities) * probabilities.mean(0)).sum()


def gradients(model: Any) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def ours(model: Any, data: TokenDataset, ids: np.ndarray, split: Sequence[Sequence[int]]) -> tuple[float, float, list[torch.Tensor]]:
    """The same by MEM's batches and objective, a backward pass for each part of the split."""
    model.zero_grad()
    adds = bool(model.config.to_dict().get("output_router_logits"))
    objective = NextToken(0, RouterLoss.of(model) if adds else None, data.index.documents_apart)
    total, losses = objective.weight(data, ids), np.zeros(2)
    for positions in split:
        length = padded_length(int(data.lengths[ids[list(positions)]].max()), LENGTH)
        loss = objective.loss(model, objective.batch(data, ids, tuple(positions), length))
        (loss.total / total).backward()
        losses += [float(part.detach()) / total if part is not None else 0.0 for part in (loss.tokens, loss.added)]
    return losses[0], losses[1], gradients(model)


def splits(count: int) -> list[list[list[int]]]:
    """All at once, one by one, and unevenly out of order."""
    order = [*range(1, count, 2), *range(0, count, 2)]
    return [[list(range(count))], [[position] for position in range(count)], [order[:1], order[1:]]]


def check_equal(folder: Path, data: TokenDataset, ids: np.ndarray, samples: Sequence[Sample]) -> None:
    assert len(data) > 1
    for dtype in (torch.float64, torch.float32):
        model = load(folder, dtype)
        expected_loss, expected_added, expected = plain(model, samples)
        for split in splits(len(ids)):
            loss, added, found = ours(model, data, ids, split)
            tolerance = 1e-10 if dtype == torch.float64 else 1e-6
            assert loss == pytest.approx(expected_loss, rel=tolerance)
            assert added == pytest.approx(expected_added, rel=tolerance)
            assert len(found) == len(expected) > 5
            if dtype == torch.float64:
                distances = [float((a - b).norm() / max(float(b.norm()), 1e-30)) for a, b in zip(found, expected, strict=True) if b.any()]
                assert max(distances) <= tolerance, distances
            one, other = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (found, expected))
            assert float((one - other).norm() / other.norm()) <= tolerance


def rendered(folder: Path, messages: list[dict[str, Any]], **settings: Any) -> Sample:
    data = DataSection(messages_field="messages", **settings)
    chat = HuggingFaceEncoder.of_folder(str(folder), 3).encode_turns(Document(messages=messages), data)
    return chat.tokens.tolist(), chat.mask.tolist()


@pytest.mark.parametrize(("model_type", "family"), [("llama", "ChatML"), ("mistral", "Mistral"), ("falcon", "Phi"), ("gpt2", "Llama 3")])
def test_packed_chats_of_many_turns(model_type: str, family: str, tmp_path: Path, folders: Callable[..., Path]) -> None:
    """Rows of several conversations that do not see each other, sliding windows too; against each conversation alone."""
    folder = folders(model_type, family=family, **SETTINGS.get(model_type, {}))
    chats = [conversation(number) for number in range(30)]
    data = prepared(tmp_path, folder, [{"messages": chat} for chat in chats], messages_field="messages")
    assert data.index.documents_apart
    assert len(data) < len(chats) / 2, "rows hold several conversations each"
    check_equal(folder, data, np.arange(len(data)), [rendered(folder, chat) for chat in chats])


@pytest.mark.parametrize("packing", [True, False])
def test_masked_prompts(packing: bool, tmp_path: Path, folders: Callable[..., Path]) -> None:
    from transformers import AutoTokenizer

    folder = folders("llama")
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    pairs = [(words(number, 1 + number % 6) + "\n", words(number + 3, 1 + number % 4)) for number in range(60)]
    rows = [{"p": prompt, "c": completion} for prompt, completion in pairs]
    data = prepared(tmp_path, folder, rows, prompt_field="p", completion_field="c", packing=packing)
    samples = []
    for prompt, completion in pairs:
        before, after = (tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, completion))
        assert tokenizer(prompt + completion, add_special_tokens=False).input_ids == before + after
        samples.append(([*before, *after, tokenizer.eos_token_id], [0] * len(before) + [1] * (len(after) + 1)))
    check_equal(folder, data, np.arange(len(data)), samples)


def test_texts_that_do_not_see_each_other(tmp_path: Path, folders: Callable[..., Path]) -> None:
    """Cut where a row ends: what is left of a document begins anew there."""
    from transformers import AutoTokenizer

    folder = folders("qwen2")
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    texts = [words(number, 3 + number * 5 % 17) for number in range(60)]
    data = prepared(tmp_path, folder, [{"text": text} for text in texts], document_attention="within")
    assert data.index.documents_apart
    pieces, room = [], LENGTH
    for text in texts:
        ids = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        while ids:
            pieces.append(ids[:room])
            ids, room = ids[room:], room - min(room, len(ids)) or LENGTH
    used, kept = 0, []
    for piece in pieces:
        used += len(piece)
        if used <= LENGTH * len(data):
            kept.append((piece, [1] * len(piece)))
    check_equal(folder, data, np.arange(len(data)), [sample for sample in kept if len(sample[0]) > 1])


def test_rows_without_a_trained_token_and_batches_that_wrap_around(tmp_path: Path, folders: Callable[..., Path]) -> None:
    """A global batch larger than the data, over the end of an epoch: rows come as often as they are named."""
    folder = folders("llama")
    random = np.random.default_rng(0)
    samples = [(random.integers(3, 200, size).tolist(), [1] * size) for size in (5, 40, 11, 24)]
    samples.append((random.integers(3, 200, 30).tolist(), [0] * 30))
    writer = ShardWriter(tmp_path / "d", 400, has_mask=True)
    writer.write(
        np.concatenate([ids for ids, _ in samples]), np.array([len(ids) for ids, _ in samples]),
        np.concatenate([mask for _, mask in samples]).astype(np.uint8),
    )  # fmt: skip
    writer.finish()
    with TokenDataset.open(tmp_path / "d") as data:
        ids = sample_ids(3, 1, 7, len(data))
        assert len(set(ids.tolist())) < len(ids)
        assert 4 in ids
        check_equal(folder, data, ids, [samples[number] for number in ids])


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_a_router_s_loss_is_that_of_each_row_alone(model_type: str, tmp_path: Path, folders: Callable[..., Path]) -> None:
    """Weighted by the row's trained tokens; padding has no part in it, and no split changes it."""
    folder = folders(model_type, output_router_logits=True, router_aux_loss_coef=0.5)
    chats = [conversation(number) for number in range(9)]
    data = prepared(tmp_path, folder, [{"messages": chat} for chat in chats], messages_field="messages", packing=False)
    model = load_any(folder)
    assert plain(model, [rendered(folder, chat) for chat in chats])[1] > 0.1
    check_router(folder, data, [rendered(folder, chat) for chat in chats])


def test_the_objective_s_own_arithmetic_is_exact(tmp_path: Path) -> None:
    """Gradients of made-up logits of tokens and routers, in float64: rows of different length, labels that do not count, any split."""
    random = torch.Generator().manual_seed(0)
    sizes, masks = (6, 9, 3), ([0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1, 1], [1, 1, 1])
    tokens = [torch.randint(0, 7, (size,), generator=random) for size in sizes]
    leaves = [
        (torch.randn(size, 7, generator=random).double(), [torch.randn(size, 4, generator=random).double() for _ in range(2)])
        for size in sizes
    ]
    writer = ShardWriter(tmp_path / "d", 400, has_mask=True)
    writer.write(torch.cat(tokens).numpy(), np.array(sizes), np.concatenate(masks).astype(np.uint8))
    writer.finish()
    weights = [sum(mask[1:]) for mask in masks]

    def both(loss_of: Callable[[list[Any]], torch.Tensor]) -> list[torch.Tensor]:
        fresh = [(logits.clone().requires_grad_(), [gate.clone().requires_grad_() for gate in gates]) for logits, gates in leaves]
        loss_of(fresh).backward()
        return [leaf.grad for logits, gates in fresh for leaf in (logits, *gates) if leaf.grad is not None]

    def reference(rows: list[Any]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        numbers = SimpleNamespace(num_experts=4, num_experts_per_tok=2)
        for ids, mask, weight, (logits, gates) in zip(tokens, masks, weights, rows, strict=True):
            log = logits[:-1].log_softmax(-1)
            total = total - (log[torch.arange(len(ids) - 1), ids[1:]] * torch.tensor(mask[1:])).sum()
            total = total + 0.5 * weight * switch_loss(numbers, gates)
        return total / sum(weights)

    def made(rows: list[Any], split: list[list[int]]) -> torch.Tensor:
        objective = NextToken(0, RouterLoss(0.5, 4, 2))
        total: Any = 0
        with TokenDataset.open(tmp_path / "d") as data:
            for part in split:

                def forward(part: list[int] = part, **inputs: torch.Tensor) -> Any:
                    length = inputs["input_ids"].shape[1]
                    padded = [
                        [torch.cat([leaf, torch.ones(length - len(leaf), leaf.shape[1])]) for leaf in (rows[i][0], *rows[i][1])]
                        for i in part
                    ]
                    logits, *gates = (torch.stack(leaves) for leaves in zip(*padded, strict=True))
                    return SimpleNamespace(logits=logits, router_logits=tuple(gate.flatten(0, 1) for gate in gates))

                total = total + objective.loss(forward, objective.batch(data, np.arange(3), tuple(part), 12)).total
        return total / sum(weights)

    expected = both(reference)
    for split in ([[0, 1, 2]], [[2], [0], [1]], [[1, 0], [2]]):
        found = both(lambda rows, split=split: made(rows, split))
        assert len(found) == len(expected) == 9
        assert max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)) <= 1e-12


def test_the_formula_is_that_of_every_architecture_that_is_said_to_have_it() -> None:
    from importlib import import_module

    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if is_computable(name)]
    assert {"mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe"} <= set(found)
    assert "llama" not in found
    random = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(2 * 9, 6, generator=random) for _ in range(3))
    mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
    ours = RouterLoss(1.0, 6, 2).of_rows(logits, (9, 5))
    for name in found:
        formula = import_module(f"transformers.models.{name}.modeling_{name}").load_balancing_loss_func
        for row in range(2):
            rows = tuple(layer[row * 9 : row * 9 + 9] for layer in logits)
            assert float(formula(rows, 6, 2, mask[row : row + 1])) == pytest.approx(float(ours[row]), rel=1e-5), name


def load_any(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).train()


def check_router(folder: Path, data: TokenDataset, samples: Sequence[Sample]) -> None:
    """The library norms and routes in float32 whatever the model is in, so that its own rounding shows behind the ninth digit."""
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-6)):
        model = load_any(folder, dtype)
        expected_loss, expected_added, expected = plain(model, samples)
        for split in splits(len(data)):
            loss, added, found = ours(model, data, np.arange(len(data)), split)
            assert loss == pytest.approx(expected_loss, rel=tolerance)
            assert added == pytest.approx(expected_added, rel=tolerance)
            one, other = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (found, expected))
            assert float((one - other).norm() / other.norm()) <= tolerance


def test_activations_that_are_recomputed_give_the_router_s_gradient_too(tmp_path: Path, folders: Callable[..., Path]) -> None:
    folder = folders("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    chats = [conversation(number) for number in range(5)]
    data = prepared(tmp_path, folder, [{"messages": chat} for chat in chats], messages_field="messages", packing=False)
    model = load_any(folder)
    kept = ours(model, data, np.arange(len(data)), [range(len(data))])
    model.activation_checkpointing_enable()
    again = ours(model, data, np.arange(len(data)), [range(len(data))])
    one, other = (torch.cat([tensor.flatten() for tensor in found[2]]) for found in (kept, again))
    assert float((one - other).norm() / other.norm()) <= 1e-10


def engine_gradients(folder: Path) -> torch.Tensor:
    """All of them end to end, from AdamW's first moment after one step: (1 - beta1) × gradient."""
    state: dict[str, Any] = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)["optimizer"]["state"]
    return torch.cat([state[index]["exp_avg"].flatten() / 0.1 for index in sorted(state)])


@pytest.mark.parametrize("model_type", ["qwen3", "mixtral"])
def test_the_engine_takes_the_same_step(
    model_type: str, tmp_path: Path, folders: Callable[..., Path], drive: Callable[..., Any], nano: Callable[..., RuntimeRequest]
) -> None:
    """Two ranks and micro-batches of one row; packed chats, and a router's loss that is shown apart."""
    settings = {"output_router_logits": True, "router_aux_loss_coef": 0.5} if model_type == "mixtral" else {}
    folder = folders(model_type, **settings)
    chats = [conversation(number) for number in range(40)]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    request = nano(
        f"step-{model_type.replace('_', '-')}", model={"source": str(folder)},
        data={"train": [str(path)], "validation": None, "sequence_length": LENGTH, "messages_field": "messages", "packing": not settings},
        training={
            "max_steps": 1, "segment_steps": 1, "global_batch_size": 4, "gradient_clip_norm": 1e3, "betas": [0.9, 0.95], "warmup_steps": 0,
        },
        parallel={"num_ranks": 2, "zero_stage": 0}, memory={"micro_batch_size": 1},
    )  # fmt: skip
    seen: list[TokenDataset] = []
    result = drive(request, prepared=lambda draft: seen.append(TokenDataset.open(draft.data.train_dir)))
    ids = sample_ids(request.training.seed, 0, 4, len(seen[0]))
    model = load_any(folder, torch.float32)
    loss, added, _ = ours(model, seen[0], ids, [[0], [1], [2], [3]])
    named = [parameter for parameter in model.parameters() if parameter.grad is not None]
    ordered = [*(each for each in named if each.dim() >= 2), *(each for each in named if each.dim() < 2)]
    expected = torch.cat([parameter.grad.flatten() for parameter in ordered if parameter.grad is not None])
    found = engine_gradients(Path(result.run_folder) / "checkpoints" / "step-000000001")
    assert float((found - expected).norm() / expected.norm()) <= 1e-6
    with np.load(Path(result.run_folder) / "metrics" / "step-000000001.npz") as columns:
        assert columns["loss"][0] == pytest.approx(loss, rel=1e-5)
        assert ("added_loss" in columns) == (model_type == "mixtral")
        if model_type == "mixtral":
            assert columns["added_loss"][0] == pytest.approx(added, rel=1e-5)
