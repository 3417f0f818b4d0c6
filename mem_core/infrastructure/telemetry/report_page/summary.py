"""The top of the report: one sentence, the key numbers, and where the time went."""

import math
from datetime import UTC, datetime
from pathlib import Path

from mem_core.domain.results.evaluation import SetFigures, rows_words
from mem_core.domain.run import BETWEEN_ATTEMPTS, RunResult
from mem_core.domain.units import format_bytes, format_seconds
from mem_core.infrastructure.telemetry.html import Cell, Html, chip, counted, element, escape, join, table
from mem_core.infrastructure.telemetry.report_page.data import AttemptRow, ReportData
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
    epochs = f" ({_epochs(result.epochs)})" if result.epochs is not None else ""
    steps = f"{result.applied_steps:,} of {counted(data.max_steps, 'step')}" if data.max_steps else counted(result.applied_steps, "step")
    steps += epochs
    wall_s = result.goodput.lived_s or timeline.last_unix_s - timeline.first_unix_s
    beginning = {
        "completed": f"Completed {steps} in {format_seconds(wall_s)}",
        "interrupted": f"Interrupted after {steps}; the same command goes on from there",
        "failed": f"Failed after {steps} with exit code {result.exit_code}",
        "running": f"{steps} so far; last sign of life {shown_time(timeline.last_unix_s)}",
    }[result.status]
    sentences = [beginning, _origin_words(result), _loss_words(data), _fault_words(result)]
    return ". ".join(part for part in (*sentences, result.message.rstrip(".")) if part) + "."


def _origin_words(result: RunResult) -> str:
    """The curves up to there are those of the origin."""
    origin = result.forked_from
    words = f"{origin.words()} ({origin.changes()}); up to there the curves are the origin's" if origin is not None else ""
    return words[:1].upper() + words[1:]


def _epochs(epochs: float) -> str:
    """`1 epoch`, `2.35 epochs`."""
    return f"{epochs:.3g} epoch{'' if epochs == 1 else 's'}"


def _loss_words(data: ReportData) -> str:
    """Held-out rows first: that loss is what the run is for, and no single batch decides it."""
    result, training = data.result, data.smoothed_loss()
    held_out = f"validation loss {_number(result.validation_loss)}{_best_words(result)}" if result.validation_loss is not None else ""
    trained = f"training loss {training.first:.3f} → {training.last:.3f} (means of {counted(training.window, 'step')})" if training else ""
    words = ", ".join(part for part in (held_out, trained) if part)
    return words[:1].upper() + words[1:]


def _best_words(result: RunResult) -> str:
    best = result.best
    return f" (best {best.value:.4f} at step {best.step:,})" if best is not None and best.value != result.validation_loss else ""


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
        _validation(result),
        *_training_loss(data),
        ("Steps applied", f"{result.applied_steps:,}", f"{result.skipped_steps:,} skipped"),
        ("Epochs", f"{result.epochs:.3g}" if result.epochs is not None else "–", "how often every training row was seen"),
        *_rows_trained_on(result),
        ("Tokens", _large(result.tokens), f"{result.tokens:,}" if result.tokens >= _LARGE else ""),
        ("Tokens per second", f"{result.tokens_per_s:,.0f}", "while training"),
        ("Goodput", f"{result.goodput.fraction:.1%}", "productive ÷ time of its attempts"),
        ("Faults", f"{len(result.faults):,}", f"{num_recovered:,} with measured recovery"),
        ("Restarts", f"{result.restarts:,}", f"in {counted(len(data.timeline.attempts), 'attempt')}"),
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


def _validation(result: RunResult) -> tuple[str, str, str]:
    if result.validation_loss is None:
        return ("Validation loss", "–", "no held-out rows were looked at")
    perplexity = f"perplexity {SetFigures.of(result.validation_loss, None, 0, 0, 0).perplexity:.4g}"
    rows = rows_words(result.validation_rows, result.validation_rows_total)
    return ("Validation loss", _number(result.validation_loss), ", ".join(part for part in (perplexity, rows and f"over {rows}") if part))


def _training_loss(data: ReportData) -> list[tuple[str, str, str]]:
    training = data.smoothed_loss()
    if training is None:  # no metrics are left: the segments' own words
        return [("Loss, last segment", _number(data.result.loss_last), f"began at {_number(data.result.loss_first)}")]
    return [
        ("Training loss", _number(training.last), f"mean of the last {counted(training.window, 'step')}; began at {training.first:.4f}")
    ]


def _rows_trained_on(result: RunResult) -> list[tuple[str, str, str]]:
    seen = result.data
    if seen is None:
        return []
    more = f"{seen.num_tokens:,} tokens; {sum(seen.dropped_rows.values()):,} dropped or cut, {seen.num_bad_rows:,} bad"
    return [("Documents", f"{seen.num_documents:,}", more)]


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
    """A stacked bar with its table, which is also the legend. Time in which no attempt lived stands apart from both."""
    goodput = data.result.goodput
    if goodput.lived_s <= 0:
        return element("p", "No time was recorded.", css="quiet")
    seconds = {name: value for name, value in goodput.seconds.items() if name != BETWEEN_ATTEMPTS}
    shares = {name: value / goodput.lived_s for name, value in seconds.items()}
    parts = join(_slice(name, share) for name, share in shares.items())
    alt = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    rows: list[tuple[Cell, ...]] = [
        (join((_key(name), name)), _BUCKET_WORDS.get(name, ""), escape(format_seconds(value)), f"{shares[name]:.2%}")
        for name, value in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    bar = element("div", parts, css="bar", role="img", aria_label=f"Time by bucket: {alt}")
    return join((bar, table("Time by bucket", ("bucket", "what", "time", "share"), rows, empty=""), _between(data)))


def _between(data: ReportData) -> Html:
    """The attempts of a run that had more than one, and how long nobody had asked it to go on."""
    rows = data.timeline.attempts
    if len(rows) < 2:
        return Html("")
    waited_s = data.result.goodput.seconds.get(BETWEEN_ATTEMPTS, 0.0)
    words = f"Apart from these: {format_seconds(waited_s)} between attempts, in which nobody had asked the run to go on."
    ends_before = [0.0, *(row.last_unix_s for row in rows)]
    cells = [_attempt(row, before_unix_s) for row, before_unix_s in zip(rows, ends_before, strict=False)]
    header = ("attempt", "began", "lived", "after the one before", "went on from step", "ended")
    return join((element("p", words) if waited_s else "", table("Attempts", header, cells, empty="")))


def _attempt(row: AttemptRow, before_unix_s: float) -> tuple[Cell, ...]:
    gap = escape(format_seconds(max(0.0, row.began_unix_s - before_unix_s)) if before_unix_s else None)
    lived = escape(format_seconds(max(0.0, row.last_unix_s - row.began_unix_s)))
    return (row.attempt, escape(shown_time(row.began_unix_s)), lived, gap, row.resumed_step, row.ended or "without a word")


def _colour(bucket: str) -> str:
    return BUCKET_COLOURS.get(bucket, OTHER_BUCKET_COLOUR)


def _slice(bucket: str, share: float) -> Html:
    return element("span", style=f"width:{share:.4%};background:{_colour(bucket)}", title=f"{bucket} {share:.1%}")


def _key(bucket: str) -> Html:
    return element("span", css="key", style=f"background:{_colour(bucket)}")
