"""Ids of long texts are those of the whole text, whatever the tokenizer, wherever it is cut."""

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mem_core.domain.errors import DataError
from mem_core.domain.request import DataSection
from mem_core.runtime.data.encoding.huggingface import HuggingFaceEncoder
from mem_core.runtime.data.encoding.joining import CannotBeCut, Cutting, JoinedText, Spans, Tokens
from mem_core.runtime.data.encoding.sequences import RowForm, RowMaker
from mem_core.runtime.data.encoding.tokenize_process import prepare_here
from mem_core.runtime.data.encoding.tokenizing import Target, Tokenizing
from mem_core.runtime.data.reading.sources import resolve_files
from mem_core.runtime.data.reading.units import Readable
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.data.serving.shards import ShardWriter
from mem_core.runtime.data.values import PrepareJob
from mem_core.testing.tokenizer_folders import TOKENIZERS, llama_2_form, tokenizer_folder, word_piece

SMALL = Cutting(window_chars=512, overlap_chars=128)
LONG_TEXTS = {
    "CJK": "漢字仮名" * 6_000,
    "three characters, whose period no window has": "漢字仮" * 5_001,
    "one letter": "a" * 20_000,
    "words": "ab " * 8_000,
    "one word of many letters": "wo" * 12_000 + " end",
    "spaces": " " * 20_000 + "x",
    "characters of several bytes": "😀é" * 6_000,
    "source": Path(__file__).read_text() * 4,
}
UNITS = ("a", "b", " ", "  ", "\n", "größer", "漢字", "漢字仮名", "😀", "x 10 ", "\t", "ab", "The quick", "-", "</s>", "<end>", "é")


def fast(tokenizer: Any, **settings: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return fast(TOKENIZERS[request.param]())


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("kind", LONG_TEXTS)
def test_windows_leave_no_trace(tokenizer: Any, kind: str) -> None:
    (tokens,) = HuggingFaceEncoder(tokenizer, cutting=SMALL).encode([LONG_TEXTS[kind]])
    assert tokens.tolist() == ids(tokenizer, LONG_TEXTS[kind])


def random_text(rng: random.Random) -> str:
    runs = ("".join(rng.choices(UNITS, k=rng.randint(1, 3))) * rng.choice((1, 1, 2, 5, 50, 200)) for _ in range(rng.randint(5, 40)))
    return "".join(runs)


@pytest.mark.parametrize("seed", range(8))
def test_random_runs_in_random_parts(tokenizer: Any, seed: int) -> None:
    """Parts come in any size; each gets the tokens whose characters begin in it, and together they are the whole text's."""
    rng = random.Random(seed)
    text = random_text(rng)
    parted = HuggingFaceEncoder(tokenizer, cutting=Cutting(256, 128)).parted()
    found: list[Tokens] = []
    bounds = [0, *sorted(rng.sample(range(1, len(text)), k=min(6, len(text) - 1))), len(text)]
    for start, stop in itertools.pairwise(bounds):
        found += parted.add(text[start:stop], stop == len(text))
    assert len(found) == len(bounds) - 1
    assert np.concatenate(found).tolist() == ids(tokenizer, text)


def test_a_part_has_the_tokens_that_begin_in_it() -> None:
    made = fast(TOKENIZERS["byte-level BPE"]())
    text = "The quick brown fox. " * 200
    parted = HuggingFaceEncoder(made, cutting=Cutting(256, 128)).parted()
    found = [*parted.add(text[:2_100], False), *parted.add(text[2_100:], True)]
    assert [made.decode(part) for part in found] == [text[:2_100], text[2_100:]]


@pytest.mark.parametrize(
    "words", [("Question: 2+2?\nAnswer: ", "4 apples"), ("", "all of it"), ("漢字", "仮名"), ("x 1", "0 y"), ("a b ", " c")]
)
def test_a_prompt_and_its_completion_are_one_text(tokenizer: Any, words: tuple[str, str]) -> None:
    """No mark and no space of its own in the middle; the completion begins with the first token that holds some of it."""
    prompt, completion = words
    ((tokens, start),) = HuggingFaceEncoder(tokenizer).encode_pairs([words])
    encoded = tokenizer(prompt + completion, add_special_tokens=False, return_offsets_mapping=True)
    assert tokens.tolist() == encoded.input_ids
    ends = [end for _, end in encoded.offset_mapping]
    assert all(end <= len(prompt) for end in ends[:start])
    assert all(end > len(prompt) for end in ends[start:])


def test_long_prompts_are_one_text_too(tokenizer: Any) -> None:
    prompt, completion = "x 10 y 20, größer 漢字. " * 100, "the answer " * 50
    ((tokens, start),) = HuggingFaceEncoder(tokenizer, cutting=SMALL).encode_pairs([(prompt, completion)])
    assert tokens.tolist() == ids(tokenizer, prompt + completion)
    assert 0 < start < tokens.size


def test_a_tokenizer_without_offsets_is_cut_where_seams_hold() -> None:
    """ByT5 of a folder tells no offsets and can be cut anywhere but at its special words."""
    from transformers import ByT5Tokenizer

    made = ByT5Tokenizer()
    text = "words and 漢字 and </s> more of it " * 40
    parted = HuggingFaceEncoder(made, cutting=SMALL).parted()
    found = [*parted.add(text[:400], False), *parted.add(text[400:900], False), *parted.add(text[900:], True)]
    assert np.concatenate(found).tolist() == ids(made, text)
    assert [part.size > 0 for part in found] == [True] * 3
    ((tokens, start),) = HuggingFaceEncoder(made).encode_pairs([("2+2=", "4")])
    assert (tokens.tolist(), start) == ([53, 46, 53, 64, 55], 4)


def test_a_cut_that_changes_tokens_is_not_made() -> None:
    """A tokenizer without offsets that marks the beginning of each text: parts are joined before they are encoded."""
    made = fast(llama_2_form())
    made_slow = Slow(made)
    parted = HuggingFaceEncoder(made_slow, cutting=SMALL).parted()
    found = [*parted.add("The quick ", False), *parted.add("brown fox", True)]
    assert np.concatenate(found).tolist() == ids(made, "The quick brown fox")
    assert [part.size > 0 for part in found] == [True, False]


class Slow:
    """A fast tokenizer that keeps its offsets to itself."""

    is_fast = False

    def __init__(self, fast: Any) -> None:
        self._fast = fast

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        assert "return_offsets_mapping" not in options
        return self._fast(*arguments, **options)

    def __len__(self) -> int:
        return len(self._fast)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fast, name)


def end_anchored(period: int) -> Callable[[Sequence[str]], list[Spans]]:
    """A tokenizer whose tokens of `period` characters are counted from the END of the text: windows may agree by chance only."""

    def encode(texts: Sequence[str]) -> list[Spans]:
        found = []
        for text in texts:
            bounds = [0, *range(len(text) % period or period, len(text) + 1, period)]
            sizes = np.diff(bounds)
            found.append(Spans(sizes.astype(np.uint32), np.array(bounds[:-1]), np.array(bounds[1:])))
        return found

    return encode


@pytest.mark.parametrize("period", [2, 3, 4, 7, 8])
def test_windows_that_agree_by_chance_are_found_out(period: int) -> None:
    """512 and 128 are multiples of some of these periods, so that both windows show the same wrong phase."""
    encode = end_anchored(period)
    text = "a" * 5_003
    assert JoinedText(encode, SMALL).add(text, last=True).ids.tolist() == encode([text])[0].ids.tolist()


def test_what_cannot_be_cut_is_refused_and_never_given_other_ids() -> None:
    """WordPiece makes one unknown token of a word of any length: no window shows where it ends."""
    made = fast(word_piece())
    cutting = Cutting(512, 128, most_whole_chars=4_096)
    inside = "x" * 3_000 + " end"
    (tokens,) = HuggingFaceEncoder(made, cutting=cutting).encode([inside])
    assert tokens.tolist() == ids(made, inside)
    with pytest.raises(CannotBeCut, match="over 4096 characters"):
        HuggingFaceEncoder(made, cutting=cutting).encode(["x" * 5_000])
    with pytest.raises(CannotBeCut, match="5000 characters"):
        HuggingFaceEncoder(Slow(made), cutting=cutting).encode(["x" * 5_000])


@pytest.mark.parametrize("source", ["text", "jsonl"])
@pytest.mark.parametrize("name", ["Llama-2 form", "WordPiece"])
def test_prepared_rows_are_the_ids_of_the_whole_document(tmp_path: Path, name: str, source: str) -> None:
    """A document of several parts, through files, parts and shards, with chunks and with its beginning alone."""
    folder = tokenizer_folder(tmp_path / "model", TOKENIZERS[name](), bos_token=None)
    text = ("漢字仮名" * 6_000 + " The quick brown fox, x 10. ") * 12
    path = tmp_path / ("a.txt" if source == "text" else "a.jsonl")
    path.write_text(text if source == "text" else f'{{"text": "{text}"}}\n')
    encoder = HuggingFaceEncoder.of_folder(str(folder), 2)
    whole = [*ids(encoder._tokenizer, text), encoder.eos_token_id]
    for mode in ("chunk", "truncate"):
        data = DataSection(train=(str(path),), validation=None, sequence_length=100, packing=mode == "chunk", long_documents=mode)
        job = PrepareJob(data=data, tokenizer_source=str(folder), vocab_size=None, cache_dir=tmp_path / "cache", parent_pid=0)
        with TokenDataset.open(prepare_here(job, lambda progress: None).train_dir) as dataset:
            rows = np.concatenate([tokens for tokens, _ in dataset.rows(range(len(dataset)))])
        assert rows.size == (len(whole) // 100 * 100 if mode == "chunk" else 100)
        assert np.array_equal(rows, whole[: rows.size])


def test_a_document_that_cannot_be_cut_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"text": "' + "x" * 5_000 + '"}\n')
    data = DataSection(train=(str(path),), validation=None)
    encoder = HuggingFaceEncoder(fast(word_piece(), eos_token="<end>"), cutting=Cutting(512, 128, most_whole_chars=4_096))
    work = Tokenizing(encoder, data, RowForm(), vocab_size=None)
    writer = ShardWriter(tmp_path / "rows", encoder.vocab_size, has_mask=False)
    rows = RowMaker(writer, data, has_mask=False)
    (source,) = resolve_files([str(path)], DataSection(), "data.train")
    list(work.read(Readable(source, str(path), "0" * 64), Target(rows)))
    with pytest.raises(DataError, match=r"a.jsonl:2: over 4096 characters without a place where this tokenizer lets them be cut"):
        work.flush()
    writer.close()
