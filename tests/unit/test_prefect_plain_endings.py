"""What Prefect's log and a notebook say of an ending: an ordered cancel in one line, an error that MEM foresaw in its own few lines;
every other error keeps its traceback."""

import logging
import sys

import pytest
from prefect.exceptions import CancelledRun

from flows.mem_flow import PlainEndings
from mem_core.domain.errors import InternalError, Interrupted, RequestError

WRONG = RequestError("must be at most 10", field="training.learning_rate", value=99, bound="> 0 and <= 10", remedy="Lower it.")
LINES = ["RequestError: training.learning_rate: must be at most 10 (got 99)", "  allowed: > 0 and <= 10", "  Lower it."]


def record_of(error: Exception) -> logging.LogRecord:
    try:
        raise error
    except type(error):
        return logging.LogRecord("prefect.flow_runs", logging.ERROR, __file__, 1, "Encountered exception: %r", (error,), sys.exc_info())


def told(error: Exception) -> tuple[str, int]:
    record = record_of(error)
    assert PlainEndings().filter(record)
    return logging.Formatter().format(record), record.levelno


def test_an_ordered_stop_is_said_in_one_line_and_is_no_error() -> None:
    assert told(CancelledRun("stopped by SIGTERM")) == ("cancelled as asked: stopped by SIGTERM", logging.INFO)


def test_an_error_that_was_foreseen_is_said_in_its_own_lines() -> None:
    assert told(WRONG) == ("\n".join(LINES), logging.ERROR)


@pytest.mark.parametrize("error", [ValueError("a fault"), InternalError("a fault", remedy="Report it.")])
def test_a_fault_keeps_its_traceback(error: Exception) -> None:
    text, level = told(error)
    assert ("Traceback" in text, "a fault" in text, level) == (True, True, logging.ERROR)


def test_a_log_is_made_plain_once_in_a_process() -> None:
    loggers = [logging.getLogger(name) for name in ("prefect.flow_runs", "prefect.task_runs")]
    before = [list(logger.filters) for logger in loggers]
    try:
        PlainEndings.begin()
        PlainEndings.begin()
        assert [sum(isinstance(each, PlainEndings) for each in logger.filters) for logger in loggers] == [1, 1]
    finally:
        for logger, filters in zip(loggers, before, strict=True):
            logger.filters[:] = filters


def test_a_notebook_shows_the_same_lines_in_place_of_a_traceback() -> None:
    """IPython asks an exception for this method."""
    assert WRONG._render_traceback_() == LINES
    assert Interrupted("stopped by hand", remedy="")._render_traceback_() == ["Interrupted: stopped by hand"]
    with pytest.raises(InternalError) as caught:
        raise InternalError("a fault", remedy="Report it.")
    assert "Traceback" in caught.value._render_traceback_()[0]
