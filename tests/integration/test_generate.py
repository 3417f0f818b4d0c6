"""Answers to prompts: each row once, in order, the same whatever stands beside it or dies meanwhile. In this process where nothing dies."""

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mem_core.core.inference.composition import ModelShape
from mem_core.core.inference.recorded import Composed
from mem_core.domain.errors import DataError, MemoryExhausted, RequestError
from mem_core.domain.results.generation import FinishReason, GenerateOrder, GenerationResult, Sampling
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.telemetry.progress import NoProgress
from mem_core.runtime.data.encoding.joining import Tokens
from mem_core.runtime.inference.generate_process import Generation, Teller, generated
from mem_core.runtime.inference.output import finish
from mem_core.runtime.inference.prompt_rows import PromptRows
from mem_core.runtime.inference.supervise import generate, identity_of
from mem_core.runtime.inference.work_folder import WorkFolder
from mem_core.runtime.models.build import load_tokenizer
from mem_core.runtime.ranks.worker.device import CpuDevice
from mem_core.testing.model_folders import model_folder

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft asks transformers for it
]
Order = Callable[..., GenerateOrder]
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "llama", "llama")


def write_prompts(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def order(model: Path, tmp_path: Path) -> Order:
    """Thirty prompts of natural lengths, six tokens each."""
    draws = random.Random(0)
    rows = [{"id": number, "prompt": "the quick fox " * draws.randint(1, 9), "tag": {"é": [1.5, None]}} for number in range(30)]
    prompts = write_prompts(tmp_path / "prompts.jsonl", rows)

    def make(name: str = "out.jsonl", **changes: Any) -> GenerateOrder:
        sampling = Sampling(max_new_tokens=NEW_TOKENS, **changes.pop("sampling", {}))
        given = {"model": str(model), "prompts": str(prompts), "output": str(tmp_path / name), "batch_rows": 8, "device": "cpu", **changes}
        return GenerateOrder(sampling=sampling, **given)

    return make


def answered(order: GenerateOrder) -> list[dict[str, Any]]:
    """What the process does, here."""
    work = WorkFolder(Path(order.output))
    with work.held():
        work.begin(identity_of(order))
        told = generated(order, lambda message: None)
        finish(work, Path(order.output))
    lines = read(order)
    assert GenerationResult.model_validate(told).rows == len(lines)
    assert not work.path.exists()
    return lines


def read(order: GenerateOrder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(order.output).read_text().splitlines()]


def completions(lines: Sequence[dict[str, Any]]) -> list[str]:
    return [line["completion"] for line in lines]


def test_each_row_keeps_its_fields_and_its_place_and_gets_what_the_model_says(order: Order, model: Path) -> None:
    """Against `generate` of transformers on each prompt alone."""
    from transformers import AutoModelForCausalLM

    lines = answered(order())
    module, tokenizer = AutoModelForCausalLM.from_pretrained(str(model)).eval(), load_tokenizer(str(model))
    assert [line["id"] for line in lines] == list(range(30))
    for line in lines[:8]:
        ids = torch.tensor([tokenizer(line["prompt"]).input_ids])
        alone = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        assert line["completion"] == tokenizer.decode(alone[0, ids.shape[1] :], skip_special_tokens=True)
        assert (line["prompt_tokens"], line["completion_tokens"], line["finish_reason"]) == (ids.shape[1], NEW_TOKENS, "length")
        assert line["tag"] == {"é": [1.5, None]}


def test_a_draw_does_not_depend_on_what_is_answered_beside_it(order: Order) -> None:
    drawn = {"temperature": 1.2, "top_p": 0.95, "seed": 5}
    whole = answered(order("a", sampling=drawn))
    assert completions(answered(order("b", sampling=drawn, batch_rows=3))) == completions(whole)
    assert completions(answered(order("c", sampling={**drawn, "seed": 6}))) != completions(whole)
    assert completions(answered(order("d"))) != completions(whole)


def test_draws_follow_the_shares_of_the_model(order: Order, tmp_path: Path, model: Path) -> None:
    """The first token of one prompt, 400 rows of it: as often as its share says, and never outside of top_p."""
    from transformers import AutoModelForCausalLM

    module, tokenizer = AutoModelForCausalLM.from_pretrained(str(model)).eval(), load_tokenizer(str(model))
    ids = torch.tensor([tokenizer("the fox").input_ids])
    with torch.no_grad():
        shares = (module(ids).logits[0, -1].double() / 0.25).softmax(-1)
    likeliest = shares.sort(descending=True)
    inside = int((likeliest.values.cumsum(0) < 0.3).sum()) + 1
    kept = {tokenizer.decode([int(token)], skip_special_tokens=True) for token in likeliest.indices[:inside]}
    prompts = write_prompts(tmp_path / "same.jsonl", [{"prompt": "the fox"}] * 400)
    one = order(prompts=str(prompts), batch_rows=400, sampling={"temperature": 0.25, "top_p": 0.3})
    found = completions(answered(one.model_copy(update={"sampling": one.sampling.model_copy(update={"max_new_tokens": 1})})))
    assert set(found) <= kept
    first = tokenizer.decode([int(likeliest.indices[0])], skip_special_tokens=True)
    expected = float(likeliest.values[0] / likeliest.values[:inside].sum())
    assert abs(found.count(first) / 400 - expected) < 0.1


def test_stop_tokens_of_the_generation_settings_end_an_answer(order: Order, model: Path, tmp_path: Path) -> None:
    """Whichever of them comes first; rows beside it go on, and what pads it meanwhile is no part of it."""
    lines, tokenizer = answered(order("before")), load_tokenizer(str(model))
    ids = tokenizer(lines[0]["completion"], add_special_tokens=False).input_ids
    told = shutil.copytree(model, tmp_path / "stops")
    (told / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, ids[2]], "do_sample": True, "temperature": 9.0}))
    stopped = answered(order("after", model=str(told)))
    reasons = {line["finish_reason"] for line in stopped}
    assert reasons == {"stop", "length"} or reasons == {"stop"}
    for before, after in zip(lines, stopped, strict=True):
        assert before["completion"].startswith(after["completion"])
        if after["finish_reason"] == "stop":
            assert after["completion_tokens"] < NEW_TOKENS or before["completion"] != after["completion"]


def test_chats_go_through_the_template_up_to_the_answer(order: Order, model: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hello fox"}]
    text = load_tokenizer(str(model)).apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    chats = write_prompts(tmp_path / "chats.jsonl", [{"messages": chat}])
    texts = write_prompts(tmp_path / "texts.jsonl", [{"prompt": text}])
    first, second = (answered(order(path.stem, prompts=str(path))) for path in (chats, texts))
    assert completions(first) == completions(second)
    assert first[0]["prompt_tokens"] == second[0]["prompt_tokens"]
    assert first[0]["messages"] == chat


def test_adapters_answer_as_the_model_that_they_are_merged_into(order: Order, model: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(str(model))
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.save_pretrained(str(tmp_path / "adapter"))
    merged = adapted.merge_and_unload()
    merged.save_pretrained(str(tmp_path / "merged"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "merged" / name).write_bytes((model / name).read_bytes())
    with_adapters = answered(order("adapter.out", model=str(tmp_path / "adapter")))
    assert completions(with_adapters) == completions(answered(order("merged.out", model=str(tmp_path / "merged"))))
    assert completions(with_adapters) != completions(answered(order("base.out")))


def test_an_adapter_of_pickles_is_refused(order: Order, model: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(model)}))
    (tmp_path / "adapter" / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(RequestError, match=r"no adapter_model\.safetensors"):
        answered(order(model=str(tmp_path / "adapter")))


def test_rows_that_no_answer_can_be_made_for_are_refused_before_the_first(order: Order, tmp_path: Path) -> None:
    long = write_prompts(tmp_path / "long.jsonl", [{"prompt": "a"}, {"prompt": "fox " * 600}, {"prompt": ""}])
    with pytest.raises(DataError, match=r"row 2 has [\d,]+ tokens, which with 6 new ones are more than 512; row 3 has no tokens"):
        answered(order(prompts=str(long)))
    mended = write_prompts(tmp_path / "long.jsonl", [{"prompt": "a"}, {"prompt": "fox"}])
    assert len(answered(order(prompts=str(mended)))) == 2, "what had no batch yet holds nobody to it"


def test_a_finished_output_is_answered_at_once_and_no_other_takes_its_place(order: Order, tmp_path: Path) -> None:
    """No process is started: one would need more than the settings that are given here."""
    done = order()
    answered(done)
    nothing = Settings(mem_home=tmp_path / "nowhere", environ={})
    before = Path(done.output).read_bytes()
    assert generate(done, nothing, NoProgress()).already_complete
    for change in ({"sampling": {"seed": 1}}, {"prefix": "x"}):
        with pytest.raises(RequestError, match=r"others: (seed: 0 before, 1 now|prefix:  before, x now).*another --output"):
            generate(order(**change), nothing, NoProgress())
    more = write_prompts(tmp_path / "more.jsonl", [{"prompt": "a"}])
    with pytest.raises(RequestError, match="prompts: "):
        generate(order(prompts=str(more)), nothing, NoProgress())
    assert Path(done.output).read_bytes() == before
    Path(done.output).write_bytes(before + b"{}\n")
    with pytest.raises(RequestError, match="changed since"):
        generate(done, nothing, NoProgress())
    with pytest.raises(RequestError, match="nothing says that it holds these answers"):
        generate(order("prompts.jsonl"), nothing, NoProgress())


class Narrow:
    """Answers of rows that fit, three of them at most; says `row` and its place in the batch."""

    shape = ModelShape(2, 16, 32, 384, 4)

    def __init__(self, most_rows: int) -> None:
        self._most_rows = most_rows
        self.asked: list[tuple[int, ...]] = []

    def answers(self, rows: Sequence[int], prompts: Sequence[Tokens]) -> list[tuple[list[int], FinishReason, int]]:
        self.asked.append(tuple(rows))
        if len(rows) > self._most_rows:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory")
        return [([row], "length", 1) for row in rows]

    def text(self, tokens: Sequence[int]) -> str:
        return f"answer {tokens[0]}"


def narrow(order: GenerateOrder, most_rows: int) -> tuple[Narrow, WorkFolder]:
    import numpy as np

    work, device, answering = WorkFolder(Path(order.output)), CpuDevice(), Narrow(most_rows)
    prompts = [np.ones(len(prompt.text), np.uint32) for prompt in PromptRows(Path(order.prompts)).prompts()]
    with work.held():
        Generation(order, work, answering, prompts, device, Teller(lambda message: None, device.probe())).run()
    return answering, work


def test_what_does_not_fit_is_composed_anew_until_it_does(order: Order) -> None:
    answering, work = narrow(order(), most_rows=3)
    record = work.read()
    assert [len(rows) for rows in answering.asked[:3]] == [8, 4, 2]
    assert [len(batch.rows) for batch in record.failed][:2] == [8, 4]
    assert sorted(row for number in record.answered for row in record.composed[number].rows) == list(range(30))
    assert [answer.completion for answer in work.answers(range(30))] == [f"answer {row}" for row in range(30)]


def test_a_row_that_does_not_fit_alone_is_named_and_what_was_answered_stays(order: Order) -> None:
    with pytest.raises(MemoryExhausted, match=r"row \d+ does not fit into memory by itself.*new ones.*Give more memory"):
        narrow(order(), most_rows=0)


def test_a_recorded_batch_is_answered_as_it_was_under_other_bounds(order: Order) -> None:
    """As when the process was killed in its middle, and somebody asks for smaller batches afterwards."""
    first = order()
    work = WorkFolder(Path(first.output))
    work.path.mkdir()
    work.record(Composed(batch=0, rows=(7, 3, 5), longest=60))
    answering, _ = narrow(first.model_copy(update={"batch_rows": 2}), most_rows=9)
    assert answering.asked[0] == (7, 3, 5)
    assert {len(rows) for rows in answering.asked[1:]} == {1, 2}


def test_a_small_budget_makes_small_batches(order: Order) -> None:
    """Measured against the memory of this process, which is many times what these prompts need."""
    used, wide = CpuDevice().probe().usage().used_bytes, order("wide")
    narrow_one = order(budget_bytes=round(used / 0.9 + 200_000))
    assert completions(answered(narrow_one)) == completions(answered(wide))
    assert num_batches(narrow_one) > num_batches(wide) == 4


def num_batches(order: GenerateOrder) -> int:
    """As the file beside the answers says."""
    return int(json.loads(Path(f"{order.output}.mem.json").read_text())["result"]["batches"])
