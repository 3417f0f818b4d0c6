"""`mem data`: what is counted of documents, and rows as the model will see them."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flows.commands.inspection.data import rendered_numbers, rendered_rows, show_data
from mem_core.core.results.data_report import DataReport
from mem_core.domain.errors import RequestError
from mem_core.domain.request import DataSection
from mem_core.domain.run import DataSummary
from mem_core.runtime.data.encoding.encoders import ByteEncoder
from mem_core.runtime.data.encoding.tokenize_process import prepare_here
from mem_core.runtime.data.look.show_process import shown
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.data.statistics import DocumentCounts
from mem_core.runtime.data.values import PreparedData, PrepareJob
from mem_core.runtime.models.encoding import CURRENT_RULES

PAIRS = [{"prompt": "Say hi", "completion": "hi\x1b[2J"}, {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b"}]


def prepared(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> PreparedData:
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSection.model_validate({"train": [str(folder / "a.jsonl")], "validation": None, "sequence_length": 16, **settings})
    job = PrepareJob(
        data=data, tokenizer_source="preset:llama-nano", vocab_size=384, cache_dir=folder / "cache", parent_pid=0, rules=CURRENT_RULES
    )
    return prepare_here(job, lambda progress: None)


@pytest.mark.parametrize("parts", [1, 3])
def test_percentiles_are_those_of_numpy_within_three_digits(parts: int) -> None:
    rng = random.Random(3)
    lengths = [rng.randint(1, 10 ** rng.randint(1, 7)) for _ in range(5_000)]
    counts = DocumentCounts()
    for length in lengths:
        for part in range(parts):
            counts.see(length // parts + (length % parts if part == 0 else 0), last=part == parts - 1)
    found = counts.percentiles()
    assert found.pop("longest") == max(lengths)
    for name, value in found.items():
        exact = int(np.percentile(lengths, int(name[1:]), method="inverted_cdf"))
        assert 0 <= exact - value <= exact / 100
    assert len(found) == 4


def test_copies_are_counted_among_the_first_so_many() -> None:
    counts = DocumentCounts(most_keys=3)
    for key in (b"a", b"b", b"a", b"c", b"a", b"d"):
        counts.compare(key)
    assert (counts.num_copies, counts.num_compared) == (1, 4)
    assert DocumentCounts().percentiles() == {}


def test_a_document_is_counted_once_however_it_is_cut(tmp_path: Path) -> None:
    for policy in ("chunk", "truncate"):
        (tmp_path / policy).mkdir()
        found = prepared(tmp_path / policy, [{"text": "x" * 600_000}, {"text": "abc"}, {"text": "abc"}], long_documents=policy)
        assert found.num_copies == 1
        assert (found.document_tokens["p5"], found.document_tokens["p50"]) == (4, 4)
        longest = found.document_tokens["longest"]
        assert longest == 600_001 if policy == "chunk" else 17 <= longest <= 600_001, "what is cut off need not be encoded"


def test_rows_are_shown_in_stretches_that_are_trained_or_not(tmp_path: Path) -> None:
    found = prepared(tmp_path, PAIRS, prompt_field="prompt", completion_field="completion")
    with TokenDataset.open(found.train_dir) as dataset:
        rows = shown(dataset, ByteEncoder(), 5)
        assert sum(row.trained_tokens for row in rows) == int(dataset.trained_tokens.sum()) == found.trained_tokens
    first = rows[0].segments
    assert [(part.text, part.trained, part.begins) for part in first[:2]] == [("Say hi", False, True), ("hi\x1b[2J</s>", True, False)]
    report = DataReport(summary=DataSummary(), fingerprint="", sequence_length=16, vocab_size=384, rows=tuple(rows))
    plain, coloured = ("\n".join(rendered_rows(report, coloured=colour)) for colour in (False, True))
    assert "|Say hi[[hi\\u001b[2J</s>]]" in plain
    assert "\x1b" not in plain, "what a row holds does not reach the terminal"
    assert "\x1b[32mhi\\u001b[2J</s>\x1b[0m" in coloured


def test_text_is_trained_but_for_its_first_token(tmp_path: Path) -> None:
    found = prepared(tmp_path, [{"text": "abcdefgh" * 4}])
    with TokenDataset.open(found.train_dir) as dataset:
        row = shown(dataset, ByteEncoder(), 1)[0]
    assert [(part.text, part.trained) for part in row.segments] == [("a", False), ("bcdefghabcdefgh", True)]


def test_the_command_prints_rows_numbers_and_what_was_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEM_HOME", str(tmp_path / "home"))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*PAIRS, {"prompt": "", "completion": ""}]))
    request = tmp_path / "r.json"
    data = {"train": [str(tmp_path / "a.jsonl")], "validation": None, "sequence_length": 32, "on_bad_row": "skip"}
    training = {"max_steps": 6, "segment_steps": 3, "global_batch_size": 2}
    request.write_text(json.dumps({"run_id": "r", "model": {"source": "preset:llama-nano"}, "data": data, "training": training}))
    assert show_data(str(request), [], 2, as_json=False) == 0
    text = capsys.readouterr().out
    for words in (
        "documents        3, 1 of them a copy of others", "data.prompt_field: prompt", "left out         1 bad rows",
        "the run          6 steps", "[[hi",
    ):  # fmt: skip
        assert words in text
    with pytest.raises(RequestError, match="--rows"):
        show_data(str(request), [], -1, as_json=False)
    assert show_data(str(request), [], 0, as_json=True) == 0
    report = DataReport.model_validate_json(capsys.readouterr().out)
    assert report.rows == ()
    assert report.epochs == 6 * 2 / report.summary.num_sequences
    assert any(line.startswith("token ids") for line in rendered_numbers(report))
