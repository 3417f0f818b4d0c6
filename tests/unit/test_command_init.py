"""`mem init`: a request that is valid and explains itself, from flags or from five answers."""

import io
from pathlib import Path

import pytest

from flows.commands.init import COMMENT_COLUMN, QUESTIONS, init
from mem_core.domain.errors import RequestError
from mem_core.infrastructure.request.file import load_request
from mem_core.infrastructure.telemetry.live import Rate


def test_five_answers_make_a_request_that_explains_itself(tmp_path: Path) -> None:
    asked: list[str] = []
    answers = iter(["my-model", "", "a.jsonl, 'b c'/*.jsonl", "400", ""])

    def ask(words: str) -> str:
        asked.append(words)
        return next(answers)

    path = tmp_path / "request.yaml"
    assert init(path, {}, as_json=False, ask=ask) == 0
    request = load_request(str(path))
    assert len(asked) == len(QUESTIONS) == 5
    assert request.run_id == "my-model"
    assert request.model.source == "preset:llama-nano"
    assert request.data.train == ("a.jsonl", "'b c'/*.jsonl")
    assert (request.training.max_steps, request.training.segment_steps, request.training.warmup_steps) == (400, 40, 40)
    behind = [line for line in path.read_text().splitlines() if "  # " in line]
    assert len(behind) >= 8
    assert {line.index("  # ") for line in behind if line.index("  # ") <= COMMENT_COLUMN} == {COMMENT_COLUMN}


def test_flags_answer_and_nothing_is_asked_where_nobody_sits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    init(tmp_path / "r.yaml", {"run_id": "tuned", "rate": "1e-4"}, as_json=True)
    request = load_request(str(tmp_path / "r.yaml"))
    assert (request.run_id, request.training.learning_rate, request.training.max_steps) == ("tuned", 1e-4, 1_000)
    assert "[" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "word"), [({"run_id": "Bad Name!"}, "run_id"), ({"rate": "99"}, "learning_rate"), ({"steps": "many"}, "max_steps")]
)
def test_a_wrong_answer_is_refused_by_name_and_nothing_is_written(tmp_path: Path, given: dict[str, str | None], word: str) -> None:
    with pytest.raises(RequestError, match=word):
        init(tmp_path / "r.yaml", given, as_json=False, ask=lambda _: "")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_stays_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("mine")
    with pytest.raises(RequestError, match="a file already"):
        init(tmp_path / "r.yaml", {}, as_json=False, ask=lambda _: "")
    assert (tmp_path / "r.yaml").read_text() == "mine"


def test_a_rate_is_that_of_the_last_minutes_and_starts_anew_where_work_is_done_again() -> None:
    rate = Rate(span_s=60)
    assert rate.per_s() is None
    for second in range(0, 301, 10):
        rate.add(second, second * 2)
    assert rate.per_s() == 2
    for second in range(310, 611, 10):
        rate.add(second, 600 + (second - 300) * 10)
    assert rate.per_s() == 10, "what was more than two minutes ago counts no more"
    assert rate.eta_s(100) == 10
    rate.add(620, 500)
    assert (rate.per_s(), rate.eta_s(1)) == (None, None)
    rate.add(630, 520)
    assert rate.per_s() == 2
