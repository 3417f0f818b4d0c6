"""Where a run is, as values, and each as one line of plain text."""

from dataclasses import dataclass
from typing import assert_never

from mem_core.domain.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class ProgressView:
    """Where training is. `memory_limit_bytes` 0 means no limit is known; None means not known yet."""

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

    @property
    def epochs(self) -> float | None:
        """How often every training row has been seen; None where it is not known how many rows there are."""
        return self.step / self.steps_per_epoch if self.steps_per_epoch else None


@dataclass(frozen=True, slots=True)
class PreparingView:
    """Where data preparation is; `total_bytes` 0 means not known."""

    done_bytes: int
    total_bytes: int
    num_rows: int = 0
    num_tokens: int = 0
    source: str = ""


View = ProgressView | PreparingView


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
        f"step {view.step:,}/{view.total_steps:,} {fraction(view):.1%}",
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
        f"preparing data{share}",
        f"{format_bytes(view.done_bytes)}" + (f" of {format_bytes(view.total_bytes)}" if view.total_bytes else ""),
        f"{view.num_rows:,} rows" if view.num_rows else "",
        f"{view.num_tokens:,} tokens" if view.num_tokens else "",
        view.source,
    )
    return "  ".join(part for part in parts if part)
