"""How an attempt ends: processes first, then the journal, report and result, then the run is given back."""

from dataclasses import dataclass

from mem_core.core.run.fold import fold_result
from mem_core.core.run.run_report import write_report
from mem_core.domain.errors import InternalError, Interrupted, MemError
from mem_core.domain.events import Noted, RunEnded
from mem_core.domain.run import RunResult
from mem_core.infrastructure.storage.whole_file import write_atomically
from mem_core.infrastructure.telemetry.live import remove_live
from mem_core.infrastructure.telemetry.report_page import REPORT_NAME
from mem_core.runtime.proof.validator_process import ValidatorProcess
from mem_core.runtime.ranks.port import Ranks
from mem_core.runtime.session.attempt import Attempt
from mem_core.runtime.session.remote_service import RemoteService
from mem_core.runtime.session.segment_service import SegmentService

_LONGEST_TEXT = 1_000


@dataclass
class Ending:
    """What there is to be ended, in order."""

    attempt: Attempt
    segments: SegmentService
    validator: ValidatorProcess
    ranks: Ranks
    remote: RemoteService | None
    closed: bool = False

    def close(self, error: BaseException | None) -> RunResult:
        """End workers, journal the ending, write report and result, give the run back. Leaves no process behind (I10)."""
        if not self.closed:
            self.closed = True
            self.segments.close()
            self.validator.close()
            self.ranks.close()
            self.segments.watch.logs.remove_empty()
            remove_live(self.attempt.state.folder)
            self.segments.checkpoints.manager.close()
            self._tell_loggers(error)
            if self.remote is not None:
                self.remote.finish()  # before the ending is written, which says how far the copies are
            self._journal(error)
            if self.remote is not None and not self.remote.close():
                self.attempt.progress.note(
                    "the remote store has not everything; it is in the local run folder and is sent with the next start"
                )
            self.attempt.state.release()
            self.attempt.progress.close()
        return self.result()

    def _tell_loggers(self, error: BaseException | None) -> None:
        """Before the ending is written, which must not come to stand before what they say."""
        result, ended = self.result(), ended_by(error)
        texts = {
            "mem.status": ended.status,
            "mem.message": ended.message[:_LONGEST_TEXT],
            "mem.steps": str(result.applied_steps),
            "mem.trajectory_digest": result.trajectory_digest,
            "mem.weights_digest": result.weights_digest,
        }
        self.segments.checkpoints.results.end(ended.status, {name: text for name, text in texts.items() if text})

    def _journal(self, error: BaseException | None) -> None:
        state = self.attempt.state
        try:
            state.fence()
            state.emit(self.attempt.ledger.drain())
            state.emit(ended_by(error, self._behind()))
            self._write_outputs()
        except MemError as exc:
            self.attempt.progress.note(f"the ending could not be recorded: {exc}")

    def _behind(self) -> str:
        """What people should know of a run that completed and has no remote copy of its end; empty where it has, or where none is asked."""
        mirror = fold_result(self.attempt.state.lines()).mirror if self.remote is not None else None
        if mirror is None or not mirror.behind:
            return ""
        steps = ", ".join(map(str, mirror.missing_steps))
        words = f"{mirror}: {mirror.url} lacks step {steps}; all of it is in the local run folder, and the same command sends it"
        self.attempt.progress.note(words)
        return words

    def _write_outputs(self) -> None:
        folder = self.attempt.state.folder
        try:
            write_report(folder)
        except Exception as exc:  # noqa: BLE001 - telemetry never decides how a run ends
            self.attempt.state.emit(Noted(text=f"the report could not be written: {type(exc).__name__}: {exc}"))
        write_atomically(folder / "result.json", self.result().model_dump_json(indent=2))

    def result(self) -> RunResult:
        """How the run stands, folded from the journal."""
        folder = self.attempt.state.folder
        report = folder / REPORT_NAME
        return fold_result(self.attempt.state.lines()).model_copy(
            update={
                "run_id": self.attempt.request.run_id,
                "device": self.attempt.environment.device,
                "report_url": report.absolute().as_uri() if report.exists() else "",
                "run_folder": str(folder.absolute()),
            }
        )


def ended_by(error: BaseException | None, remark: str = "") -> RunEnded:
    """What the journal says of an attempt that ended with `error`; None: it completed, with a `remark` where there is one."""
    if error is None:
        return RunEnded(status="completed", exit_code=0, message=remark)
    if isinstance(error, MemError):
        interrupted = error.exit_code == Interrupted.exit_code
        return RunEnded(status="interrupted" if interrupted else "failed", exit_code=error.exit_code, message=str(error))
    message = f"{type(error).__name__}: {error}"
    if not isinstance(error, Exception):
        return RunEnded(status="interrupted", exit_code=Interrupted.exit_code, message=message)
    return RunEnded(status="failed", exit_code=InternalError.exit_code, message=message)
