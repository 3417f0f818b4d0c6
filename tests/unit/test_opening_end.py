"""An attempt that ends while the run is being opened has its ending in the journal, so that the next start counts no kill."""

from pathlib import Path
from typing import Any, cast

import pytest

from mem_core import bootstrap
from mem_core.core.policy.local_policy_engine import LocalPolicyEngine
from mem_core.core.run.fold import fold_result
from mem_core.core.run.state_manager import StateManager, read_journal
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.errors import DataError, RunHeld
from mem_core.domain.events import RunEnded
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.infrastructure.settings import Settings
from mem_core.runtime.session.opening.stages import Examined, Held, RunOrder, close_stage

BAD_ROWS = DataError("2 bad rows", field="data.train", remedy="Repair the rows")


class NoServer:
    """Stands where a fork server stands; nothing is forked before the run is prepared."""

    closed = False

    def close(self) -> None:
        self.closed = True


def examined(root: Path) -> Examined:
    settings = Settings.from_environment({"MEM_HOME": str(root / "home")})
    order = RunOrder(RuntimeRequest(run_id="run", store=str(root), device="cpu"), settings)
    return Examined(order, cast("EnvironmentReport", None), LocalPolicyEngine(), None)


def held(root: Path) -> Held:
    stage = examined(root)
    state = StateManager.acquire(root, "run")
    state.start_attempt(None)
    return Held(stage, stage.order.request, state, cast("Any", NoServer()), None)


def result(root: Path) -> RunResult:
    return fold_result(read_journal(root / "run" / "journal"))


def test_bad_rows_before_the_first_step_are_an_ending_and_no_kill(tmp_path: Path) -> None:
    stage = held(tmp_path)
    close_stage(stage, BAD_ROWS)
    assert cast("Any", stage.server).closed
    ended = result(tmp_path)
    assert (ended.status, ended.exit_code, ended.message) == ("failed", 66, str(BAD_ROWS))
    assert ended.goodput.seconds.get("start", 0) > 0
    close_stage(held(tmp_path), KeyboardInterrupt())
    again = result(tmp_path)
    assert (again.status, again.exit_code, again.restarts, again.faults) == ("interrupted", 75, 0, ())


def test_an_attempt_that_was_refused_before_it_began_leaves_the_history_alone(tmp_path: Path) -> None:
    """A run that somebody holds keeps its record, and what the refused start had taken is given back."""
    close_stage(held(tmp_path), BAD_ROWS)
    holder = StateManager.acquire(tmp_path, "run")
    stage = examined(tmp_path)
    with pytest.raises(RunHeld):
        bootstrap.acquire(stage)
    close_stage(stage, RunHeld("held", remedy="Wait"))
    endings = [line.event for line in read_journal(tmp_path / "run" / "journal") if isinstance(line.event, RunEnded)]
    assert [ending.exit_code for ending in endings] == [66]
    assert holder.fenced_by() is None
    holder.release()
