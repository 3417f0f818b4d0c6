"""Preparation in this process: bad rows, empty and odd files, held-out rows, fingerprints (field reports 124 to 137)."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mem_core.domain.errors import DataError, RequestError
from mem_core.domain.request import DataSection
from mem_core.runtime.data.encoding.acceptance import check_prepared
from mem_core.runtime.data.encoding.tokenize_process import prepare_here
from mem_core.runtime.data.reading.sources import resolve_files
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.data.values import PreparedData, PrepareJob, PrepareProgress

Prepare = Callable[..., PreparedData]


@pytest.fixture
def prepare(tmp_path: Path) -> Prepare:
    """prepare(train, **settings): what `prepare_data` does, without the process around it."""

    def call(*train: object, vocab_size: int | None = 384, **settings: object) -> PreparedData:
        raw = {"train": [str(path) for path in train], "validation": None, "sequence_length": 16, **settings}
        data = DataSection.model_validate(raw)
        job = PrepareJob(data=data, tokenizer_source="preset:llama-nano", vocab_size=vocab_size, cache_dir=tmp_path / "cache", parent_pid=0)
        prepared = prepare_here(job, lambda progress: None)
        check_prepared(prepared, data, vocab_size)
        return prepared

    return call


def jsonl(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def texts_of(folder: str) -> list[str]:
    dataset = TokenDataset.open(folder)
    rows = [bytes((tokens[tokens > 2] - 3).astype(np.uint8)).decode() for tokens, _ in dataset.rows(range(len(dataset)))]
    dataset.close()
    return rows


def test_text_becomes_packed_sequences_with_an_end_token_between_documents(tmp_path: Path, prepare: Prepare) -> None:
    prepared = prepare(jsonl(tmp_path / "a.jsonl", "hello", "world", "this is it", "and more of the same"))
    dataset = TokenDataset.open(prepared.train_dir)
    flat = np.concatenate([tokens for tokens, _ in dataset.rows(range(len(dataset)))])
    whole = b"".join(text.encode() + b"\xfe" for text in ("hello", "world", "this is it", "and more of the same"))
    expected = [1 if byte == 0xFE else byte + 3 for byte in whole][: flat.size]
    assert flat.tolist() == expected
    assert set(dataset.lengths.tolist()) == {16}
    assert (prepared.num_samples, prepared.num_tokens, prepared.trained_tokens) == (2, 32, 30)
    assert (prepared.num_documents, prepared.pad_token_id, prepared.eos_token_id) == (4, 0, 1)
    dataset.close()


def test_bad_rows_stop_preparation_with_file_line_and_reason(tmp_path: Path, prepare: Prepare) -> None:
    """The first ten are shown, all are counted, nothing is left in the cache."""
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + b"[]\n" * 12 + b'\n{"text": "\x92"}\n')
    with pytest.raises(DataError) as caught:
        prepare(path)
    message = str(caught.value)
    assert message.startswith("data.train: 13 bad rows:")
    assert f"{path}:2: a list where an object is due" in message
    assert f"{path}:11: " in message
    assert f"{path}:12: " not in message
    assert "and 3 more" in message
    assert "on_bad_row to skip" in message
    assert [entry.name for entry in (tmp_path / "cache").iterdir() if entry.is_dir()] == []


def test_bad_rows_are_skipped_up_to_the_stated_number(tmp_path: Path, prepare: Prepare) -> None:
    path = jsonl(tmp_path / "a.jsonl", "first row", "second row")
    path.write_text('null\n{"text": ""}\n' + path.read_text())
    with pytest.raises(DataError, match="2 bad rows"):
        prepare(path, packing=False)
    prepared = prepare(path, on_bad_row="skip", max_bad_rows=2, packing=False)
    assert texts_of(prepared.train_dir) == ["first row", "second row"]
    assert prepared.num_bad_rows == 2
    assert prepared.bad_rows == (f"{path}:1: null where an object is due", f"{path}:2: field 'text' is empty")
    with pytest.raises(DataError, match="2 bad rows"):
        prepare(path, on_bad_row="skip", max_bad_rows=1, packing=False)
    with pytest.raises(DataError, match="2 bad rows"):
        prepare(path, packing=False)


def test_counts_per_kind_for_the_rows_of_report_126(tmp_path: Path, prepare: Prepare) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{}\n{"text": null}\n{"text": ""}\n{"text": "  "}\n{"Text": "x"}\n{"text": "good row"}\n')
    prepared = prepare(path, on_bad_row="skip", packing=False)
    assert texts_of(prepared.train_dir) == ["good row"]
    reasons = [
        "field 'text' is missing",
        "field 'text' is null",
        "field 'text' is empty",
        "field 'text' is blank",
        "field 'text' is missing",
    ]
    assert [reason in row for reason, row in zip(reasons, prepared.bad_rows, strict=True)] == [True] * 5


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_nothing_to_train_on_is_an_error(tmp_path: Path, prepare: Prepare, content: bytes) -> None:
    for name in ("a.jsonl", "a.txt"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=r"no row to train on in 1 files.*a.* is (empty|blank)"):
            prepare(tmp_path / name)


def test_one_empty_file_of_several_is_only_noted(tmp_path: Path, prepare: Prepare) -> None:
    good, empty = jsonl(tmp_path / "a.jsonl", "some text that is long enough"), tmp_path / "b.jsonl"
    empty.touch()
    assert prepare(good, empty).notes == (f"{empty} is empty",)


def test_paths_that_cannot_be_data(tmp_path: Path, prepare: Prepare) -> None:
    """Report 135: missing, empty folder, glob without match, compressed under a plain name and cut off, no parquet at all."""
    packed = tmp_path / "packed.jsonl"
    packed.write_bytes(gzip.compress(b'{"text": "a"}\n')[:-4])
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    (tmp_path / "folder").mkdir()
    for path, kind, words in (
        (tmp_path / "none.jsonl", DataError, "no such file"),
        (tmp_path / "folder", DataError, "this folder holds no file"),
        (tmp_path / "*.nothing", DataError, "the glob matches no file"),
        (packed, DataError, "the gzip file cannot be unpacked"),
        (tmp_path / "t.parquet", DataError, "the parquet file cannot be read"),
        ("nosuch://bucket/x.jsonl", DataError, "cannot be opened"),
        ("memory://none.jsonl", DataError, "no such object"),
    ):
        with pytest.raises(kind, match=words):
            prepare(path)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    """chmod 000; as root the permission is dropped for the call, since root reads everything."""
    path = jsonl(tmp_path / "a.jsonl", "a")
    path.chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65_534)
    try:
        with pytest.raises(DataError, match="cannot be read: Permission denied"):
            resolve_files([str(path)], DataSection(), "data.train")
    finally:
        if root:
            os.seteuid(0)


def test_text_that_is_not_utf8_is_named_with_line_and_offset(tmp_path: Path, prepare: Prepare) -> None:
    """Also across the block border of the reader, where the bad byte begins a cut sequence."""
    for at in (30, 2**20 - 1, 2**20):
        path = tmp_path / f"{at}.txt"
        path.write_bytes((b"line\n" * (at // 5 + 1))[:at] + b"\xe2\x28 and on")
        with pytest.raises(DataError, match=rf"{path}:{at // 5 + 1}: not UTF-8: byte 0xe2 at byte offset {at} of"):
            prepare(path)
    (tmp_path / "cut.txt").write_bytes(b"abc\xe2\x82")
    with pytest.raises(DataError, match=r"cut.txt:1: not UTF-8: byte 0xe2 at byte offset 3 of"):
        prepare(tmp_path / "cut.txt")


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_few_rows_still_give_training_rows(tmp_path: Path, prepare: Prepare, rows: int) -> None:
    """Report 134; a held-out fraction never takes the last training row away."""
    prepared = prepare(jsonl(tmp_path / "a.jsonl", *(f"row {n}" for n in range(rows))), validation=0.5, packing=False)
    assert prepared.num_samples >= 1
    assert prepared.num_samples + prepared.num_validation_samples == rows


def test_held_out_rows_are_disjoint_stable_and_about_the_fraction(tmp_path: Path, prepare: Prepare) -> None:
    texts = [f"document number {n}" for n in range(1_000)]
    prepared = prepare(jsonl(tmp_path / "a.jsonl", *texts), validation=0.1, packing=False, sequence_length=64)
    assert prepared.validation_dir is not None
    train, held_out = texts_of(prepared.train_dir), texts_of(prepared.validation_dir)
    assert sorted(train + held_out) == sorted(texts)
    assert 70 < len(held_out) < 130
    again = prepare(jsonl(tmp_path / "b.jsonl", *texts, "one more"), validation=0.1, packing=False, sequence_length=64)
    assert set(held_out) <= set(texts_of(str(again.validation_dir))), "more data moves no row to the other side"


def test_an_own_validation_list_is_used_whole(tmp_path: Path, prepare: Prepare) -> None:
    own = jsonl(tmp_path / "v.jsonl", "held out")
    prepared = prepare(jsonl(tmp_path / "a.jsonl", "to train"), validation=[str(own)], packing=False)
    assert (texts_of(prepared.train_dir), texts_of(str(prepared.validation_dir))) == (["to train"], ["held out"])


def test_the_loss_covers_the_completion_and_the_end_only(tmp_path: Path, prepare: Prepare) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "2+2=", "completion": "4"}) + "\n")
    prepared = prepare(path, prompt_field="prompt", completion_field="completion", packing=False)
    dataset = TokenDataset.open(prepared.train_dir)
    ((tokens, mask),) = dataset.rows([0])
    assert tokens.tolist() == [53, 46, 53, 64, 55, 1]
    assert mask is not None
    assert mask.tolist() == [0, 0, 0, 0, 1, 1]
    assert prepared.trained_tokens == 2
    dataset.close()


def test_refused_long_documents_are_bad_rows(tmp_path: Path, prepare: Prepare) -> None:
    path = jsonl(tmp_path / "a.jsonl", "short", "x" * 50, "y" * 100_000)
    with pytest.raises(DataError, match=r"2 bad rows:(?s:.*):2: longer than data.sequence_length: over 16 tokens(?s:.*):3: longer"):
        prepare(path, long_documents="refuse", on_bad_row="skip", max_bad_rows=1)
    prepared = prepare(path, long_documents="truncate", packing=False)
    assert texts_of(prepared.train_dir) == ["short", "x" * 16, "y" * 16]


def test_a_document_of_megabytes_is_the_same_text_in_rows(tmp_path: Path, prepare: Prepare) -> None:
    """Parts, pieces and blocks leave no seam: the rows, joined, are the document, also with characters of several bytes."""
    text = "".join(f"Zeile {n}: größer, 漢字 und so weiter.\n" for n in range(60_000))
    (tmp_path / "a.txt").write_text(text)
    prepared = prepare(tmp_path / "a.txt", sequence_length=1_000, validation=None)
    dataset = TokenDataset.open(prepared.train_dir)
    flat = np.concatenate([tokens for tokens, _ in dataset.rows(range(len(dataset)))])
    assert flat.tolist() == [byte + 3 for byte in text.encode()[: flat.size]]
    assert flat.size > len(text.encode()) - 1_000
    assert prepared.num_documents == 1
    dataset.close()


def test_one_very_long_document_gives_validation_rows_too(tmp_path: Path, prepare: Prepare) -> None:
    (tmp_path / "a.txt").write_text("word " * 4_000_000)
    prepared = prepare(tmp_path / "a.txt", sequence_length=1_024, validation=0.3)
    assert 0.05 < prepared.num_validation_samples / prepared.num_samples < 1


def test_tokens_beyond_the_models_embeddings_are_refused(tmp_path: Path, prepare: Prepare) -> None:
    with pytest.raises(RequestError, match="the tokenizer gives token 124, the model has 100 embeddings"):
        prepare(jsonl(tmp_path / "a.jsonl", "xyxyxyxy"), vocab_size=100)


def test_the_fingerprint_follows_content_and_settings_only(tmp_path: Path, prepare: Prepare) -> None:
    """Report 137: a row more, two rows swapped, another length: other data. Another name, place or time: the same."""
    one = prepare(jsonl(tmp_path / "a.jsonl", "first text", "second text"))
    assert prepare(jsonl(tmp_path / "renamed.jsonl", "first text", "second text")).fingerprint == one.fingerprint
    os.utime(tmp_path / "a.jsonl", (1, 1))
    touched = prepare(tmp_path / "a.jsonl")
    assert (touched.fingerprint, touched.from_cache) == (one.fingerprint, True)
    assert prepare(tmp_path / "a.jsonl", on_bad_row="skip").fingerprint == one.fingerprint
    others = [
        prepare(jsonl(tmp_path / "a.jsonl", "first text", "second text", "third")),
        prepare(jsonl(tmp_path / "a.jsonl", "second text", "first text")),
        prepare(tmp_path / "renamed.jsonl", sequence_length=17),
        prepare(tmp_path / "renamed.jsonl", packing=False),
        prepare(tmp_path / "renamed.jsonl", validation=0.2),
    ]
    assert len({one.fingerprint, *(other.fingerprint for other in others)}) == 6


def test_a_damaged_cache_entry_is_made_again(tmp_path: Path, prepare: Prepare) -> None:
    path = jsonl(tmp_path / "a.jsonl", "some text that is long enough")
    first = prepare(path)
    shard = Path(first.train_dir) / "tokens-00000.bin"
    content = shard.read_bytes()
    for damaged in (content[:-2], bytes([content[0] ^ 1]) + content[1:]):  # a flipped bit trains another model, with nobody the wiser
        shard.write_bytes(damaged)
        again = prepare(path)
        assert not again.from_cache
        assert shard.read_bytes() == content


def test_remote_files_are_read_through_fsspec(tmp_path: Path, prepare: Prepare) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.pipe({"/mem-data/a.jsonl": b'{"text": "remote row one"}\n', "/mem-data/b.jsonl": b'{"text": "remote row two"}\n[]\n'})
    try:
        with pytest.raises(DataError, match=r"memory:///?mem-data/b.jsonl:2: a list"):
            prepare("memory://mem-data/*.jsonl")
        prepared = prepare("memory://mem-data/*.jsonl", on_bad_row="skip", packing=False)
        assert texts_of(prepared.train_dir) == ["remote row one", "remote row two"]
        local = prepare(jsonl(tmp_path / "a.jsonl", "remote row one"), packing=False)
        assert prepare("memory://mem-data/a.jsonl", packing=False).num_tokens == local.num_tokens
    finally:
        fs.rm("/mem-data", recursive=True)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", *("some text " * 20 for _ in range(50)))
    data = DataSection(train=(str(path),), validation=None)
    job = PrepareJob(data=data, tokenizer_source="preset:llama-nano", vocab_size=None, cache_dir=tmp_path / "cache", parent_pid=0)

    def append(progress: PrepareProgress) -> None:
        if progress.phase == "tokenizing":
            with path.open("a") as file:
                file.write('{"text": "late"}\n')

    with pytest.raises(DataError, match="changed while it was read"):
        prepare_here(job, append)
