"""One part of a run trained again: fresh processes restore its beginning and go to its end as the run went there."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mem_core.core.audit.course import Course
from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.events import MemoryPlanChanged, Noted, OomAbsorbed
from mem_core.domain.segment import describe_failure
from mem_core.infrastructure.telemetry.metrics import Columns
from mem_core.runtime.ranks.port import GroupFailed, Heartbeat, RankGroup, Ranks, Watch
from mem_core.runtime.ranks.worker.protocol import SegmentDone, Train, WorkerSpec

SAVE_DEADLINE_S = 1_800.0
TOLD_EVERY_S = 30.0


class NotRedone(Exception):
    """This machine could not train it again. Says nothing about the run."""


@dataclass(frozen=True)
class Beginning:
    """`folder` of a checkpoint, or None for fresh weights, and the position with every plan that the run recorded."""

    folder: Path | None
    position: TrainingPosition


@dataclass(frozen=True)
class Redone:
    """What training again came to. The checkpoint at its end lies in the staging folder that was given."""

    position: TrainingPosition
    columns: Columns
    weights_digest: str


def train_again(ranks: Ranks, spec: WorkerSpec, beginning: Beginning, course: Course, staging: Path, say: Callable[[str], None]) -> Redone:
    """Follow `course` from `beginning` in fresh processes of `spec`'s shape, then save into `staging`. The processes are gone afterwards.

    Raises:
        NotRedone: a process failed, memory did not suffice for the recorded plans, or the end could not be written.
    """
    recorded: list[MemoryPlanChanged | OomAbsorbed | Noted] = []
    group = ranks.start(spec, Watch(purpose="replay", on_record=recorded.extend))
    try:
        return _followed(group, beginning, course, staging, recorded, say)
    except GroupFailed as exc:
        raise NotRedone(describe_failure(exc.failure)) from exc
    finally:
        group.stop()


def _followed(
    group: RankGroup, beginning: Beginning, course: Course, staging: Path, recorded: list[Any], say: Callable[[str], None]
) -> Redone:
    # Every batch of it was done before: memory changes no plan of its own accord (`replay_until`).
    group.restore(str(beginning.folder) if beginning.folder is not None else None, beginning.position, course.end_batch)
    last = course.pieces[-1]
    told, done, columns = _Told(say), None, list[Columns]()
    for piece in course.pieces:
        order = Train(piece.until_step, piece.hyperparams, str(staging) if piece is last else None, skip_batches=course.left_out)
        done = group.train(order, told.on_beat, lambda: False)
        columns.append(done.columns)
        _refuse_other_course(done, piece.until_step, recorded)
    assert done is not None
    return Redone(done.position, joined(columns), _saved_digest(group, last.until_step))


def _refuse_other_course(done: SegmentDone, until_step: int, recorded: list[Any]) -> None:
    """A batch that did not fit here was split otherwise than in the run, which gives other bits and is no fault of the run."""
    if any(isinstance(event, MemoryPlanChanged | OomAbsorbed) for event in recorded):
        raise NotRedone("memory did not suffice here for the micro-batches that the run recorded")
    if done.position.applied_steps < until_step:
        raise NotRedone(f"it ended at step {done.position.applied_steps}: {done.replace_reason or 'it was told to stop'}")


def _saved_digest(group: RankGroup, step: int) -> str:
    try:
        replies = group.wait_saved(step, SAVE_DEADLINE_S)
    except TimeoutError as exc:
        raise NotRedone(str(exc)) from exc
    failed = [reply.error for reply in replies if reply.error]
    if failed:
        raise NotRedone(f"its end could not be written: {failed[0]}")
    return next((reply.weights_digest for reply in replies if reply.weights_digest), "")


def joined(parts: list[Columns]) -> Columns:
    """Columns of several pieces as those of one; what some of them lack is left out."""
    names = set(parts[0]).intersection(*parts)
    return {name: np.concatenate([part[name] for part in parts]) for name in sorted(names)}


@dataclass
class _Told:
    """Says now and then how far it is."""

    say: Callable[[str], None]
    last_s: float = 0.0

    def on_beat(self, beats: list[Heartbeat]) -> None:
        now_s = time.monotonic()
        self.last_s = self.last_s or now_s
        if beats and now_s - self.last_s >= TOLD_EVERY_S:
            self.last_s = now_s
            self.say(f"at step {beats[0].applied_steps:,}")
