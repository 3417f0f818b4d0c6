"""Who takes a run's figures: nothing twice over any number of starts, nothing lost over an outage, nothing fatal, no secret shown."""

import csv
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from mem_core.domain.events import Evaluated
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.results.evaluation import SetFigures
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.storage.redact import redact
from mem_core.infrastructure.telemetry.loggers.csv_tables import EVALUATION_COLUMNS, STEP_COLUMNS, CsvLogger
from mem_core.infrastructure.telemetry.loggers.files import NpzLogger
from mem_core.infrastructure.telemetry.loggers.marks import read_mark, write_mark
from mem_core.infrastructure.telemetry.loggers.mlflow import MlflowLogger, MlflowTarget
from mem_core.infrastructure.telemetry.loggers.points import Point, points_of_evaluations, points_of_steps
from mem_core.infrastructure.telemetry.metrics import METRIC_DTYPES, Columns, read_metrics, write_evaluation_metrics, write_segment_metrics
from mem_core.runtime.session.results.result_log import ResultLog, logging_problems, parameters_of, redact_url_of_page

SECRET = "http://somebody:hunter2hunter2@127.0.0.1:1"


def columns(first: int, last: int) -> Columns:
    """Steps `first` to `last`, a loss that tells them apart, no gradient norm."""
    steps = np.arange(first, last + 1)
    values = {name: np.ones(steps.size, dtype) for name, dtype in METRIC_DTYPES.items()}
    return values | {"step": steps, "batch_index": steps - 1, "loss": 1.0 / steps, "grad_norm": np.full(steps.size, np.nan)}


def evaluation(step: int) -> Evaluated:
    figures = SetFigures.of(2.0 / step, 0.5, tokens=10, rows=3, rows_total=3)
    return Evaluated(step=step, validation_loss=figures.loss, sets={"validation": figures})


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# -- CSV ----------------------------------------------------------------------------------------------------------------------------------


def test_a_table_has_every_step_once_after_a_resume_and_a_crash(tmp_path: Path) -> None:
    first = CsvLogger(tmp_path)
    first.rewind(0)
    first.segment(10, columns(1, 10), 0)
    first.segment(20, columns(11, 20), 0)
    with (tmp_path / "steps.csv").open("ab") as file:
        file.write(b"21,20,0.0")  # a crash cut the line
    again = CsvLogger(tmp_path)
    again.rewind(10)
    again.segment(20, columns(11, 20), 0)
    rows = table(tmp_path / "steps.csv")
    assert [int(row["step"]) for row in rows] == list(range(1, 21))
    assert list(rows[0]) == list(STEP_COLUMNS)
    assert float(rows[4]["loss_nats_per_token"]) == 0.2
    assert rows[4]["gradient_norm"] == rows[4]["added_loss_nats_per_token"] == ""


def test_a_table_that_is_asked_for_later_begins_at_the_first_step(tmp_path: Path) -> None:
    write_segment_metrics(tmp_path, 10, columns(1, 10))
    late = CsvLogger(tmp_path)
    late.rewind(10)
    late.segment(20, columns(11, 20), 0)
    assert [int(row["step"]) for row in table(tmp_path / "steps.csv")] == list(range(1, 21))


def test_evaluations_have_a_table_of_their_own(tmp_path: Path) -> None:
    CsvLogger(tmp_path).evaluations([evaluation(10), evaluation(20)])
    rows = table(tmp_path / "evaluations.csv")
    assert tuple(rows[0]) == EVALUATION_COLUMNS
    assert [(row["step"], row["set"], float(row["loss_nats_per_token"])) for row in rows] == [
        ("10", "validation", 0.2), ("20", "validation", 0.1),
    ]  # fmt: skip


# -- MLflow -------------------------------------------------------------------------------------------------------------------------------


class FakeServer:
    """Remembers what it was sent; `refuse` raises before, `lose_answer` after a batch was taken."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.begun: list[str] = []
        self.statuses: list[tuple[str, dict[str, str]]] = []
        self.refuse: Exception | None = None
        self.lose_answer = False
        self.answers = threading.Event()
        self.answers.set()

    def begin(self, experiment: str, name: str, token: str, texts: dict[str, str], parameters: dict[str, str]) -> tuple[str, str]:
        self.answers.wait(30)
        if self.refuse:
            raise self.refuse
        self.begun.append(token)
        return "7", f"run-of-{token}"

    def send(self, run_id: str, points: Sequence[Point]) -> None:
        if self.refuse:
            raise self.refuse
        self.points += points
        if self.lose_answer:
            self.lose_answer = False
            raise TimeoutError("no answer")

    def last_step(self, run_id: str, metric: str) -> int:
        return max((point.step for point in self.points if metric in point.values), default=0)

    def set_status(self, run_id: str, status: str, texts: dict[str, str]) -> None:
        self.statuses.append((status, texts))

    def steps(self, metric: str = "train/loss") -> list[int]:
        return [point.step for point in self.points if metric in point.values]


def logger(folder: Path, server: FakeServer, said: list[str], end_limit_s: float = 5.0) -> MlflowLogger:
    target = MlflowTarget(SECRET, "mem", "demo", {"training.seed": "0"})
    return MlflowLogger(folder, target, lambda: server, said.append, said.append, retry_s=(0.01,), end_limit_s=end_limit_s)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.005)


def write(folder: Path, first: int, last: int) -> None:
    write_segment_metrics(folder, last, columns(first, last))


def test_a_resume_sends_no_point_twice_and_goes_on_with_the_same_run(tmp_path: Path) -> None:
    server, said = FakeServer(), list[str]()
    first = logger(tmp_path, server, said)
    write(tmp_path, 1, 10)
    first.segment(10, {}, 0)
    until(lambda: server.steps() == list(range(1, 11)))
    write(tmp_path, 11, 20)
    assert first.end("interrupted", {"mem.status": "interrupted"}) == ""
    again = logger(tmp_path, server, said)
    NpzLogger(tmp_path).rewind(10)
    again.rewind(10)
    write(tmp_path, 11, 20)  # done again
    write_evaluation_metrics(tmp_path, [evaluation(20)])
    again.segment(20, {}, 0)
    write(tmp_path, 21, 30)
    assert again.end("completed", {}) == ""
    assert server.steps() == list(range(1, 31))
    assert server.steps("evaluation/validation/loss") == [20]
    assert len(set(server.begun)) == 1
    assert [status for status, _ in server.statuses] == ["KILLED", "FINISHED"]


def test_an_outage_is_said_once_and_caught_up_with(tmp_path: Path) -> None:
    server, said = FakeServer(), list[str]()
    server.refuse = ConnectionError(f"500 from {SECRET}/api?token=abc, Authorization: Bearer abcdefghij")
    write(tmp_path, 1, 10)
    sent = logger(tmp_path, server, said)
    sent.segment(10, {}, 0)
    until(lambda: bool(said))
    write(tmp_path, 11, 20)
    for _ in range(5):
        sent.segment(20, {}, 0)
        time.sleep(0.02)
    assert len(said) == 1
    assert "training goes on" in said[0]
    assert "hunter2" not in said[0]
    assert "abc" not in said[0]
    server.refuse = None
    until(lambda: len(said) == 3)
    assert "has the steps up to 20" in said[2]
    assert said[1] == f"http://127.0.0.1:1/#/experiments/7/runs/{read_mark(tmp_path / 'mlflow.json').run_id}"
    assert sent.end("completed", {}) == ""
    assert server.steps() == list(range(1, 21))


def test_a_server_that_stays_away_is_told_at_the_end_and_gets_all_of_it_with_the_next_start(tmp_path: Path) -> None:
    server, said = FakeServer(), list[str]()
    server.refuse = ConnectionError("refused")
    write(tmp_path, 1, 10)
    first = logger(tmp_path, server, said)
    first.segment(10, {}, 0)
    assert "up to 0; the next start" in first.end("completed", {})
    server.refuse = None
    assert logger(tmp_path, server, said).end("completed", {}) == ""
    assert server.steps() == list(range(1, 11))


def test_a_server_that_never_answers_holds_nobody_up(tmp_path: Path) -> None:
    server, said = FakeServer(), list[str]()
    server.answers.clear()
    write(tmp_path, 1, 10)
    sent = logger(tmp_path, server, said, end_limit_s=0.1)
    began_s = time.monotonic()
    for _ in range(1_000):
        sent.segment(10, {}, 0)
    assert "the next start" in sent.end("completed", {})
    assert time.monotonic() - began_s < 2
    server.answers.set()


def test_a_lost_answer_is_asked_for_and_not_sent_again(tmp_path: Path) -> None:
    server, said = FakeServer(), list[str]()
    server.lose_answer = True
    write(tmp_path, 1, 10)
    sent = logger(tmp_path, server, said)
    sent.segment(10, {}, 0)
    until(lambda: len(said) == 3)  # the address, the failure, the success
    assert sent.end("completed", {}) == ""
    assert server.steps() == list(range(1, 11))


def test_an_attempt_killed_between_send_and_mark_sends_nothing_twice(tmp_path: Path) -> None:
    server = FakeServer()
    write(tmp_path, 1, 10)
    write_evaluation_metrics(tmp_path, [evaluation(10)])
    logger(tmp_path, server, []).end("running", {})
    mark = read_mark(tmp_path / "mlflow.json")
    assert mark is not None
    write_mark(tmp_path / "mlflow.json", mark.model_copy(update={"steps_until": 0, "evaluated_until": 0}))
    logger(tmp_path, server, []).end("completed", {})
    assert server.steps() == list(range(1, 11))
    assert server.steps("evaluation/validation/loss") == [10]


def test_points_of_a_long_run_are_thinned_and_keep_their_spikes(tmp_path: Path) -> None:
    long = columns(1, 5_000)
    long["loss"][2_345] = 99.0
    write_segment_metrics(tmp_path, 5_000, long)
    ((to_step, points),) = points_of_steps(tmp_path, 0, 1 << 30)
    assert to_step == 5_000
    assert len(points) <= 5 * 48
    assert max(point.values["train/loss"] for point in points) == 99.0
    assert "train/grad_norm" not in points[0].values, "a value that is not finite is none"
    assert list(points_of_steps(tmp_path, 5_000, 0)) == []
    assert points_of_evaluations(tmp_path, 0) == []


# -- all of them --------------------------------------------------------------------------------------------------------------------------


def test_a_logger_that_cannot_write_is_said_and_hinders_no_other(tmp_path: Path) -> None:
    class Broken(CsvLogger):
        def segment(self, to_step: int, columns: Columns, memory_limit_bytes: int) -> None:
            raise OSError(28, "No space left on device")

    said: list[str] = []
    log = ResultLog([Broken(tmp_path), NpzLogger(tmp_path)], said.append)
    log.segment(10, columns(1, 10), 0)
    assert read_metrics(tmp_path)["step"].size == 10
    assert ["No space left" in text for text in said] == [True]


@pytest.mark.parametrize(
    ("telemetry", "environ", "refused"),
    [
        ({"loggers": ["mlflow"]}, {}, True),
        ({"loggers": ["mlflow"]}, {"MLFLOW_TRACKING_URI": SECRET}, False),
        ({"loggers": ["mlflow"], "mlflow_tracking_uri": "http://127.0.0.1:5000"}, {}, False),
        ({"loggers": ["csv"]}, {}, False),
        ({}, {}, False),
    ],
)
def test_mlflow_without_an_address_is_refused_before_anything_starts(
    telemetry: dict[str, object], environ: dict[str, str], refused: bool, tmp_path: Path
) -> None:
    request = RuntimeRequest.model_validate({"run_id": "a", "telemetry": telemetry})
    settings = Settings.from_environment({"MEM_HOME": str(tmp_path), **environ})
    assert [problem.exit_code for problem in logging_problems(request, settings)] == [64] * refused
    assert "hunter2" not in repr(settings)


def test_a_header_that_signs_in_is_hidden_with_what_follows_its_kind() -> None:
    for text in ("Authorization: Bearer abcdefgh", "authorization=Basic c29tZWJvZHk6aHVudGVyMg==", '{"Authorization": "Bearer abcdefgh"}'):
        assert redact(text).count("***") == 1
        assert "abcdefgh" not in redact(text)
        assert "c29t" not in redact(text)


def test_parameters_are_the_request_field_by_field() -> None:
    parameters = parameters_of(RuntimeRequest.model_validate({"run_id": "a", "data": {"train": ["https://host/f?X-Amz-Signature=abc"]}}))
    assert parameters["training.learning_rate"] == "0.0003"
    assert parameters["data.train"] == '["https://host/f"]'
    assert redact_url_of_page(f"{SECRET}/?t=1#/experiments/1") == "http://127.0.0.1:1/#/experiments/1"
