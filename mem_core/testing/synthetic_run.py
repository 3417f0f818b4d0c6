"""Journals made by hand: `JournalBuilder` writes lines with a clock of its own, chained as the real journal is."""

import hashlib
from pathlib import Path

from mem_core.domain.checkpoint import CheckpointVerdict
from mem_core.domain.events import (
    AttemptStarted,
    CheckpointCommitted,
    CheckpointJudged,
    Event,
    JournalLine,
    RunEnded,
    SegmentEnded,
    SegmentStarted,
    TimeSpent,
)
from mem_core.domain.segment import SegmentCompleted


class JournalBuilder:
    """Appends events at chosen moments; `lines` is the journal so far."""

    def __init__(self, start_unix_s: float = 1_700_000_000.0) -> None:
        self.now_s = start_unix_s
        self.attempt = 0
        self.lines: list[JournalLine] = []
        self._previous_sha256 = "0" * 64

    def add(self, *events: Event, after_s: float = 0.0) -> "JournalBuilder":
        """Append events `after_s` seconds after the line before."""
        for event in events:
            self.now_s += after_s
            if isinstance(event, AttemptStarted):
                self.attempt = event.attempt
            line = JournalLine(
                sequence=len(self.lines),
                time_unix_s=self.now_s,
                attempt=self.attempt,
                previous_sha256=self._previous_sha256,
                event=event,
            )
            self._previous_sha256 = hashlib.sha256(line.model_dump_json().encode()).hexdigest()
            self.lines.append(line)
        return self

    def start(self, resumed_step: int | None = None, after_s: float = 0.0) -> "JournalBuilder":
        """The next attempt takes over."""
        return self.add(AttemptStarted(attempt=self.attempt + 1, pid=1, host="node", resumed_step=resumed_step), after_s=after_s)

    def segment(self, index: int, from_step: int, to_step: int, *, duration_s: float = 10.0, skipped: int = 0) -> "JournalBuilder":
        """A segment that went well, 8 tokens a step, committed and validated."""
        self.add(SegmentStarted(segment_index=index, from_step=from_step, until_step=to_step))
        outcome = SegmentCompleted(
            from_step=from_step,
            to_step=to_step,
            batch_index=to_step + skipped,
            skipped_steps=skipped,
            loss_first=5.0 - from_step / 1000,
            loss_last=5.0 - to_step / 1000,
            tokens=8 * (to_step - from_step),
            duration_s=duration_s,
            peak_bytes=1000 + to_step,
            trajectory_digest=f"t{to_step}",
            weights_digest=f"w{to_step}",
        )
        self.add(SegmentEnded(segment_index=index, outcome=outcome), after_s=duration_s)
        return self.add(TimeSpent(seconds={"productive": duration_s})).commit(to_step).judge(to_step)

    def commit(self, step: int) -> "JournalBuilder":
        """A checkpoint is durable."""
        commit = CheckpointCommitted(step=step, size_bytes=1 << 20, duration_s=0.1, weights_digest=f"w{step}", trajectory_digest=f"t{step}")
        return self.add(commit)

    def judge(self, step: int, *, valid: bool = True, manifest: str = "") -> "JournalBuilder":
        """A verdict on it."""
        reasons = () if valid else ("sha256 of model.pt differs",)
        verdict = CheckpointVerdict(
            step=step, level="integrity", valid=valid, reasons=reasons, weights_bad=False, manifest_sha256=manifest or f"m{step}"
        )
        return self.add(CheckpointJudged(verdict=verdict))

    def end(self, status: str = "completed", exit_code: int = 0, message: str = "") -> "JournalBuilder":
        """An orderly end."""
        return self.add(RunEnded.model_validate({"status": status, "exit_code": exit_code, "message": message}))

    def write(self, journal_folder: Path) -> Path:
        """The journal as files, one per attempt."""
        journal_folder.mkdir(parents=True, exist_ok=True)
        texts: dict[int, list[str]] = {}
        for line in self.lines:
            texts.setdefault(line.attempt, []).append(line.model_dump_json() + "\n")
        for attempt, rows in texts.items():
            (journal_folder / f"attempt-{attempt:04d}.jsonl").write_text("".join(rows), encoding="utf-8")
        return journal_folder
