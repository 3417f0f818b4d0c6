"""Runs in a notebook cell: a live line while they train, a result with pictures at the end. No widgets are needed."""

import contextlib
import html
import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.commands.inspection.finished import complete_words
from flows.prefect_view.curves import Curve, curve_svg
from mem_core.domain.run import RunResult
from mem_core.infrastructure.telemetry.metrics import read_metrics
from mem_core.infrastructure.telemetry.notebook import result_html
from mem_core.infrastructure.telemetry.progress import ProgressView, View, describe, fraction
from tasks.running import DRIVEN, Surroundings

REDRAW_S = 0.5
NUM_NOTES = 8
NUM_SAMPLES = 2_000


class ShownResult(RunResult):
    """A RunResult that a notebook shows with its table and curves."""

    def _repr_html_(self) -> str:
        return result_html(self) + "".join(_pictures(Path(self.run_folder)) if self.run_folder else ())


def _pictures(folder: Path) -> list[str]:
    try:
        columns = read_metrics(folder / "metrics")
    except (OSError, ValueError, KeyError):
        return []
    steps = columns["step"]
    wanted = (("loss", "Loss", "#2563b0", 1.0, ""), ("peak_bytes", "Peak memory of a step", "#2f8f5b", 2.0**20, " MiB"))
    drawn = [_draw(steps, columns[name], divisor, title, colour, unit) for name, title, colour, divisor, unit in wanted if name in columns]
    return [f"<div>{svg}</div>" for svg in drawn if svg]


def _draw(steps: Any, values: Any, divisor: float, title: str, colour: str, unit: str) -> str:
    curve = Curve()
    for index in range(0, len(steps), max(1, len(steps) // NUM_SAMPLES)):
        curve.add(int(steps[index]), float(values[index]) / divisor)
    return curve_svg(curve, title, colour, unit) if len(curve.points) > 1 else ""


class NotebookProgress:
    """A `Progress` that redraws one cell output, at most every REDRAW_S; in plain IPython it prints nothing at all."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._view: View | None = None
        self._notes: list[str] = []
        self._loss = Curve()
        self._drawn_s = float("-inf")
        self._closed = False
        self._word = "starting"

    def update(self, view: View) -> None:
        """Keep the view, redraw when it is time."""
        self._view = view
        if isinstance(view, ProgressView):
            self._loss.add(view.step, view.loss)
        if time.monotonic() - self._drawn_s >= REDRAW_S:
            self._draw()

    def note(self, text: str) -> None:
        """The last few notes stand below the bar."""
        self._notes = [*self._notes, text][-NUM_NOTES:]
        self._draw()

    def close(self) -> None:
        """Draw the last view."""
        if not self._closed:
            self._draw()
            self._closed = True

    def ended(self, word: str, result: RunResult | None = None) -> None:
        """Say how it ended in place of what was under way last. A run that completed has proven its last step."""
        last = self._view if isinstance(self._view, ProgressView) else None
        if result is not None and result.status == "completed":
            steps = result.applied_steps
            last = replace(
                last or ProgressView(steps, steps, loss=result.loss_last), step=steps, total_steps=steps, phase=word, validated_step=steps
            )
        elif last is not None:
            last = replace(last, phase=word)
        self._view, self._word, self._closed = last, word, False
        self.close()

    def _draw(self) -> None:
        if self._closed:
            return
        self._drawn_s = time.monotonic()
        from IPython.display import HTML, display

        with contextlib.suppress(Exception):  # a front end that went away must not end a run
            if self._handle is None:
                self._handle = display(HTML(self.html()), display_id=True)
            else:
                self._handle.update(HTML(self.html()))

    def html(self) -> str:
        """What the cell shows."""
        view = self._view
        bar = (
            f'<div style="width:420px;height:10px;background:#8883;border-radius:5px"><div style="width:{fraction(view):.1%};height:10px;'
            'background:#2563b0;border-radius:5px"></div></div>'
            if view is not None
            else ""
        )
        line = html.escape(describe(view).replace("  ", " · ")) if view is not None else self._word
        picture = curve_svg(self._loss, "Loss", "#2563b0") if len(self._loss.points) > 1 else ""
        notes = "".join(f'<div style="opacity:0.75">{html.escape(note)}</div>' for note in self._notes)
        return f'<div>{bar}<div style="font-family:monospace;margin:4px 0">{line}</div>{picture}{notes}</div>'


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return False
    shell = get_ipython()
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


def say_complete(run_id: str) -> None:
    """One line for a run that had nothing left to do: in the cell, or on standard error."""
    if not in_notebook():
        print(f"mem: {complete_words(run_id)}", file=sys.stderr)
        return
    from IPython.display import HTML, display

    display(HTML(f"<div>{html.escape(complete_words(run_id))}</div>"))


@contextlib.contextmanager
def live_progress() -> Iterator[Callable[[Any], None]]:
    """In a notebook, the flow called within the block shows its progress in the cell; what is yielded is told its final state."""
    if DRIVEN.has_surroundings or not in_notebook():
        yield lambda state: None
        return
    progress = NotebookProgress()
    with DRIVEN.surrounded(Surroundings(progress)), _quiet_prefect():
        yield lambda state: show_ending(progress, state)


def show_ending(progress: NotebookProgress, state: Any) -> None:
    """The last line of the cell, from the flow run's final state."""
    result = state.result(_sync=True) if state.is_completed() else None
    word = "completed" if state.is_completed() else "interrupted" if state.is_cancelled() else "failed"
    progress.ended(word, result if isinstance(result, RunResult) else None)


@contextlib.contextmanager
def _quiet_prefect() -> Iterator[None]:
    """Prefect's log lines and tracebacks would fill the cell; what went wrong is raised to the caller anyway."""
    names = [name for name in logging.root.manager.loggerDict if name == "prefect" or name.startswith("prefect.")]
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def shown(value: Any) -> Any:
    """A RunResult as one that a notebook shows well; anything else as it is."""
    return ShownResult.model_validate(value.model_dump()) if isinstance(value, RunResult) else value
