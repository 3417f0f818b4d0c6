"""The drill's check of the goodput ledger: what was booked against the time of day, the time before the first line included."""

import pytest

from mem_core.domain.events import AttemptStarted, Event, JournalLine, TimeSpent
from mem_core.runtime.chaos.drill.drill import ledger_began_unix_s

STARTED = AttemptStarted(attempt=1, pid=1, host="h")


def line(time_unix_s: float, event: Event, attempt: int = 1) -> JournalLine:
    return JournalLine(sequence=0, time_unix_s=time_unix_s, attempt=attempt, previous_sha256="", event=event)


@pytest.mark.parametrize(
    ("lines", "began_s"),
    [
        ([line(100, STARTED), line(110, TimeSpent(seconds={"start": 12.5, "productive": 4.5}))], 93.0),
        ([line(100, STARTED), line(110, TimeSpent(seconds={"productive": 10.0}))], 100.0),
        ([line(100, STARTED), line(110, TimeSpent(seconds={"productive": 3.0}))], 100.0),  # booked too little: the check shall see it
        ([line(100, STARTED), line(150, STARTED, 2), line(160, TimeSpent(seconds={"start": 30.0}), 2)], 100.0),  # killed too early to tell
    ],
)
def test_the_first_ledger_began_before_its_first_line(lines: list[JournalLine], began_s: float) -> None:
    """By as much as the first process booked more than the time since that line."""
    assert ledger_began_unix_s(lines) == began_s
