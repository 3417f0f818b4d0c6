"""From a snapshot on its way to disk to a published verdict: the part of a segment that runs while the next one trains."""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mem_core.domain.checkpoint import CheckpointDraft, CheckpointVerdict, TrainingPosition
from mem_core.domain.errors import NoValidCheckpoint, StoreUnavailable
from mem_core.domain.events import Evaluated
from mem_core.runtime.checkpoint_manager.manager import CheckpointManager
from mem_core.runtime.ranks.port import GroupFailed, RankGroup
from mem_core.runtime.ranks.worker.protocol import SegmentDone
from mem_core.runtime.session.results.result_log import ResultLog, files_alone

SAVE_DEADLINE_S = 1_800.0


@dataclass(frozen=True)
class BornWith:
    """What every manifest of a run names beside its position: the versions at work, and the data that it was born with."""

    versions: dict[str, str]
    data_fingerprint: str


@dataclass(frozen=True)
class ResumePoint:
    """Where work goes on: a proven checkpoint's folder and position; no folder where there is none yet."""

    folder: Path | None
    position: TrainingPosition
    weights_digest: str = ""


@dataclass(frozen=True)
class PendingSave:
    """A segment whose snapshot is being written."""

    step: int
    staging: Path
    group: RankGroup
    done: SegmentDone
    born_with: BornWith
    parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class SaveResult:
    """What became of it: a verdict, or why there is none. `store_error` is set where the disk was the reason."""

    step: int
    verdict: CheckpointVerdict | None = None
    problem: str = ""
    store_error: StoreUnavailable | None = None

    @property
    def valid(self) -> bool:
        """Whether this step is a resume point now."""
        return self.verdict is not None and self.verdict.valid


class CheckpointService:
    """Commits, judges and rotates one save at a time."""

    def __init__(
        self,
        manager: CheckpointManager,
        run_folder: Path,
        memory_limit_bytes: int,
        on_valid: Callable[[int, Path], None] = lambda step, folder: None,
        bring_back: Callable[[], bool] = lambda: False,
        on_resumed: Callable[[int, Path], None] = lambda step, folder: None,
        results: ResultLog | None = None,
    ) -> None:
        """`on_valid` is told of each validated step and its folder, before rotation: the mirror. `bring_back` fetches what that has;
        `on_resumed` is told what was read again and proven, for a mirror that lacks it. `results`: who takes the figures;
        default the run's own files."""
        self.manager = manager
        self._on_resumed = on_resumed
        self._on_valid = on_valid
        self._bring_back = bring_back
        self._memory_limit_bytes = memory_limit_bytes
        self.results = results or files_alone(run_folder, manager.note)
        self._pending: dict[int, PendingSave] = {}
        self._busy = threading.Lock()

    def resume(self, fresh: TrainingPosition, ever_validated: Callable[[], bool], leave_out: Collection[int] = ()) -> ResumePoint:
        """See `resume_position`; where this disk has lost everything that was proven, the mirror is asked before the run ends."""
        try:
            point = resume_position(self.manager, fresh, ever_validated, leave_out)
        except NoValidCheckpoint as exc:
            if not self._bring_back():
                raise
            self.manager.note(f"going on from the mirror's copy: {exc}")
            point = resume_position(self.manager, fresh, ever_validated, leave_out)
        if point.folder is not None:
            self._on_resumed(point.position.applied_steps, point.folder)
        return point

    def stage(self, step: int, expected_bytes: int = 0) -> Path:
        """A folder for the ranks' files of `step`. Raises StoreUnavailable, RunHeld."""
        return self.manager.new_staging(step, expected_bytes)

    def register(self, save: PendingSave) -> None:
        """Remember a save so that `complete` finds it by its step."""
        self._pending[save.step] = save

    def pending_steps(self) -> tuple[int, ...]:
        """Saves that are not judged yet."""
        return tuple(self._pending)

    def complete(self, step: int) -> SaveResult:
        """Wait for the ranks' files, commit, judge, write metrics, rotate. Called from a thread beside training.

        Raises:
            RunHeld: a newer attempt has taken over. Everything else becomes part of the result.
        """
        with self._busy:
            save = self._pending.get(step)
            if save is None:
                return SaveResult(step, problem="its save was given up")
            try:
                return self._complete(save)
            finally:
                del self._pending[step]

    def write_evaluations(self, evaluations: Sequence[Evaluated]) -> None:
        """Every evaluation that counts, ascending by step."""
        self.results.evaluations(evaluations)

    def wait_idle(self) -> None:
        """Return when no save is being completed: recovery must not race with a verdict."""
        with self._busy:
            return

    def wait_judged(self, deadline_s: float = SAVE_DEADLINE_S) -> None:
        """Return when no registered save waits for its verdict, or after the deadline. Another thread completes them."""
        end = time.monotonic() + deadline_s
        while self._pending and time.monotonic() < end:
            time.sleep(0.02)

    def _complete(self, save: PendingSave) -> SaveResult:
        problem = self._await_files(save)
        if problem:
            self.manager.discard(save.staging)
            return SaveResult(save.step, problem=problem[0], store_error=problem[1])
        try:
            self.manager.commit(save.step, save.staging, self._draft(save))
            self._write_metrics(save)
            verdict = self.manager.validate(save.step)
            if verdict.valid:
                self._on_valid(save.step, self.manager.path_of(save.step))
                self.manager.rotate()
        except StoreUnavailable as exc:
            self.manager.discard(save.staging)
            return SaveResult(save.step, problem=str(exc), store_error=exc)
        return SaveResult(save.step, verdict)

    def _await_files(self, save: PendingSave) -> tuple[str, StoreUnavailable | None] | None:
        try:
            replies = save.group.wait_saved(save.step, SAVE_DEADLINE_S)
        except GroupFailed:
            return "the workers ended before its files were written", None
        except TimeoutError as exc:
            return str(exc), None
        self._digest = next((reply.weights_digest for reply in replies if reply.weights_digest), "")
        failed = [reply for reply in replies if reply.error]
        if not failed:
            return None
        text = failed[0].error
        error = (
            StoreUnavailable(f"the checkpoint of step {save.step} could not be written: {text}", remedy="Free space.")
            if failed[0].errno
            else None
        )
        return text, error

    def _draft(self, save: PendingSave) -> CheckpointDraft:
        return CheckpointDraft(
            position=save.done.position,
            weights_digest=self._digest,
            parameters=save.parameters,
            versions=save.born_with.versions,
            data_fingerprint=save.born_with.data_fingerprint,
        )

    def _write_metrics(self, save: PendingSave) -> None:
        """Telemetry never stops training: what cannot be written is noted."""
        if save.done.columns and len(save.done.columns["step"]):
            self.results.segment(save.step, save.done.columns, self._memory_limit_bytes)


def resume_position(
    manager: CheckpointManager, fresh: TrainingPosition, ever_validated: Callable[[], bool] = lambda: True, leave_out: Collection[int] = ()
) -> ResumePoint:
    """The newest proven checkpoint; `fresh` and no folder where there is none yet. Steps to `leave_out` are passed over.

    A run whose first checkpoint was damaged before it was ever proven has lost nothing that anybody could rely on: it starts again
    at 0, and says so. Once a checkpoint has been proven, having none is an error and never a silent start at 0.

    Raises:
        NoValidCheckpoint: some were proven in this run's life and none is valid any more.
    """
    try:
        manifest = manager.newest_valid(leave_out=leave_out)
    except NoValidCheckpoint as exc:
        if ever_validated():
            raise
        manager.note(f"no checkpoint of this run was ever proven, so nothing is lost by starting again at step 0: {exc}")
        return ResumePoint(None, fresh)
    if manifest is None:
        if ever_validated():
            raise NoValidCheckpoint(
                "checkpoints of this run were proven and none lies in its checkpoints folder any more (a link counts as none)",
                remedy="Put the folder back, bring one from a mirror, or start another run_id to train from step 0.",
            )
        return ResumePoint(None, fresh)
    return ResumePoint(manager.path_of(manifest.step), manifest.position, manifest.weights_digest)
