"""Documents that share a row and do not see each other: none is divided, each begins anew, and earlier rules know nothing of it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mem_core.domain.request import DataSection
from mem_core.runtime.data.encoding.cache import wants_apart
from mem_core.runtime.data.encoding.forms import remember_apart, row_form
from mem_core.runtime.data.encoding.sequences import RowForm, UndividedRows, rows_for
from mem_core.runtime.data.encoding.tokenize_process import prepare_here
from mem_core.runtime.data.serving.collate import collate
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.data.serving.shards import BEGINS_DOCUMENT, COUNTS, ShardWriter
from mem_core.runtime.data.values import PreparedData, PrepareJob
from mem_core.runtime.deepspeed.objective import NextToken, labels_of
from mem_core.testing.tokenizer_folders import byte_level_bpe, tokenizer_folder


def placed(folder: Path, sizes: list[int], limit: int, **settings: Any) -> TokenDataset:
    """Documents of these sizes; the tokens of document n are all n, its first label does not count."""
    writer = ShardWriter(folder, 384, has_mask=True, documents_apart=True)
    rows = UndividedRows(writer, DataSection(sequence_length=limit, **settings))
    for number, size in enumerate(sizes):
        mask = np.ones(size, np.uint8)
        mask[0] = BEGINS_DOCUMENT
        rows.add(np.full(size, number), mask)
    rows.finish()
    writer.finish()
    return TokenDataset.open(folder)


def test_no_document_is_divided_and_rows_are_nearly_full(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    sizes = random.integers(2, 60, 300).tolist()
    with placed(tmp_path / "d", sizes, 100) as data:
        found: dict[int, int] = {}
        for tokens, mask in data.rows(range(len(data))):
            assert mask is not None
            starts = np.flatnonzero(mask & BEGINS_DOCUMENT)
            for start, stop in zip(starts, [*starts[1:], tokens.size], strict=True):
                (number,) = set(tokens[start:stop].tolist())
                assert number not in found
                found[number] = stop - start
        assert found == dict(enumerate(sizes))
        assert data.lengths.max() <= 100
        assert sum(sizes) / (100 * len(data)) > 0.95, "best fit leaves little room"
        assert data.trained_tokens.sum() == sum(sizes) - len(sizes), "the first token of a document is predicted by nothing"


def test_what_is_longer_than_a_row_is_cut_into_documents(tmp_path: Path) -> None:
    with placed(tmp_path / "chunk", [25], 10) as data:
        assert sorted(data.lengths.tolist()) == [5, 10, 10]
        assert data.trained_tokens.sum() == 22
    with placed(tmp_path / "cut", [25], 10, long_documents="truncate") as data:
        assert data.lengths.tolist() == [10]


def test_places_begin_anew_with_each_document_and_with_padding(tmp_path: Path) -> None:
    with placed(tmp_path / "d", [3, 4, 2], 8) as data:
        ids = np.arange(len(data))
        batch = collate(data, ids, tuple(ids), 8, pad_token_id=0)
        assert batch.attention_mask is None
        assert batch.position_ids is not None
        rows = [(batch.position_ids[row].tolist(), batch.real_lengths[row]) for row in range(len(data))]
        assert sorted(rows) == [([0, 1, 0, 1, 2, 3, 4, 5], 2), ([0, 1, 2, 0, 1, 2, 3, 0], 7)]
        counted = [labels_of(batch)[row, 1:].ne(-100).sum().item() for row in range(len(data))]
        assert counted == data.trained_tokens[ids].tolist()
        assert batch.to(torch.device("cpu")).real_lengths == batch.real_lengths


def test_a_probe_brings_documents_where_rows_do() -> None:
    from mem_core.core.memory.ladder import MicroBatch

    batch = NextToken(0, apart=True).probe(MicroBatch(2, 6), 5, torch.device("cpu"))
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2]] * 2
    assert batch.attention_mask is None


@pytest.mark.parametrize(
    ("settings", "rules", "apart"),
    [
        ({}, 3, False),
        ({"messages_field": "m"}, 3, True),
        ({"prompt_field": "p", "completion_field": "c"}, 3, True),
        ({"messages_field": "m"}, 2, False),
        ({"messages_field": "m", "packing": False}, 3, False),
        ({"messages_field": "m", "document_attention": "across"}, 3, False),
        ({"document_attention": "within"}, 3, True),
        ({"document_attention": "within"}, 1, False),
    ],
)
def test_who_wants_documents_apart(settings: dict[str, Any], rules: int, apart: bool) -> None:
    assert wants_apart(DataSection(**settings), rules) is apart


def prepare(tmp_path: Path, rows: list[dict[str, Any]], source: str, rules: int = 3, **settings: Any) -> PreparedData:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSection(train=(str(path),), validation=None, sequence_length=64, **settings)
    return prepare_here(
        PrepareJob(data=data, tokenizer_source=source, vocab_size=None, cache_dir=tmp_path / "cache", parent_pid=0, rules=rules),
        lambda progress: None,
    )


PAIRS = [{"p": f"question {number} ", "c": "answer " * (1 + number % 3)} for number in range(30)]


def test_packed_prompts_are_whole_and_say_so(tmp_path: Path) -> None:
    made = prepare(tmp_path, PAIRS, "preset:llama-nano", prompt_field="p", completion_field="c")
    assert any("documents that share a row do not see each other" in note for note in made.notes)
    with TokenDataset.open(made.train_dir) as data:
        assert data.index.documents_apart
        for tokens, mask in data.rows(range(len(data))):
            assert mask is not None
            assert mask[0] == BEGINS_DOCUMENT
            assert bool((tokens == 1).sum() == (mask & BEGINS_DOCUMENT != 0).sum()), "each document ends in its own row"
    across = prepare(tmp_path, PAIRS, "preset:llama-nano", prompt_field="p", completion_field="c", document_attention="across")
    with TokenDataset.open(across.train_dir) as data:
        assert not data.index.documents_apart


def test_all_tokens_of_prompts_may_be_trained(tmp_path: Path) -> None:
    settings = {"prompt_field": "p", "completion_field": "c", "packing": False}
    made = prepare(tmp_path, PAIRS, "preset:llama-nano", completion_only=False, assistant_only=False, **settings)
    with TokenDataset.open(made.train_dir) as data:
        assert not data.index.has_mask
        assert data.trained_tokens.sum() == made.num_tokens - len(PAIRS)
    assert any("the loss covers prompts and completions" in note for note in made.notes)


def test_texts_that_do_not_see_each_other_begin_anew(tmp_path: Path) -> None:
    """Also where a row cuts one: what is left of it goes on in the next row."""
    made = prepare(tmp_path, [{"text": "x" * 40}, {"text": "y" * 70}, {"text": "z" * 90}], "preset:llama-nano", document_attention="within")
    with TokenDataset.open(made.train_dir) as data:
        masks = [mask for _, mask in data.rows(range(len(data))) if mask is not None]
        assert [np.flatnonzero(mask & BEGINS_DOCUMENT).tolist() for mask in masks] == [[0, 41], [48], []]
        assert [int((mask[1:] & COUNTS).sum()) for mask in masks] == [62, 62, 63]


def test_earlier_rules_keep_their_rows_to_the_byte(tmp_path: Path) -> None:
    """Fingerprints that the version before recorded, and for text the same tokens under either rules."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "hello world, this is a row"}\n')
    job = PrepareJob(
        data=DataSection(train=(str(path),)),
        tokenizer_source="preset:llama-nano",
        vocab_size=None,
        cache_dir=tmp_path / "c",
        parent_pid=0,
        rules=2,
    )
    assert prepare_here(job, lambda progress: None).fingerprint == SECOND_RULES_FINGERPRINT
    texts = [{"text": f"some text {number} " * 5} for number in range(20)]
    old, new = (prepare(tmp_path, texts, "preset:llama-nano", rules) for rules in (2, 3))
    assert old.fingerprint != new.fingerprint
    with TokenDataset.open(old.train_dir) as one, TokenDataset.open(new.train_dir) as other:
        assert one.index.digests == other.index.digests != {}


SECOND_RULES_FINGERPRINT = "9a02bc0c453a7182acb8e3e262ef1ce73f88123aef736e0a53b56c381122d798"


@pytest.mark.parametrize(("model_type", "apart"), [("llama", True), ("bloom", False), ("opt", False)])
def test_what_a_model_can_do_is_tried_once_and_remembered(model_type: str, apart: bool, tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "m", byte_level_bpe(), model_type)
    data = DataSection(prompt_field="p", completion_field="c")
    job = PrepareJob(data=data, tokenizer_source=str(folder), vocab_size=None, cache_dir=tmp_path / "cache", parent_pid=0)
    (tmp_path / "cache").mkdir()
    from mem_core.runtime.data.encoding.encoders import make_encoder

    followed, form, told = row_form(job, make_encoder(str(folder)))
    assert (followed.packing, form.apart, form.undivided, bool(told)) == (apart, apart, apart, not apart)
    remember_apart(job)
    (kept,) = (tmp_path / "cache").glob("apart-*.json")
    assert row_form(job, make_encoder(str(folder)))[1] == form
    kept.write_text(kept.read_text().replace("why_not", "why-not"))
    assert row_form(job, make_encoder(str(folder)))[1] == form, "a memory that does not prove itself is not believed"


def test_the_form_decides_who_makes_rows(tmp_path: Path) -> None:
    data = DataSection()
    writers = [ShardWriter(tmp_path / str(number), 384, has_mask=True) for number in range(3)]
    divided = rows_for(writers[0], data, RowForm(masked=True))
    whole = rows_for(writers[1], data, RowForm(masked=True, apart=True, undivided=True))
    alone = rows_for(writers[2], data.model_copy(update={"packing": False}), RowForm(masked=True, undivided=True))
    assert [isinstance(each, UndividedRows) for each in (divided, whole, alone)] == [False, True, False]
    for writer in writers:
        writer.close()
