"""Rows written are the rows read; damage is found before it is trusted; masks go by position (field reports 53, 67, 132)."""

import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mem_core.domain.errors import DataError
from mem_core.domain.request import DataSection
from mem_core.runtime.data.encoding.sequences import RowMaker
from mem_core.runtime.data.serving.collate import collate
from mem_core.runtime.data.serving.dataset import TokenDataset, check_contents
from mem_core.runtime.data.serving.shards import ShardWriter
from mem_core.runtime.deepspeed.objective import labels_of

ROWS = st.lists(st.lists(st.tuples(st.integers(0, 383), st.booleans()), min_size=1, max_size=12), min_size=1, max_size=20)


def write(
    folder: Path, rows: list[list[int]], masks: list[list[int]] | None = None, shard_tokens: int = 16, vocab_size: int = 384
) -> TokenDataset:
    writer = ShardWriter(folder, vocab_size, masks is not None, shard_tokens)
    lengths = np.array([len(row) for row in rows], np.int64)
    writer.write(np.concatenate(rows), lengths, None if masks is None else np.concatenate(masks).astype(np.uint8))
    writer.finish()
    return TokenDataset.open(folder)


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, shard_tokens=st.integers(1, 40), with_mask=st.booleans(), vocab_size=st.sampled_from([384, 100_000]))
def test_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list, shard_tokens: int, with_mask: bool, vocab_size: int
) -> None:
    tokens = [[token for token, _ in row] for row in rows]
    masks = [[int(flag) for _, flag in row] for row in rows] if with_mask else None
    dataset = write(tmp_path_factory.mktemp("rows") / "d", tokens, masks, shard_tokens, vocab_size)
    assert len(dataset) == len(rows)
    assert dataset.lengths.tolist() == [len(row) for row in rows]
    backwards = range(len(rows) - 1, -1, -1)
    for row_id, (read_tokens, read_mask) in zip(backwards, dataset.rows(backwards), strict=True):
        assert read_tokens.tolist() == tokens[row_id]
        assert (None if read_mask is None else read_mask.tolist()) == (None if masks is None else masks[row_id])
    counted = [sum(mask[1:]) for mask in masks] if masks else [len(row) - 1 for row in rows]
    assert dataset.trained_tokens.tolist() == counted
    assert (dataset.index.trained_tokens, dataset.index.num_tokens) == (sum(counted), sum(map(len, rows)))
    dataset.close()


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, with_mask=st.booleans(), extra=st.integers(0, 5))
def test_collated_labels_count_what_the_index_says(
    tmp_path_factory: pytest.TempPathFactory, rows: list, with_mask: bool, extra: int
) -> None:
    """Report 67: the token count is that of the labels the loss sees, padding or not, mask or not."""
    tokens = [[token for token, _ in row] for row in rows]
    masks = [[int(flag) for _, flag in row] for row in rows] if with_mask else None
    dataset = write(tmp_path_factory.mktemp("rows") / "d", tokens, masks)
    ids = np.arange(len(rows))[::-1].copy()
    padded_length = int(dataset.lengths.max()) + extra
    batch = collate(dataset, ids, range(len(rows)), padded_length, pad_token_id=1)
    labels = labels_of(batch)
    assert batch.input_ids.shape == labels.shape == (len(rows), padded_length)
    assert (labels[:, 1:] != -100).sum(dim=1).tolist() == dataset.trained_tokens[ids].tolist()
    assert (batch.attention_mask is None) == (min(map(len, rows)) == padded_length)
    for row, row_id in enumerate(ids.tolist()):
        assert batch.input_ids[row].tolist() == tokens[row_id] + [1] * (padded_length - len(tokens[row_id]))
        if batch.attention_mask is not None:
            assert batch.attention_mask[row].sum() == len(tokens[row_id])
    dataset.close()


def test_a_real_end_token_keeps_its_label_where_it_is_also_the_pad_token(tmp_path: Path) -> None:
    """Report 132: row "a<eos>" padded to 8 gives labels a, eos, then -100 six times."""
    dataset = write(tmp_path / "d", [[100, 2]])
    batch = collate(dataset, np.array([0]), [0], 8, pad_token_id=2)
    assert batch.input_ids.tolist() == [[100, 2, 2, 2, 2, 2, 2, 2]]
    assert labels_of(batch).tolist() == [[100, 2, -100, -100, -100, -100, -100, -100]]
    assert batch.attention_mask is not None
    assert batch.attention_mask.tolist() == [[1, 1, 0, 0, 0, 0, 0, 0]]


def test_a_row_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a row of 3 tokens does not fit in 2"):
        collate(write(tmp_path / "d", [[5, 6, 7]]), np.array([0]), [0], 2, 0)


def test_reading_the_last_row_does_the_same_work_as_reading_the_first(tmp_path: Path) -> None:
    """Report 53: the position costs nothing. Counted in bytes that the process reads, not in seconds."""
    rows = 20_000
    dataset = write(tmp_path / "d", [[7] * 16] * rows, shard_tokens=2**12)

    def bytes_read(row_id: int) -> int:
        before = _rchar()
        dataset.rows([row_id])
        return _rchar() - before

    bytes_read(0)
    own_cost = bytes_read(0)
    assert bytes_read(rows - 1) == own_cost
    assert own_cost < 1_000
    dataset.close()


def test_reading_every_row_leaves_resident_memory_level(tmp_path: Path) -> None:
    """32 MB of tokens go by; a memory map would count each page that was touched."""
    dataset = write(tmp_path / "d", [[7] * 1_000] * 16_000, shard_tokens=2**22)
    dataset.rows(range(100))
    before = _resident_bytes()
    for start in range(0, 16_000, 100):
        dataset.rows(range(start, start + 100))
    assert _resident_bytes() - before < 4_000_000
    dataset.close()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _rchar() -> int:
    """Bytes that this process has read so far, as the kernel counts them."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_an_unfinished_or_damaged_folder_is_never_opened(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "half", 384, has_mask=False)
    writer.write(np.arange(4), np.array([4]), None)
    writer.close()
    with pytest.raises(DataError, match="not a complete folder"):
        TokenDataset.open(tmp_path / "half")
    write(tmp_path / "cut", [[1, 2, 3, 4]]).close()
    shard = tmp_path / "cut" / "tokens-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"wrong size of tokens-00000\.bin"):
        TokenDataset.open(tmp_path / "cut")


def make_rows(
    folder: Path, documents: list[list[int]], masks: list[list[int]] | None = None, **settings: object
) -> tuple[list[list[int]], RowMaker]:
    data = DataSection.model_validate({"sequence_length": 4, **settings})
    writer = ShardWriter(folder, 384, masks is not None)
    maker = RowMaker(writer, data, masks is not None)
    for number, document in enumerate(documents):
        maker.add(np.array(document, np.uint32), None if masks is None else np.array(masks[number], np.uint8))
    maker.finish()
    writer.finish()
    dataset = TokenDataset.open(folder)
    rows = [tokens.tolist() for tokens, _ in dataset.rows(range(len(dataset)))]
    dataset.close()
    return rows, maker


def test_packing_joins_documents_and_drops_the_last_partial_sequence(tmp_path: Path) -> None:
    rows, maker = make_rows(tmp_path / "d", [[1, 2, 3], [4, 5, 6], [7, 8, 9, 10]], packing=True)
    assert rows == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert maker.dropped == {"last_partial_sequence": 1}


def test_packing_keeps_a_partial_sequence_that_is_all_there_is(tmp_path: Path) -> None:
    rows, maker = make_rows(tmp_path / "d", [[1, 2, 3]], packing=True)
    assert rows == [[1, 2, 3]]
    assert not maker.dropped


def test_without_packing_a_row_is_a_document_or_a_chunk_of_one(tmp_path: Path) -> None:
    rows, maker = make_rows(tmp_path / "d", [[1, 2], [3, 4, 5, 6, 7, 8], [9], [1, 2, 3, 4, 5]], packing=False)
    assert rows == [[1, 2], [3, 4, 5, 6], [7, 8], [1, 2, 3, 4]]
    assert maker.dropped == {"rows_without_trained_label": 2}, "a single token predicts nothing"


def test_truncation_keeps_the_beginning(tmp_path: Path) -> None:
    rows, maker = make_rows(tmp_path / "d", [[1, 2, 3, 4, 5, 6], [7, 8]], packing=False, long_documents="truncate")
    assert rows == [[1, 2, 3, 4], [7, 8]]
    assert maker.dropped == {"truncated_documents": 1}


def test_rows_without_a_label_that_counts_are_dropped(tmp_path: Path) -> None:
    """The first token's own label does not count: nothing predicts it."""
    rows, maker = make_rows(tmp_path / "d", [[1, 2], [3, 4], [5, 6]], [[0, 1], [1, 0], [0, 0]], packing=False)
    assert rows == [[1, 2]]
    assert maker.dropped == {"rows_without_trained_label": 2}


def test_many_documents_pass_in_bounded_memory(tmp_path: Path) -> None:
    """Nothing is lost or doubled over internal flushes."""
    documents = [[n % 300] * 1_000 for n in range(200)]
    rows, maker = make_rows(tmp_path / "d", documents, packing=True, sequence_length=128)
    flat = [token for row in rows for token in row]
    assert flat == [token for document in documents for token in document][: len(flat)]
    assert len(flat) == 200_000 // 128 * 128
    assert maker.num_tokens == 200_000


def test_a_cache_entry_of_an_older_version_has_no_digests_and_is_used(tmp_path: Path) -> None:
    """And one too large to be read at each start is believed by its sizes."""
    writer = ShardWriter(tmp_path / "rows", vocab_size=384, has_mask=False)
    writer.write(np.arange(8), np.array([4, 4]), None)
    index = writer.finish()
    assert sorted(index.digests) == ["lengths.i32", "offsets.i64", "tokens-00000.bin", "trained.i32"]
    (tmp_path / "rows" / "tokens-00000.bin").write_bytes(bytes(16))
    with pytest.raises(DataError, match=r"other bytes than were written in tokens-00000.bin"):
        check_contents(tmp_path / "rows", index)
    check_contents(tmp_path / "rows", index, most_bytes=16)
    check_contents(tmp_path / "rows", index.model_copy(update={"digests": {}}))
