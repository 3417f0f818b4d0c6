"""Rows with an answer keep it, whatever of their prompt has to go; special tokens stand once; what happened is counted and said."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mem_core.domain.errors import DataError
from mem_core.domain.request import DataSection
from mem_core.runtime.data.encoding.acceptance import check_prepared
from mem_core.runtime.data.encoding.lengths import cut_prompt, last_answer_start
from mem_core.runtime.data.encoding.tokenize_process import prepare_here
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.data.values import PreparedData, PrepareJob
from mem_core.testing.tokenizer_folders import llama_2_form, tokenizer_folder

PAIRS = {"prompt_field": "prompt", "completion_field": "completion", "sequence_length": 64}
CHATS = {"messages_field": "messages", "sequence_length": 64}
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '</s>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + ' ' }}{% endif %}{% endfor %}"
)
UNMARKED = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
Prepare = Callable[..., PreparedData]
Row = tuple[list[int], list[int]]


@pytest.fixture
def prepare(tmp_path: Path) -> Prepare:
    def call(rows: list[dict[str, Any]], source: Path | str = "preset:llama-nano", rules: int = 2, **settings: Any) -> PreparedData:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = DataSection.model_validate({"train": [str(path)], "validation": None, **settings})
        cache = tmp_path / "cache"
        job = PrepareJob(data=data, tokenizer_source=str(source), vocab_size=None, cache_dir=cache, parent_pid=0, rules=rules)
        prepared = prepare_here(job, lambda progress: None)
        check_prepared(prepared, data, None)
        return prepared

    return call


def rows_of(prepared: PreparedData) -> list[Row]:
    with TokenDataset.open(prepared.train_dir) as dataset:
        found = dataset.rows(range(len(dataset)))
        return [(tokens.tolist(), mask.tolist() if mask is not None else [1] * tokens.size) for tokens, mask in found]


def text(tokens: list[int]) -> str:
    return bytes(token - 3 for token in tokens if token > 2).decode()


def pair(prompt_chars: int, completion: str) -> dict[str, str]:
    return {"prompt": ("0123456789" * 60)[:prompt_chars], "completion": completion}


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("long_documents", ["chunk", "truncate"])
def test_prompts_that_fill_the_sequence_give_way_from_the_left(prepare: Prepare, long_documents: str, packing: bool) -> None:
    """Fifty rows with prompts of 500 characters: each is one full row, its answer trained whole after the end of its prompt."""
    prepared = prepare([pair(500, f"answer {n:02}") for n in range(50)], **PAIRS, long_documents=long_documents, packing=packing)
    rows = rows_of(prepared)
    assert len(rows) == prepared.num_documents == 50
    for number, (tokens, mask) in enumerate(rows):
        assert text(tokens) == ("0123456789" * 50)[-54:] + f"answer {number:02}"
        assert mask == [0] * 54 + [1] * 10
    assert prepared.dropped_rows == {}
    assert prepared.notes == (
        "50 rows were longer than data.sequence_length; the beginning of the prompt gave way, the answer stayed",
    )  # fmt: skip


def test_refuse_still_refuses_long_rows(prepare: Prepare) -> None:
    with pytest.raises(DataError, match=r"1 bad row:(?s:.*):2: longer than data.sequence_length"):
        prepare([pair(10, "fits"), pair(500, "x")], **PAIRS, long_documents="refuse")


def test_rows_that_fit_are_packed_as_before(prepare: Prepare) -> None:
    """Only what is too long is a row of its own: the others are the same rows as under the first rules."""
    short = [pair(20, "short"), pair(30, "another"), pair(10, "x"), pair(39, "more of it")]
    mixed = rows_of(prepare([short[0], pair(500, "long"), *short[1:]], **PAIRS))
    assert rows_of(prepare(short, **PAIRS)) == rows_of(prepare(short, **PAIRS, rules=1)) == mixed[1:]


def test_an_answer_longer_than_a_sequence_goes_on_in_further_rows(prepare: Prepare) -> None:
    """Half a sequence is left to the prompt; nothing of the answer is lost in chunks, and its beginning stays when cut."""
    answer = "abcdefghij" * 20
    chunks = rows_of(prepare([pair(500, answer)], **PAIRS, packing=False))
    assert "".join(text(tokens) for tokens, _ in chunks) == ("0123456789" * 50)[-32:] + answer
    assert sum(sum(mask) for _, mask in chunks) == len(answer) + 1
    ((tokens, mask),) = rows_of(prepare([pair(500, answer)], **PAIRS, packing=False, long_documents="truncate"))
    assert (text(tokens), sum(mask)) == (("0123456789" * 50)[-32:] + answer[:32], 32)


@pytest.mark.parametrize(("answer", "kept"), [(20, 44), (40, 24), (63, 1), (64, 32), (200, 32)])
def test_as_much_of_the_prompt_stays_as_the_answer_leaves_room_for(answer: int, kept: int) -> None:
    tokens = np.arange(100 + answer, dtype=np.uint32)
    mask = np.array([0] * 100 + [1] * answer, np.uint8)
    cut, cut_mask = cut_prompt(tokens, mask, 100, 0, 64)
    assert cut.tolist() == [*range(100 - kept, 100 + answer)]
    assert cut_mask.tolist() == [0] * kept + [1] * answer
    begun, _ = cut_prompt(tokens, mask, 100, 1, 64)
    assert begun.tolist() == [0, *range(100 - kept + 1, 100 + answer)], "the beginning token stays"


def test_the_last_answer_is_the_last_stretch_that_counts() -> None:
    assert [last_answer_start(np.array(mask, np.uint8)) for mask in ([0, 1, 0, 1, 1, 0], [1, 1], [0, 0])] == [3, 0, 0]


def chat(*words: str) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[n % 2], "content": word} for n, word in enumerate(words)]}


def test_chats_keep_their_last_answer(tmp_path: Path, prepare: Prepare) -> None:
    folder = tokenizer_folder(tmp_path / "m", llama_2_form(), chat_template=MARKED)
    prepared = prepare([chat("first question", "gone", "z9" * 200, "kept answer"), chat("z", "whole")], folder, **CHATS, packing=False)
    (long, long_mask), (short, _) = rows_of(prepared)
    answer = sum(long_mask)
    assert (len(long), long_mask) == (64, [0] * (64 - answer) + [1] * answer)
    assert long[-1] == short[-1] == prepared.eos_token_id
    assert prepared.notes == (
        "1 row was longer than data.sequence_length; the beginning of the prompt gave way, the answer stayed",
        "1 conversation lost earlier answers with that beginning",
    )


def test_an_end_that_the_template_leaves_out_is_not_taken_for_the_answer(tmp_path: Path, prepare: Prepare) -> None:
    """What is added after the untrained end of a turn stands apart from the answer: a long answer keeps its beginning all the same."""
    template = MARKED.replace("{{ m['content'] + '</s>' }}{% endgeneration %}", "{{ m['content'] }}{% endgeneration %}{{ ' done.' }}")
    folder = tokenizer_folder(tmp_path / "m", llama_2_form(), chat_template=template)
    rows = [chat("z9" * 200, "0123456789" * 30)]
    ((tokens, mask),) = rows_of(prepare(rows, folder, **CHATS, packing=False, long_documents="truncate"))
    from mem_core.runtime.models.build import load_tokenizer

    assert mask == [0] * 32 + [1] * 32
    assert "".join(load_tokenizer(str(folder)).decode(tokens[32:]).split()).startswith("0123456789012345")


def test_chats_of_a_template_that_marks_nothing_keep_their_end(tmp_path: Path, prepare: Prepare) -> None:
    """Where the last answer begins is found by rendering the conversation up to it."""
    folder = tokenizer_folder(tmp_path / "m", llama_2_form(), chat_template=UNMARKED)
    for mode in ("chunk", "truncate"):
        row, whole = (
            rows_of(prepare([chat("z9" * 200, "kept answer")], folder, **CHATS | {"sequence_length": length, "long_documents": mode}))
            for length in (64, 4_096)
        )  # fmt: skip
        assert [tokens for tokens, _ in row] == [whole[0][0][-64:]]
    long_answer = [chat("a question", "0123456789" * 30)]
    ((tokens, _),) = rows_of(prepare(long_answer, folder, **CHATS, packing=False, long_documents="truncate"))
    ((whole_tokens, _),) = rows_of(prepare(long_answer, folder, **{**CHATS, "sequence_length": 4_096}, packing=False))
    assert tokens == whole_tokens[:64], "the answer is cut at its end, and its beginning stays"


def test_a_chat_in_which_nothing_would_be_trained_is_a_bad_row(tmp_path: Path, prepare: Prepare) -> None:
    folder = tokenizer_folder(tmp_path / "m", llama_2_form(), chat_template=MARKED)
    rows = [chat("a question", "an answer"), chat("a question alone"), chat("z" * 500)]
    with pytest.raises(DataError, match=r"2 bad rows:(?s:.*):2: none of its tokens would be trained: it holds no words of the assistant"):
        prepare(rows, folder, **CHATS)
    prepared = prepare(rows, folder, **CHATS, on_bad_row="skip", packing=False)
    assert (prepared.num_bad_rows, prepared.num_samples) == (2, 1)
    assert prepared.notes[0].startswith("2 bad rows were skipped, first ")


def test_special_tokens_of_the_text_are_not_doubled(tmp_path: Path, prepare: Prepare) -> None:
    made = llama_2_form()
    from tokenizers import processors

    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder = tokenizer_folder(tmp_path / "m", made, bos_token="<s>")
    plain, marked, inside = rows_of(prepare([{"text": t} for t in ("fox", "<s>fox</s>", "fox </s> fox")], folder, packing=False))
    assert [plain[0][0], plain[0][-1], plain[0].count(1), plain[0].count(2)] == [1, 2, 1, 1]
    assert [marked[0][0], marked[0][-1], marked[0].count(1), marked[0].count(2)] == [1, 2, 1, 1]
    assert inside[0].count(2) == 2
    prepared = prepare([{"text": t} for t in ("fox", "<s>fox</s>", "fox </s> fox")], folder, packing=False)
    assert prepared.notes == (
        "2 rows hold the tokenizer's own beginning or end token in the text; at the edges it was not added a second time",
    )  # fmt: skip
    ((tokens, mask),) = rows_of(prepare([{"prompt": "<s>fox", "completion": " jumps</s>"}], folder, **PAIRS, packing=False))
    assert (tokens.count(1), tokens.count(2), mask[-1]) == (1, 1, 1)


def test_a_template_that_renders_a_special_token_twice_is_told(tmp_path: Path, prepare: Prepare) -> None:
    folder = tokenizer_folder(tmp_path / "m", llama_2_form(), chat_template=MARKED)
    prepared = prepare([chat("a question", "an answer</s>")], folder, **CHATS, packing=False)
    assert prepared.notes == ("1 chat has the tokenizer's beginning or end token twice in a row, as the template writes it",)


def test_a_template_that_writes_the_day_gives_the_same_tokens_on_every_day(tmp_path: Path, prepare: Prepare) -> None:
    template = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %} " + UNMARKED
    folder = tokenizer_folder(tmp_path / "m", llama_2_form(), chat_template=template)
    prepared = prepare([chat("q", "a")], folder, **CHATS, packing=False)
    from mem_core.runtime.models.build import load_tokenizer

    ((tokens, _),) = rows_of(prepared)
    assert load_tokenizer(str(folder)).decode(tokens).startswith("26 Jul 2024")
    assert any("the chat template writes the day" in note for note in prepared.notes)
