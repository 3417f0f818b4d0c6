"""The top of the report: one sentence, the key numbers, and where the time went."""

import math
from datetime import UTC, datetime
from pathlib import Path

from mem_core.domain.results.evaluation import rows_words
from mem_core.domain.run import BETWEEN_ATTEMPTS, RunResult
from mem_core.domain.units import format_bytes, format_seconds
from mem_core.infrastructure.telemetry.html import Cell, Html, chip, counted, element, escape, join, table
from mem_core.infrastructure.telemetry.report_page.data import ReportData
from mem_core.infrastructure.telemetry.report_page.style import BUCKET_COLOURS, OTHER_BUCKET_COLOUR

_LARGE = 1_000_000_000
_TONES = {"completed": "good", "interrupted": "warn", "failed": "bad", "running": "plain"}
_BUCKET_WORDS = {
    "productive": "steps that count",
    "redone": "steps done again after a fault",
    "start": "starting processes and models",
    "op_build": "building DeepSpeed's ops",
    "data": "preparing data",
    "save_stall": "training waited for a save",
    "restore": "loading a checkpoint",
    "restart": "lost to a kill of the whole run",
    "oom_recovery": "recovering from a lack of memory",
    "evaluation": "evaluating",
    "planner_wait": "waiting for the planner",
    "validation_wait": "waiting for a verdict on a checkpoint",
    "idle": "nothing to do",
    BETWEEN_ATTEMPTS: "no attempt lived: outside the fraction",
}


def shown_time(time_unix_s: float) -> str:
    """`2026-01-31 12:00:05 UTC`, or a dash where there is no usable time."""
    try:
        moment = datetime.fromtimestamp(time_unix_s, UTC)
    except (ValueError, OverflowError, OSError):
        return "–"
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC") if time_unix_s > 0 else "–"


def status_chip(result: RunResult) -> Html:
    """The status as a coloured word."""
    return chip(result.status, _TONES[result.status])


def headline(data: ReportData) -> str:
    """One or two sentences that say how the run stands, also for somebody who reads nothing else."""
    result, timeline = data.result, data.timeline
    steps = f"{result.applied_steps:,} of {counted(data.max_steps, 'step')}" if data.max_steps else counted(result.applied_steps, "step")
    wall_s = result.goodput.lived_s or timeline.last_unix_s - timeline.first_unix_s
    beginning = {
        "completed": f"Completed {steps} in {format_seconds(wall_s)}",
        "interrupted": f"Interrupted after {steps}; the same command goes on from there",
        "failed": f"Failed after {steps} with exit code {result.exit_code}",
        "running": f"{steps} so far; last sign of life {shown_time(timeline.last_unix_s)}",
    }[result.status]
    sentences = [beginning + _loss_words(result), _fault_words(result)]
    return ". ".join(part for part in (*sentences, result.message.rstrip(".")) if part) + "."


def _loss_words(result: RunResult) -> str:
    if result.loss_first is None or result.loss_last is None:
        return ""
    return f", loss {result.loss_first:.3f} → {result.loss_last:.3f}"


def _fault_words(result: RunResult) -> str:
    if not result.faults and not result.ooms_absorbed:
        return "No fault was met"
    num_open = sum(fault.recovered_s is None for fault in result.faults)
    recovered = [fault.recovered_s for fault in result.faults if fault.recovered_s is not None]
    median = f" (median {format_seconds(sorted(recovered)[len(recovered) // 2])})" if recovered else ""
    words = f"{counted(len(result.faults), 'fault')} met, {len(recovered):,} with a measured recovery{median}"
    ooms = f"; {counted(result.ooms_absorbed, 'OOM')} absorbed, {result.ooms_fatal:,} fatal"
    return words + (ooms if result.ooms_absorbed or result.ooms_fatal else "") + ("" if num_open or not recovered else "; all recovered")


def key_numbers(data: ReportData) -> Html:
    """The numbers people look for first."""
    return element("dl", *(element("div", element("dt", name), _value(value, more)) for name, value, more in _numbers(data)), css="cards")


def _value(value: str, more: str) -> Html:
    return element("dd", value, element("small", more) if more else "")


def _numbers(data: ReportData) -> list[tuple[str, str, str]]:
    result, memory = data.result, data.result.memory
    share = f"{memory.peak_bytes / memory.budget_bytes:.0%} of {format_bytes(memory.budget_bytes)}" if memory.budget_bytes else ""
    num_recovered = sum(fault.recovered_s is not None for fault in result.faults)
    counts = result.checkpoints
    return [
        ("Steps applied", f"{result.applied_steps:,}", f"{result.skipped_steps:,} skipped"),
        ("Epochs", f"{result.epochs:.3g}" if result.epochs is not None else "–", "how often every training row was seen"),
        ("Loss, last segment", _number(result.loss_last), f"began at {_number(result.loss_first)}"),
        ("Validation loss", _number(result.validation_loss), rows_words(result.validation_rows, result.validation_rows_total)),
        ("Tokens", _large(result.tokens), f"{result.tokens:,}" if result.tokens >= _LARGE else ""),
        ("Tokens per second", f"{result.tokens_per_s:,.0f}", "while training"),
        ("Goodput", f"{result.goodput.fraction:.1%}", "productive ÷ time of its attempts"),
        ("Faults", f"{len(result.faults):,}", f"{num_recovered:,} with measured recovery"),
        ("Restarts", f"{result.restarts:,}", f"in {counted(data.timeline.num_attempts, 'attempt')}"),
        ("Out of memory", f"{result.ooms_absorbed:,} absorbed", f"{result.ooms_fatal:,} fatal"),
        ("Peak memory", format_bytes(memory.peak_bytes) if memory.peak_bytes else "–", share),
        (
            "Checkpoints",
            f"{counts.validated:,} validated",
            f"{counts.written:,} written, {counts.rejected:,} rejected, {counts.kept:,} kept",
        ),
        *([("Remote copies", str(result.mirror.at_step or "none"), f"{result.mirror} in {result.mirror.url}")] if result.mirror else []),
        *_model_folder(result),
        ("Policy", counted(result.policy.decisions, "decision"), f"{result.policy.clamped:,} clamped, {result.policy.refused:,} refused"),
    ]


def _model_folder(result: RunResult) -> list[tuple[str, str, str]]:
    if result.export is None:
        return []
    return [("Model folder", Path(result.export.folder).name or "none", result.export.folder or result.export.problem)]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}" if math.isfinite(value) else "not finite"


def _large(number: int) -> str:
    """`1.02 G` where every digit would not fit; the whole number stands beside it."""
    if number < _LARGE:
        return f"{number:,}"
    return f"{number / 1e9:,.2f} G" if number < 1e12 else f"{number / 1e12:,.2f} T"


def goodput_bar(data: ReportData) -> Html:
    """A stacked bar with its table, which is also the legend."""
    seconds, lived_s = data.result.goodput.seconds, data.result.goodput.lived_s
    if lived_s <= 0:
        return element("p", "No time was recorded.", css="quiet")
    shares = {name: value / lived_s for name, value in seconds.items() if name != BETWEEN_ATTEMPTS}
    parts = join(_slice(name, share) for name, share in shares.items())
    alt = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    rows: list[tuple[Cell, ...]] = [
        (
            join((_key(name), name)),
            _BUCKET_WORDS.get(name, ""),
            escape(format_seconds(value)),
            f"{shares[name]:.2%}" if name in shares else "–",
        )
        for name, value in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    bar = element("div", parts, css="bar", role="img", aria_label=f"Time by bucket: {alt}")
    return join((bar, table("Time by bucket", ("bucket", "what", "time", "share"), rows, empty="")))


def _colour(bucket: str) -> str:
    return BUCKET_COLOURS.get(bucket, OTHER_BUCKET_COLOUR)


def _slice(bucket: str, share: float) -> Html:
    return element("span", style=f"width:{share:.4%};background:{_colour(bucket)}", title=f"{bucket} {share:.1%}")


def _key(bucket: str) -> Html:
    return element("span", css="key", style=f"background:{_colour(bucket)}")
