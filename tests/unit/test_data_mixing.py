"""Weighted sources: exact counts over epochs, the same order for any cut, each packed by itself; weights that mean nothing are refused."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.commands.inspection.data import rendered_numbers
from mem_core.core.results.data_report import DataReport
from mem_core.domain.errors import DataError, RequestError
from mem_core.domain.request import DataSection, EvaluationSection, WeightedSource
from mem_core.infrastructure.request.file import apply_overrides, build_request
from mem_core.runtime.data.encoding.prepare import prepare_data
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.data.serving.mixing import Mix, draws_of, samples_of
from mem_core.runtime.data.serving.order import sample_ids
from mem_core.runtime.data.values import PreparedData

FROZEN_FIRST = [6, 3, 10, 5, 1, 9, 9, 14, 3, 2, 0, 4]
FROZEN_LATE = [4, 14, 1, 1, 20, 17, 7, 6, 3, 18, 13, 6]
NANO = "preset:llama-nano"
PARTS = st.lists(st.tuples(st.integers(1, 60), st.sampled_from([0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0])), min_size=1, max_size=4)


def stream(seed: int, mix: Mix | int, length: int, batch: int = 7) -> list[int]:
    return np.concatenate([sample_ids(seed, index, batch, mix) for index in range(-(-length // batch))])[:length].tolist()


@settings(deadline=None, max_examples=60)
@given(parts=PARTS, seed=st.integers(0, 2**63 - 1), epochs=st.integers(1, 6))
def test_an_epoch_holds_what_the_weights_say_and_over_epochs_every_row_the_same(
    parts: list[tuple[int, float]], seed: int, epochs: int
) -> None:
    rows = tuple(count for count, _ in parts)
    mix = Mix(rows, draws_of(rows, [weight for _, weight in parts]))
    ids = stream(seed, mix, mix.epoch_rows * epochs)
    firsts = np.cumsum((0, *rows))
    for epoch in range(epochs):
        part = np.array(ids[epoch * mix.epoch_rows : (epoch + 1) * mix.epoch_rows])
        drawn = [int(((part >= low) & (part < high)).sum()) for low, high in pairwise(firsts)]
        assert tuple(drawn) == mix.draws
    counts = np.bincount(ids, minlength=sum(rows))
    for number, draws in enumerate(mix.draws):
        of_source = counts[firsts[number] : firsts[number + 1]]
        assert of_source.sum() == draws * epochs
        assert of_source.max() - of_source.min() <= 1, "no row is seen once more than another"


def test_twice_is_twice_and_a_half_is_the_other_half_next_time() -> None:
    mix = Mix((10, 8), draws_of((10, 8), (2.0, 0.5)))
    ids = stream(5, mix, 48)
    first, second = Counter(ids[:24]), Counter(ids[24:])
    assert all(first[row] == second[row] == 2 for row in range(10))
    assert all(first[row] + second[row] == 1 for row in range(10, 18))
    assert ids[:24] != sorted(ids[:24]), "the sources are mixed"
    assert max(place for place, row in enumerate(ids[:24]) if row >= 10) > 4
    assert stream(6, mix, 48) != ids


def test_counts_go_by_decimal_digits_and_are_never_nothing() -> None:
    assert draws_of((100, 7, 3, 5, 30), (0.1, 0.5, 0.01, 1.0, 1.1)) == (10, 4, 1, 5, 33)


@settings(deadline=None)
@given(first=st.integers(1, 50), second=st.integers(1, 50), parts=PARTS)
def test_the_order_does_not_depend_on_the_cut(first: int, second: int, parts: list[tuple[int, float]]) -> None:
    rows = tuple(count for count, _ in parts)
    mix = Mix(rows, draws_of(rows, [weight for _, weight in parts]))
    assert stream(3, mix, first * second, first) == stream(3, mix, first * second, second)


def test_far_positions_are_reached_directly() -> None:
    mix = Mix((10**9, 10**7), draws_of((10**9, 10**7), (0.3, 7.0)))
    ids = sample_ids(1, 10**9, 64, mix)
    assert 0 <= ids.min() <= ids.max() < 10**9 + 10**7
    assert len(set(ids.tolist())) == 64


def test_the_order_never_changes() -> None:
    mix = Mix((10, 8, 3), draws_of((10, 8, 3), (2.0, 0.5, 1.0)))
    assert sample_ids(0, 0, 12, mix).tolist() == FROZEN_FIRST
    assert sample_ids(12345, 99_999, 12, mix).tolist() == FROZEN_LATE


# -- preparation ----------------------------------------------------------------------------------------------------------------


def source(folder: Path, name: str, letter: str, count: int) -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": letter * (5 + number % 7)}) + "\n" for number in range(count)))
    return str(path)


def prepare(folder: Path, train: list[Any], **settings: Any) -> PreparedData:
    data = DataSection.model_validate({"train": train, "validation": None, "sequence_length": 16, **settings})
    return prepare_data(data, 0, NANO, 384, folder / "cache")


def test_each_source_is_packed_by_itself_and_told_with_its_part(tmp_path: Path) -> None:
    a, b = source(tmp_path, "a", "a", 40), source(tmp_path, "b", "b", 30)
    mixed = prepare(tmp_path, [{"path": a, "weight": 2}, {"path": b, "weight": 0.5}])
    alone = {path: prepare(tmp_path, [path]) for path in (a, b)}
    one, other = mixed.shares
    assert [(share.path, share.weight, share.num_rows, share.num_tokens, share.num_documents) for share in mixed.shares] == [
        (path, weight, alone[path].num_samples, alone[path].num_tokens, alone[path].num_documents) for path, weight in ((a, 2.0), (b, 0.5))
    ]
    assert (one.epoch_rows, other.epoch_rows) == (2 * one.num_rows, -(-other.num_rows // 2))
    assert mixed.epoch_rows == one.epoch_rows + other.epoch_rows
    assert one.epoch_tokens == 2 * one.num_tokens
    with TokenDataset.open(mixed.train_dir) as data, TokenDataset.open(alone[a].train_dir) as first:
        with TokenDataset.open(alone[b].train_dir) as second:
            expected = [*first.rows(range(len(first))), *second.rows(range(len(second)))]
        assert [row.tolist() for row, _ in data.rows(range(len(data)))] == [row.tolist() for row, _ in expected]
    assert any("× 0.5" in remark.text for remark in mixed.remarks)


def test_other_weights_are_other_data_and_encode_nothing_again(tmp_path: Path) -> None:
    a, b = source(tmp_path, "a", "a", 20), source(tmp_path, "b", "b", 20)
    first = prepare(tmp_path, [{"path": a, "weight": 2}, b])
    second = prepare(tmp_path, [{"path": a, "weight": 3}, b])
    assert second.from_cache
    assert first.train_dir == second.train_dir
    assert first.fingerprint != second.fingerprint
    assert prepare(tmp_path, [{"path": a, "weight": 2}, b]) == first.model_copy(update={"from_cache": True})


def test_weights_of_one_are_no_weights(tmp_path: Path) -> None:
    a, b = source(tmp_path, "a", "a", 20), source(tmp_path, "b", "b", 20)
    plain = DataSection(train=(a, b))
    assert DataSection.model_validate({"train": [{"path": a, "weight": 1}, {"path": b}]}) == plain
    assert plain.model_dump(mode="json")["train"] == [a, b]
    assert prepare(tmp_path, [{"path": a, "weight": 1.0}, b]).train_dir == prepare(tmp_path, [a, b]).train_dir


def test_a_file_of_two_sources_belongs_to_the_first_and_one_without_any_is_refused(tmp_path: Path) -> None:
    a, b = source(tmp_path, "a", "a", 20), source(tmp_path, "b", "b", 20)
    mixed = prepare(tmp_path, [{"path": b, "weight": 2}, f"{tmp_path}/*.jsonl"])
    assert [share.num_documents for share in mixed.shares] == [20, 20]
    with pytest.raises(DataError, match=r"data\.train\.1: no row to train on in this source") as caught:
        prepare(tmp_path, [{"path": a, "weight": 2}, a])
    assert a in str(caught.value)


def test_a_folder_of_other_sources_is_never_mixed() -> None:
    data = DataSection(train=("a", WeightedSource(path="b", weight=2.0)))
    assert samples_of(DataSection(train=("a", "b")), 7, ()) == 7
    with pytest.raises(ValueError, match="2 sources with 7 rows"):
        samples_of(data, 7, ())


@pytest.mark.parametrize(
    ("item", "field", "said"),
    [
        ({"path": "a", "weight": 0}, "data.train.1.weight", "at most 100"),
        ({"path": "a", "weight": -1}, "data.train.1.weight", "got -1"),
        ({"path": "a", "weight": 100.5}, "data.train.1.weight", "got 100.5"),
        ({"path": "a", "weight": True}, "data.train.1.weight", "got True"),
        ({"path": "a", "weight": float("nan")}, "data.train.1.weight", "got nan"),
        ({"path": "a", "weight": "2"}, "data.train.1.weight", "got '2'"),
        ({"path": 5, "weight": 2}, "data.train.1.path", "must be text"),
        ({"path": "a", "wieght": 2}, "data.train.1", "'wieght'"),
        ({"weight": 2}, "data.train.1", "without its path"),
        (5, "data.train.1", "must be a path"),
    ],
)
def test_what_is_no_weighted_source_is_refused_by_name(item: Any, field: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        build_request({"run_id": "r", "data": {"train": ["b", item]}})
    assert caught.value.field == field
    assert said in str(caught.value)
    assert "weight: 0.5" in caught.value.remedy


def test_what_is_evaluated_takes_no_weights() -> None:
    with pytest.raises(RequestError, match=r"data\.validation\.0"):
        DataSection.model_validate({"validation": [{"path": "a", "weight": 2}]})
    with pytest.raises(RequestError, match=r"evaluation\.sets\.more\.0"):
        EvaluationSection.model_validate({"sets": {"more": [{"path": "a", "weight": 1}]}})


def test_weights_come_through_every_door() -> None:
    request = build_request(apply_overrides({"run_id": "r"}, ['data.train=["a", {"path": "b", "weight": 0.5}]']))
    assert request.data.train == ("a", WeightedSource(path="b", weight=0.5))
    assert type(request).model_validate(request.model_dump(mode="json")) == request
    assert (request.data.is_weighted, request.data.train_paths, request.data.train_weights) == (True, ("a", "b"), (1.0, 0.5))


def test_the_data_report_names_the_part_of_each_source(tmp_path: Path) -> None:
    mixed = prepare(tmp_path, [{"path": source(tmp_path, "a", "a", 40), "weight": 2}, source(tmp_path, "b", "b", 30)])
    one, other = mixed.shares
    summary = mixed.summary()
    report = DataReport(summary=summary, fingerprint="f", sequence_length=16, vocab_size=384, num_embeddings=384)
    first, second = (line for line in rendered_numbers(report.model_copy(update={"steps": 1, "epochs": 1.0})) if "of an epoch" in line)
    assert f"{2 * one.num_rows:,} rows, {2 * one.num_tokens:,} tokens" in first
    assert f"2 × {one.num_rows:,} rows of {one.path}" in first
    assert f"{other.num_rows:,} rows, {other.num_tokens:,} tokens" in second
    assert summary.num_sequences == one.num_rows + other.num_rows
