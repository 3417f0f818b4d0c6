"""The values around one try of a segment: how it was left, what it came to."""

from dataclasses import replace
from typing import Any

from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.segment import SegmentCompleted, SegmentFailure, describe_failure
from mem_core.infrastructure.telemetry.progress import ProgressView
from mem_core.runtime.ranks.port import Heartbeat
from mem_core.runtime.ranks.worker.protocol import SegmentDone


class SegmentFailed(Exception):
    """A try of a segment failed; the workers are gone and the next try restores the last validated step."""

    def __init__(self, failure: SegmentFailure) -> None:
        super().__init__(describe_failure(failure))
        self.failure = failure


def already_there(position: TrainingPosition) -> SegmentCompleted:
    """A retry found that the checkpoint was proven after all: nothing is to be done again."""
    return SegmentCompleted(
        from_step=position.applied_steps, to_step=position.applied_steps, batch_index=position.batch_index, loss_first=0.0,
        loss_last=0.0, tokens=0, duration_s=0.0, trajectory_digest=position.trajectory_digest,
    )  # fmt: skip


def completed(before: TrainingPosition, done: SegmentDone) -> SegmentCompleted:
    """What a segment came to, from where it started and what rank 0 reports."""
    losses = done.columns["loss"]
    return SegmentCompleted(
        from_step=before.applied_steps,
        to_step=done.position.applied_steps,
        batch_index=done.position.batch_index,
        skipped_steps=len(done.position.skipped_batches) - len(before.skipped_batches),
        loss_first=float(losses[0]) if len(losses) else 0.0,
        loss_last=float(losses[-1]) if len(losses) else 0.0,
        tokens=done.position.tokens - before.tokens,
        duration_s=done.duration_s,
        peak_bytes=int(done.columns["peak_bytes"].max()) if len(losses) else 0,
        trajectory_digest=done.position.trajectory_digest,
    )


def _momentary_tokens_per_s(beat: Heartbeat) -> float | None:
    """Of the last step, from the mean tokens of a batch; None before the first."""
    return beat.tokens / beat.batch_index / beat.step_s if beat.batch_index and beat.step_s > 0 else None


def progress_view(beats: list[Heartbeat], tokens_per_s: float | None, **run: Any) -> ProgressView:
    """What people see of the newest beats (rank 0 first), with what only the run knows: totals, limits, restarts.

    `tokens_per_s`: over the last minute; None as long as it is not known, when the last step's has to do.
    """
    beat = beats[0]
    stepping = beat.step_s > 0
    return ProgressView(
        step=beat.applied_steps,
        loss=beat.loss if stepping else None,
        learning_rate=beat.learning_rate if stepping else None,
        tokens_per_s=tokens_per_s or _momentary_tokens_per_s(beat),
        memory_bytes=sum(each.memory_bytes for each in beats) or None,
        phase=beat.phase,
        **run,
    )


def with_last_step(beats: list[Heartbeat], done: SegmentDone) -> list[Heartbeat]:
    """`beats` with the numbers of the segment's last step for rank 0: its own last beat may be of the save that followed."""
    if not len(done.columns["loss"]):
        return beats
    last = {name: float(done.columns[column][-1]) for name, column in (("loss", "loss"), ("learning_rate", "lr"), ("step_s", "step_s"))}
    position = done.position
    counts = {"applied_steps": position.applied_steps, "batch_index": position.batch_index, "tokens": position.tokens}
    return [replace(beats[0], **counts, **last), *beats[1:]]
