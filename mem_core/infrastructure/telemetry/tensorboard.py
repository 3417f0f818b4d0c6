"""TensorBoard files of a run, written without torch, without a thread and without a file held open.

Records go through tensorboard's own `RecordWriter`. A segment is thinned to POINTS_PER_SEGMENT points that keep the extremes
of loss, gradient norm and memory, so that a run of 1,000,000 steps stays in tens of megabytes.
"""

# Generated protobuf modules make their classes at import, which a type checker cannot see.
# pyright: reportAttributeAccessIssue=false

import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mem_core.domain.results.evaluation import SetFigures
from mem_core.infrastructure.storage.writing import SHARED, open_append
from mem_core.infrastructure.telemetry.metrics import Columns, spike_indices

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

POINTS_PER_SEGMENT = 48
_FILE_NAME = re.compile(r"^events\.out\.tfevents\.(\d+)\.mem$")


class TensorBoardWriter:
    """Appends scalars of committed segments and texts of faults to `<run_folder>/tensorboard`.

    Going back to a step tells TensorBoard to drop what it had beyond it (a `SessionLog.START`) before anything else is written, so that
    redone steps do not appear twice: what is found out beside a save may come before its segment. So does a segment that begins at or
    before a step already written, and the first one where nobody said from where work goes on. Each writer has a file of its own,
    named so that it sorts behind every earlier one. Nothing is kept in memory between calls.
    """

    def __init__(self, run_folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder = run_folder / "tensorboard"
        self._clock = clock
        self._path: Path | None = None
        self._written_step: int | None = None
        self._purge_from: int | None = None
        self._lock = threading.Lock()  # a segment is written by whoever saves it, an evaluation by whoever asked for it

    def rewind(self, step: int) -> None:
        """Work goes on from `step`."""
        self._purge_from, self._written_step = step + 1, step

    def add_segment(self, columns: Columns, memory_limit_bytes: int = 0) -> None:
        """The columns of one committed segment, as they go to `write_segment_metrics`.

        Raises:
            OSError: the folder cannot be written.
        """
        steps = columns["step"]
        if steps.size == 0:
            return
        events: list[Event] = []
        first_step = int(steps[0])
        if self._written_step is None or first_step <= self._written_step:
            events.append(_purge(first_step, self._clock()))
        events.extend(_scalars(columns, memory_limit_bytes, self._clock()))
        self._append(events)
        self._written_step = int(steps[-1])

    def add_evaluation(self, step: int, sets: Mapping[str, SetFigures]) -> None:
        """Figures of held-out rows, by the name of their set.

        Raises:
            OSError: the folder cannot be written.
        """
        values: dict[str, float] = {}
        for name, figures in sets.items():
            values |= {f"evaluation/{name}/loss": figures.loss, f"evaluation/{name}/perplexity": figures.perplexity}
            if figures.token_accuracy is not None:
                values[f"evaluation/{name}/token_accuracy"] = figures.token_accuracy
        self._append([_scalar_event(values, step, self._clock())])

    def add_text(self, tag: str, text: str, step: int) -> None:
        """A fault or another event, as text at a step.

        Raises:
            OSError: the folder cannot be written.
        """
        self.add_texts({tag: text}, step)

    def add_texts(self, texts: Mapping[str, str], step: int) -> None:
        """Texts by their tags, all of them at a step; they are read as Markdown. Raises OSError as above."""
        self._append([_text(tag, text, step, self._clock()) for tag, text in texts.items()])

    def _append(self, events: Iterable["Event"]) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        with self._lock:
            if self._path is None:
                self._path = self._new_path()
            with open_append(self._path, SHARED) as file:
                writer = RecordWriter(file)
                if file.tell() == 0:
                    writer.write(_version(self._clock()).SerializeToString())
                purge = [_purge(self._purge_from, self._clock())] if self._purge_from is not None else []
                for event in (*purge, *events):
                    writer.write(event.SerializeToString())
            self._purge_from = None

    def _new_path(self) -> Path:
        self._folder.mkdir(exist_ok=True)
        stamps = [int(match.group(1)) for path in self._folder.iterdir() if (match := _FILE_NAME.match(path.name))]
        return self._folder / f"events.out.tfevents.{max([int(self._clock()), *(stamp + 1 for stamp in stamps)]):010d}.mem"


def _version(now_s: float) -> "Event":
    from tensorboard.compat.proto.event_pb2 import Event

    return Event(wall_time=now_s, file_version="brain.Event:2")


def _purge(from_step: int, now_s: float) -> "Event":
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    return Event(wall_time=now_s, step=from_step, session_log=SessionLog(status=SessionLog.START))


def _scalar_event(values: Mapping[str, float], step: int, now_s: float) -> "Event":
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items() if not math.isnan(value)])
    return Event(wall_time=now_s, step=step, summary=summary)


def _text(tag: str, text: str, step: int, now_s: float) -> "Event":
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.plugins.text.metadata import create_summary_metadata

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode("utf-8", "replace")], tensor_shape=shape)
    value = Summary.Value(tag=f"{tag}/text_summary", metadata=create_summary_metadata(tag, ""), tensor=tensor)
    return Event(wall_time=now_s, step=step, summary=Summary(value=[value]))


def _scalars(columns: Columns, memory_limit_bytes: int, now_s: float) -> list["Event"]:
    """One event per kept step with every scalar of it; wall times are laid back from now by the time of the steps."""
    series = scalar_series(columns, memory_limit_bytes)
    step_s = columns["step_s"].astype(np.float64)
    walls = now_s - (np.cumsum(step_s[::-1])[::-1] - step_s)
    steps = columns["step"]
    events: list[Event] = []
    for index in kept_rows(columns):
        values = {tag: float(numbers[index]) for tag, numbers in series.items()}
        events.append(_scalar_event(values, int(steps[index]), float(walls[index])))
    return events


def scalar_series(columns: Columns, memory_limit_bytes: int) -> Columns:
    """What is shown of a segment's columns, by tag: a value a step each."""
    seconds = np.maximum(columns["step_s"].astype(np.float64), 1e-9)
    series: Columns = {
        "train/loss": columns["loss"],
        "train/learning_rate": columns["lr"],
        "train/grad_norm": columns["grad_norm"],
        "speed/tokens_per_s": columns["tokens"] / seconds,
        "speed/step_s": seconds,
        "memory/peak_bytes": columns["peak_bytes"],
        "memory/micro_batches": columns["micro_batches"],
    }
    series |= {"train/added_loss": columns["added_loss"]} if "added_loss" in columns else {}
    limit = {"memory/limit_bytes": np.full(seconds.shape, float(memory_limit_bytes))} if memory_limit_bytes else {}
    return {**series, **limit}


def kept_rows(columns: Columns) -> list[int]:
    """Positions to write: evenly spread ones, the ends, and the extremes of what can spike."""
    num_rows = columns["step"].size
    if num_rows <= POINTS_PER_SEGMENT:
        return list(range(num_rows))
    even = np.linspace(0, num_rows - 1, POINTS_PER_SEGMENT // 2).astype(np.int64)
    spiky = [spike_indices(columns[name].astype(np.float64), POINTS_PER_SEGMENT // 6) for name in ("loss", "grad_norm", "peak_bytes")]
    return [int(index) for index in np.unique(np.concatenate([even, *spiky]))]
