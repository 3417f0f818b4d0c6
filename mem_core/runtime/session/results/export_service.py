"""The natural end of a run on a model folder: its weights as a model folder again, made beside the driver and never fatal to the run."""

import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from mem_core.domain.checkpoint import checkpoint_name
from mem_core.domain.errors import EnvironmentUnfit, InternalError, MemError
from mem_core.domain.events import Exported
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.results.exports import EXPORT_FOLDER, MARK_NAME, ExportMark, ExportOrder, ExportSummary
from mem_core.infrastructure.storage.reading import RECORD_LIMIT_BYTES, read_regular_text
from mem_core.runtime.models.folders import is_preset
from mem_core.runtime.ranks.port import Helpers
from mem_core.runtime.session.attempt import Attempt

ENTRY = "mem_core.runtime.deepspeed.programs.export:export_main"
START_LIMIT_S = 300.0
BYTES_PER_S = 10e6  # slower than any disk that training should use, read, merge and write together
POLL_S = 0.5


def is_wanted(request: RuntimeRequest) -> bool:
    """Whether the run ends with a model folder: `auto` means where it began with one."""
    return request.checkpoint.export == "auto" and not is_preset(request.model.source)


def standing_export(run_folder: Path, step: int, weights_digest: str) -> ExportMark | None:
    """The mark of the export of just these weights, every file of it there; None where it is to be made (again)."""
    return standing_in(run_folder / EXPORT_FOLDER, step, weights_digest)


def standing_in(folder: Path, step: int, weights_digest: str) -> ExportMark | None:
    """The same for any folder that an export may have been made in."""
    try:
        mark = ExportMark.model_validate_json(read_regular_text(folder / MARK_NAME, RECORD_LIMIT_BYTES))
        whole = all(os.path.getsize(folder / name) == size for name, size in mark.files.items())
    except (OSError, ValueError):
        return None
    return mark if whole and (mark.step, mark.weights_digest) == (step, weights_digest) else None


@dataclass
class ExportService:
    """One for an attempt. `key` is the manifest key; `cache_dir` where a model from a URL lies."""

    attempt: Attempt
    helpers: Helpers
    cache_dir: Path
    key: str = ""

    def export(self, step: int, weights_digest: str) -> None:
        """Make `<run>/export` of the checkpoint of `step`, unless it stands there. What goes wrong is said and journaled, and no more."""
        folder = self.attempt.state.folder
        if not is_wanted(self.attempt.request) or standing_export(folder, step, weights_digest) is not None:
            return
        output = str((folder / EXPORT_FOLDER).absolute())
        self.attempt.progress.note(f"writing the model to {output}")
        try:
            mark = self._made(self._order(step, output))
            summary = ExportSummary(step=step, folder=output, dtype=mark.dtype, weights_digest=mark.weights_digest)
            words = f"the model of step {step:,} is in {output} ({mark.dtype}); transformers loads it"
        except (MemError, EOFError, OSError, TimeoutError) as exc:
            problem = str(exc) or type(exc).__name__
            summary = ExportSummary(step=step, problem=problem[:500])
            words = f"no export: {problem}; training is complete, and `mem export` or the same command makes it"
        self.attempt.state.emit(Exported(summary=summary))
        self.attempt.progress.note(words)

    def _order(self, step: int, output: str) -> ExportOrder:
        folder = self.attempt.state.folder.absolute()
        checkpoint = folder / "checkpoints" / checkpoint_name(step)
        return ExportOrder(
            checkpoint=str(checkpoint), run_folder=str(folder), output=output, cache_dir=str(self.cache_dir.absolute()), key=self.key
        )

    def _made(self, order: ExportOrder) -> ExportMark:
        """Raises MemError in the process's own words, EOFError where it died, TimeoutError where it did not come to an end."""
        size_bytes = sum(path.stat().st_size for path in Path(order.checkpoint).rglob("*") if path.is_file())
        child = self.helpers.fork(ENTRY, "export.log")
        try:
            child.wait_forked(START_LIMIT_S)
            child.connection.send(order.model_dump_json())
            end = time.monotonic() + START_LIMIT_S + size_bytes / BYTES_PER_S
            while not child.connection.poll(POLL_S):
                if self.attempt.stop:
                    raise EnvironmentUnfit(f"stopped by {self.attempt.stop.by}", remedy="The same command makes it.")
                if time.monotonic() > end:
                    raise TimeoutError("the exporting process did not come to an end; read logs/export.log")
            answer = child.connection.recv()
        finally:
            with contextlib.suppress(OSError):
                child.signal_group(signal.SIGKILL)
            child.close()
        if isinstance(answer, MemError):
            raise answer
        try:
            return ExportMark.model_validate(json.loads(answer))
        except (TypeError, ValueError) as exc:
            raise InternalError("the exporting process answered what nobody asked", remedy="Report this as a bug.") from exc
