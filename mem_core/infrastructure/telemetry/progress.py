"""What people see while a run goes on: one live line on a terminal, plain lines elsewhere, on standard error either way."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TextIO, assert_never

from mem_core.domain.printable import printable
from mem_core.domain.units import format_bytes, format_seconds
from mem_core.infrastructure.telemetry.live import Rate, about_left
from mem_core.infrastructure.telemetry.streams import terminal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

LIVE_EVERY_S = 0.25
PLAIN_EVERY_S = 30.0
_PLAIN_AT_LEAST_S = 2.0
_BAR_WIDTH = 14


@dataclass(frozen=True, slots=True)
class ProgressView:
    """Where training is, or other work that is counted (`unit`). `memory_limit_bytes` 0: no limit is known; None: not known yet."""

    step: int
    total_steps: int
    segment_index: int = 0
    loss: float | None = None
    learning_rate: float | None = None
    tokens_per_s: float | None = None
    memory_bytes: int | None = None
    memory_limit_bytes: int = 0
    validated_step: int | None = None
    restarts: int = 0
    phase: str = ""
    steps_per_epoch: float | None = None
    validation_loss: float | None = None
    unit: str = "step"

    @property
    def epochs(self) -> float | None:
        """How often every training row has been seen; None where it is not known how many rows there are."""
        return self.step / self.steps_per_epoch if self.steps_per_epoch else None


@dataclass(frozen=True, slots=True)
class PreparingView:
    """Where data preparation is; `total_bytes` 0 means not known. The bytes are those of its `phase`, and so is the time that is left."""

    done_bytes: int
    total_bytes: int
    num_rows: int = 0
    num_tokens: int = 0
    source: str = ""
    phase: str = ""
    left_s: float | None = None


View = ProgressView | PreparingView


class Progress(Protocol):
    """The port: whoever drives a run reports here. A notebook or a Prefect artifact may stand behind it."""

    def update(self, view: View) -> None:
        """Where things are; may be called for every step."""
        ...

    def note(self, text: str) -> None:
        """Something worth a line of its own."""
        ...

    def close(self) -> None:
        """Show the last view and let go of the terminal; further calls do nothing."""
        ...


class NoProgress:
    """Shows nothing."""

    def update(self, view: View) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class ProgressDisplay:
    """Shows a run on `stream` (standard error unless given).

    On a terminal: one live line, redrawn at most every LIVE_EVERY_S. Elsewhere: a plain line for each new segment or phase, at most
    one in two seconds, and one every PLAIN_EVERY_S. An `update` with nothing due only keeps the view. No thread, and a stream
    that is closed or full never raises. Use as a context manager, or `close` it.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
        width: int | None = None,
    ) -> None:
        self._stream: TextIO = terminal() if stream is None else stream
        self._on_stderr = stream is None or stream is sys.stderr
        self._is_live = self._stream.isatty() if live is None else live
        self._clock = clock
        self._width = width
        self._live: Live | None = None
        self._view: View | None = None
        self._shown: View | None = None
        self._shown_s = float("-inf")
        self._shown_part: int | str = -1
        self._due_s = float("-inf")
        self._rate = Rate()
        self._closed = False

    def __enter__(self) -> "ProgressDisplay":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, view: View) -> None:
        """Keep the view, and show it when it is time."""
        self._view = view = _with_last_numbers(view, self._view)
        now_s = self._clock()
        if now_s < self._due_s and not self._new_part(view, now_s):
            return
        self._show(now_s)

    def note(self, text: str) -> None:
        """A line above the live one."""
        if self._closed:
            return
        if self._live is not None:
            self._guard(lambda: self._console().print(printable(text), markup=False, highlight=False))
        else:
            self._write(text)

    def close(self) -> None:
        """Show the last view if it was not shown, and give the terminal back."""
        if self._closed:
            return
        if self._view is not None and self._view is not self._shown:
            self._show(self._clock())
        if self._live is not None:
            self._guard(self._live.stop)
        self._live = None
        self._closed = True

    def _new_part(self, view: View, now_s: float) -> bool:
        if self._is_live or _part_of(view) == self._shown_part:
            return False
        return now_s - self._shown_s >= _PLAIN_AT_LEAST_S

    def _show(self, now_s: float) -> None:
        view = self._view
        if self._closed or view is None:
            return
        self._shown, self._shown_s = view, now_s
        self._due_s = now_s + (LIVE_EVERY_S if self._is_live else PLAIN_EVERY_S)
        self._shown_part = _part_of(view)
        if isinstance(view, ProgressView):
            self._rate.add(now_s, view.step)
        if self._is_live:
            self._guard(lambda: self._redraw(view))
        else:
            self._write(describe(view, self._eta_s(view)))

    def _eta_s(self, view: View) -> float | None:
        return self._rate.eta_s(view.total_steps - view.step) if isinstance(view, ProgressView) else None

    def _redraw(self, view: View) -> None:
        from rich.live import Live

        if self._live is None:
            self._live = Live(console=self._new_console(), auto_refresh=False, redirect_stdout=False, redirect_stderr=self._on_stderr)
            self._live.start()
        self._live.update(_live_line(view, printable(describe(view, self._eta_s(view)))), refresh=True)

    def _new_console(self) -> "Console":
        from rich.console import Console

        return Console(file=self._stream, force_terminal=True, width=self._width)

    def _console(self) -> "Console":
        return self._live.console if self._live is not None else self._new_console()

    def _write(self, text: str) -> None:
        self._guard(lambda: print(printable(text), file=self._stream, flush=True))

    def _guard(self, action: Callable[[], object]) -> None:
        """A terminal that went away must not end a run."""
        try:
            action()
        except (OSError, ValueError):
            self._closed = True


def _part_of(view: View) -> int | str:
    """What a view is about: the segment, or the phase of the preparation."""
    return view.segment_index if isinstance(view, ProgressView) else view.phase


def _with_last_numbers(view: View, last: View | None) -> View:
    """Between segments no step is under way: the numbers of the last one stay on the line."""
    if not isinstance(view, ProgressView) or not isinstance(last, ProgressView) or view.loss is not None or view.step < last.step:
        return view
    return replace(view, loss=last.loss, learning_rate=last.learning_rate, tokens_per_s=view.tokens_per_s or last.tokens_per_s)


def fraction(view: View) -> float:
    """Done of all, 0 to 1."""
    done, total = (view.step, view.total_steps) if isinstance(view, ProgressView) else (view.done_bytes, view.total_bytes)
    return min(max(done / total, 0.0), 1.0) if total > 0 else 0.0


def describe(view: View, eta_s: float | None = None) -> str:
    """One line of plain text."""
    match view:
        case ProgressView():
            return _describe_training(view, eta_s)
        case PreparingView():
            return _describe_preparing(view)
        case _:
            assert_never(view)


def _describe_training(view: ProgressView, eta_s: float | None) -> str:
    """The most wanted parts first, since a narrow terminal cuts the end."""
    parts = (
        f"{view.unit} {view.step:,}/{view.total_steps:,} {fraction(view):.1%}" if view.total_steps else "",  # not known while loading
        epoch_words(view),
        view.phase,
        f"eta {format_seconds(eta_s)}" if eta_s is not None else "",
        f"loss {view.loss:.4f}" if view.loss is not None else "",
        f"held out {view.validation_loss:.4f}" if view.validation_loss is not None else "",
        f"validated {view.validated_step:,}" if view.validated_step is not None else "",
        f"restarts {view.restarts}" if view.restarts else "",
        f"{view.tokens_per_s:,.0f} tok/s" if view.tokens_per_s is not None else "",
        _memory_words(view.memory_bytes, view.memory_limit_bytes) if view.memory_bytes is not None else "",
        f"lr {view.learning_rate:.2e}" if view.learning_rate is not None else "",
    )
    return "  ".join(part for part in parts if part)


def epoch_words(view: ProgressView) -> str:
    """`epoch 1.25/3`; empty where it is not known."""
    if view.epochs is None or not view.steps_per_epoch:
        return ""
    return f"epoch {view.epochs:.3g}/{view.total_steps / view.steps_per_epoch:.3g}"


def _memory_words(memory_bytes: int, limit_bytes: int) -> str:
    """`mem 1.0/2.0 GiB`, with the unit said once where it is the same."""
    used, limit = format_bytes(memory_bytes), format_bytes(limit_bytes)
    if not limit_bytes:
        return f"mem {used}"
    used_number, used_unit = used.split(" ")
    return f"mem {used_number}/{limit}" if limit.endswith(f" {used_unit}") else f"mem {used}/{limit}"


def _describe_preparing(view: PreparingView) -> str:
    share = f" {fraction(view):.0%}" if view.total_bytes else ""
    parts = (
        f"preparing data{f': {view.phase}' if view.phase else ''}{share}",
        about_left(view.left_s),
        f"{format_bytes(view.done_bytes)}" + (f" of {format_bytes(view.total_bytes)}" if view.total_bytes else ""),
        f"{view.num_rows:,} rows" if view.num_rows else "",
        f"{view.num_tokens:,} tokens" if view.num_tokens else "",
        view.source,
    )
    return "  ".join(part for part in parts if part)


def _live_line(view: View, text: str) -> "Table":
    """A bar and the text, cut to one line of the terminal."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(width=_BAR_WIDTH)
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    grid.add_row(ProgressBar(total=1.0, completed=fraction(view), width=_BAR_WIDTH), Text(text, no_wrap=True, overflow="ellipsis"))
    return grid
