"""Which charts the report shows, as values; `charts.draw` draws them."""

import numpy as np
from numpy.typing import NDArray

from mem_core.infrastructure.telemetry.charts import Chart, Series, describe
from mem_core.infrastructure.telemetry.metrics import figures_of, rolling_mean, smoothed, smoothing_window, spike_indices
from mem_core.infrastructure.telemetry.report_page.data import ReportData, request_number

_SMOOTH_POINTS = 600
_FEW_STEPS = 60


def all_charts(data: ReportData) -> tuple[Chart, ...]:
    """Loss first and wide, then the rest in the order in which people look for a cause."""
    return (_loss(data), _learning_rate(data), _gradient_norm(data), _memory(data), _step_time(data), _speed(data), _micro_batches(data))


def non_finite_steps(data: ReportData) -> NDArray[np.int64]:
    """Steps whose loss is not a finite number; no curve can show them."""
    return data.steps[~np.isfinite(data.column("loss"))]


def _faults(data: ReportData) -> tuple[int, ...]:
    return tuple(fault.step if fault.reached_step is None else fault.reached_step for fault in data.result.faults)


def _plan_changes(data: ReportData) -> tuple[int, ...]:
    """The steps at which the memory plan changed; the journal names batches, which run ahead of steps by the skipped ones."""
    batches, steps = data.columns["batch_index"].astype(np.int64), data.steps
    rows = np.searchsorted(batches, [event.change.batch_index for event in data.timeline.plan_changes])
    return tuple(int(steps[row]) for row in rows if row < steps.size)


def _both(data: ReportData, values: NDArray[np.float64], label: str = "each step") -> tuple[Series, ...]:
    """Each step faint behind its mean; the steps alone where they are too few for a mean to say more."""
    if values.size < _FEW_STEPS:
        return (_raw(data, values, label, faint=False),)
    return (_raw(data, values, label), _smooth(data, values))


def _raw(data: ReportData, values: NDArray[np.float64], label: str, *, faint: bool = True) -> Series:
    kept = spike_indices(values)
    return Series(label, data.steps[kept], values[kept], "faint" if faint else "main")


def _smooth(data: ReportData, values: NDArray[np.float64]) -> Series:
    kept, means = smoothed(values, _SMOOTH_POINTS)
    return Series(f"mean of {smoothing_window(values.size)}", data.steps[kept], means)


def _level(data: ReportData, value: float | None, label: str) -> tuple[Series, ...]:
    steps = data.steps
    if not value or not steps.size:
        return ()
    return (Series(label, steps[[0, -1]], np.full(2, value), "limit"),)


def _loss(data: ReportData) -> Chart:
    loss = data.column("loss")
    series = (*_both(data, loss), *_held_out(data))
    return Chart("Loss", describe("Training loss", loss), "loss per token (nats)", series, _faults(data), wide=True)


def _held_out(data: ReportData) -> tuple[Series, ...]:
    """A line for each set of held-out rows; a set that was looked at once is a level across the picture, since a dot is not seen.

    Of a step that was done again the last figure counts.
    """
    found: dict[str, dict[int, float]] = {}
    for event in data.timeline.evaluations:
        for name, figures in figures_of(event).items():
            found.setdefault(name, {})[event.step] = figures.loss
    return tuple(_held_out_line(data, name, losses, first=not number) for number, (name, losses) in enumerate(found.items()))


def _held_out_line(data: ReportData, name: str, losses: dict[int, float], *, first: bool) -> Series:
    steps = sorted(losses)
    if len(steps) == 1 and data.steps.size > 1:
        return Series(f"{name} at step {steps[0]:,}", data.steps[[0, -1]], np.full(2, losses[steps[0]]), "level")
    values = np.array([losses[step] for step in steps], np.float64)
    return Series(name, np.array(steps, np.int64), values, "points" if first else "more")


def _learning_rate(data: ReportData) -> Chart:
    rate = data.column("lr")
    return Chart("Learning rate", describe("Learning rate", rate), "", (_raw(data, rate, "learning rate", faint=False),))


def _gradient_norm(data: ReportData) -> Chart:
    norm = data.column("grad_norm")
    clip = _level(data, request_number(data.request, "training", "gradient_clip_norm"), "clipped above")
    series = (*_both(data, norm), *(clip if np.isfinite(norm).any() else ()))
    return Chart("Gradient norm", describe("Gradient norm", norm), "global norm", series, _faults(data))


def _memory(data: ReportData) -> Chart:
    used = data.column("peak_bytes")
    budget = float(data.result.memory.budget_bytes)
    unit_bytes, unit = (2**30, "GiB") if max([budget, *used[-1:]]) >= 2**30 else (2**20, "MiB")
    series = (
        *_both(data, used / unit_bytes),
        *_level(data, budget / unit_bytes, f"limit: {data.result.memory.binding_limit or 'budget'}"),
    )
    changes = _plan_changes(data)
    alt = f"{describe('Peak memory in bytes', used)}; limit {budget:.0f} bytes; {len(changes)} changes of the memory plan"
    return Chart("Memory against the limit", alt, unit, series, (), changes)


def _step_time(data: ReportData) -> Chart:
    step_s = data.column("step_s")
    series = _both(data, step_s)
    return Chart("Step time", describe("Seconds per step", step_s), "seconds", series, _faults(data))


def _speed(data: ReportData) -> Chart:
    step_s, tokens = data.column("step_s"), data.column("tokens")
    window = smoothing_window(step_s.size)
    with np.errstate(invalid="ignore", divide="ignore"):
        speed = rolling_mean(tokens, window) / rolling_mean(step_s, window)
    kept = spike_indices(speed, _SMOOTH_POINTS)
    series = (Series(f"mean of {window}", data.steps[kept], speed[kept]),)
    return Chart("Tokens per second", describe("Tokens per second", speed), "tokens/s", series)


def _micro_batches(data: ReportData) -> Chart:
    micro = data.column("micro_batches")
    changes = _plan_changes(data)
    series = (_raw(data, micro, "micro-batches", faint=False),)
    return Chart("Micro-batches per step", describe("Micro-batches", micro), "", series, (), changes)
