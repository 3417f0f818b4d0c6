"""An attempt that ends while the run is being opened has its ending in the journal, so that the next start counts no kill."""

from pathlib import Path

from mem_core.bootstrap import draft_run
from mem_core.core.run.fold import fold_result
from mem_core.core.run.state_manager import StateManager, read_journal
from mem_core.domain.errors import DataError, RequestError
from mem_core.domain.events import RunEnded
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.infrastructure.settings import Settings
from mem_core.runtime.session.opening import RunDraft

BAD_ROWS = DataError("2 bad rows", field="data.train", remedy="Repair the rows")


def draft(root: Path, *, started: bool = True) -> RunDraft:
    settings = Settings.from_environment({"MEM_HOME": str(root / "home")})
    made = draft_run(RuntimeRequest(run_id="run", store=str(root), device="cpu"), settings=settings)
    made.state = StateManager.acquire(root, "run")
    if started:
        made.state.start_attempt(None)
    return made


def result(root: Path) -> RunResult:
    return fold_result(read_journal(root / "run" / "journal"))


def test_bad_rows_before_the_first_step_are_an_ending_and_no_kill(tmp_path: Path) -> None:
    draft(tmp_path).close(BAD_ROWS)
    ended = result(tmp_path)
    assert (ended.status, ended.exit_code, ended.message) == ("failed", 66, str(BAD_ROWS))
    assert ended.goodput.seconds.get("start", 0) > 0
    draft(tmp_path).close(KeyboardInterrupt())
    again = result(tmp_path)
    assert (again.status, again.exit_code, again.restarts, again.faults) == ("interrupted", 75, 0, ())


def test_an_attempt_that_was_refused_before_it_began_leaves_the_history_alone(tmp_path: Path) -> None:
    """A run that is complete stays complete, whoever asks for other values under its name."""
    draft(tmp_path).close(BAD_ROWS)
    draft(tmp_path, started=False).close(RequestError("born with other values", remedy="Use another run_id"))
    endings = [line.event for line in read_journal(tmp_path / "run" / "journal") if isinstance(line.event, RunEnded)]
    assert [ending.exit_code for ending in endings] == [66]
