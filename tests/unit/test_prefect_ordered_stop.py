"""A cancel that somebody ordered takes one line of the log; every other error keeps its traceback."""

import logging
import sys

import pytest
from prefect.exceptions import CancelledRun

from flows.mem_flow import OrderedStops


def record_of(error: Exception) -> logging.LogRecord:
    try:
        raise error
    except type(error):
        return logging.LogRecord("prefect.flow_runs", logging.ERROR, __file__, 1, "Engine execution exited", (), sys.exc_info())


@pytest.mark.parametrize(("error", "plain"), [(CancelledRun("stopped by SIGTERM"), True), (ValueError("a fault"), False)])
def test_only_an_ordered_stop_is_said_in_one_line(error: Exception, plain: bool) -> None:
    record = record_of(error)
    assert OrderedStops().filter(record)
    text = logging.Formatter().format(record)
    assert ("Traceback" not in text) is plain
    assert ("cancelled as asked: stopped by SIGTERM" in text) is plain
    assert (record.levelno == logging.INFO) is plain


def test_it_is_told_so_once_in_a_process() -> None:
    logger = logging.getLogger("prefect.flow_runs")
    before = list(logger.filters)
    try:
        OrderedStops.tell_in_one_line()
        OrderedStops.tell_in_one_line()
        assert sum(isinstance(each, OrderedStops) for each in logger.filters) == 1
    finally:
        logger.filters[:] = before
