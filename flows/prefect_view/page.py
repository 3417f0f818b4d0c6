"""From the board to Markdown that Prefect's UI shows: headings, tables, pictures as data URLs. Pure."""

import time

from flows.prefect_view.board import CheckpointRow, DecisionRow, FaultRow, RunBoard
from flows.prefect_view.curves import curve_svg, data_url
from mem_core.domain.checkpoint import CheckpointVerdict
from mem_core.domain.policy import PolicyDecision
from mem_core.domain.units import format_bytes, format_seconds, format_short
from mem_core.infrastructure.telemetry.metrics import figures_of
from mem_core.infrastructure.telemetry.progress import ProgressView, describe, epoch_words

STEPPING = ("", "forward", "backward", "step", "data")


def render_page(board: RunBoard, run_folder: str, report_url: str) -> str:
    """The whole page."""
    parts = [
        f"# Run {board.run_id}",
        status_line(board),
        _progress(board),
        *_pictures(board),
        _checkpoints(board),
        _faults(board),
        _decisions(board),
        _doctor(board),
        _links(run_folder, report_url, board),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def status_line(board: RunBoard) -> str:
    """Where the run is, in one line; also the description of the artifacts."""
    if board.ended is not None:
        message = f": {board.ended.message}" if board.ended.message else ""
        return f"{board.ended.status} at step {board.step:,} of {board.total_steps:,}{message}"
    if isinstance(board.view, ProgressView):
        return _training_line(board, board.view)
    if board.view is not None:
        return describe(board.view).replace("  ", " · ")
    return "examining the machine" if board.environment is None else "starting workers"


def _training_line(board: RunBoard, view: ProgressView) -> str:
    """The most wanted parts first: the UI's cards cut the end."""
    parts = (
        f"step {board.step:,} of {board.total_steps:,} ({board.percent:.1f} %)",
        f"loss {view.loss:.4f}" if view.loss is not None else "",
        f"{view.tokens_per_s:,.0f} tokens/s" if view.tokens_per_s is not None else "",
        f"step {board.validated_step:,} proven" if board.validated_step else "",
        "" if view.phase in STEPPING else f"now: {view.phase}",
    )
    return " · ".join(part for part in parts if part)


def _progress(board: RunBoard) -> str:
    view = board.view if isinstance(board.view, ProgressView) else None
    segment = board.segment
    rows = [
        ("steps", f"{board.step:,} of {board.total_steps:,} ({board.percent:.1f} %)"),
        ("epoch", epoch_words(view).removeprefix("epoch ").replace("/", " of ") if view is not None else ""),
        ("validated", f"step {board.validated_step:,}, {board.num_validated:,} checkpoints proven"),
        ("segment", f"steps {segment.from_step:,} to {segment.until_step:,}, try {segment.try_number}" if segment else ""),
        ("loss", f"{view.loss:.4f}" if view is not None and view.loss is not None else ""),
        *_held_out(board),
        ("learning rate", f"{view.learning_rate:.3g}" if view is not None and view.learning_rate is not None else ""),
        ("tokens a second", f"{view.tokens_per_s:,.0f}" if view is not None and view.tokens_per_s is not None else ""),
        ("memory", _memory(view) if view is not None else ""),
        ("faults", f"{board.num_faults:,} met, {board.num_ooms_absorbed:,} OOMs absorbed"),
        ("attempt", f"{board.attempt}"),
        ("last news", time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(board.updated_unix_s)) if board.updated_unix_s else ""),
    ]
    return table(("progress", ""), [row for row in rows if row[1]])


def _held_out(board: RunBoard) -> list[tuple[str, str]]:
    """The last figures of each set."""
    event = board.evaluation
    if event is None:
        return []
    return [(f"held out: {name}", f"after step {event.step:,}: {figures.words()}") for name, figures in figures_of(event).items()]


def _memory(view: ProgressView) -> str:
    used = format_bytes(view.memory_bytes) if view.memory_bytes else ""
    return f"{used} of {format_bytes(view.memory_limit_bytes)}" if used and view.memory_limit_bytes else used


def _pictures(board: RunBoard) -> list[str]:
    pictures: list[str] = []
    if len(board.loss.points) > 1:
        pictures.append(f"![loss]({data_url(curve_svg(board.loss, 'Loss', '#2563b0'))})")
    if len(board.held_out.points) > 1:
        pictures.append(f"![held out]({data_url(curve_svg(board.held_out, 'Loss of held-out rows', '#a05a2c'))})")
    if len(board.memory.points) > 1:
        pictures.append(f"![memory]({data_url(curve_svg(board.memory, 'Memory of the workers', '#2f8f5b', ' MiB', from_zero=True))})")
    return pictures


def _checkpoints(board: RunBoard) -> str:
    if not board.checkpoints:
        return ""
    rows = [_checkpoint(board.checkpoints[step]) for step in sorted(board.checkpoints, reverse=True)]
    return "## Checkpoints\n\n" + table(("step", "verdict", "size", "saved in", "proven in", "kept"), rows)


def _checkpoint(row: CheckpointRow) -> tuple[str, ...]:
    verdict = row.verdict
    word = _verdict(verdict)
    judged = format_short(verdict.duration_s) if verdict is not None else ""
    kept = f"no ({row.removed})" if row.removed else "yes"
    return (f"{row.step:,}", word, format_bytes(row.size_bytes), format_short(row.save_s), judged, kept)


def _verdict(verdict: CheckpointVerdict | None) -> str:
    if verdict is None:
        return "being judged"
    return f"valid ({verdict.level})" if verdict.valid else f"**rejected**: {'; '.join(verdict.reasons)}"


def _faults(board: RunBoard) -> str:
    if not board.faults:
        return ""
    shown = f" (newest {len(board.faults)} of {board.num_faults:,})" if board.num_faults > len(board.faults) else ""
    rows = [_fault(row) for row in reversed(board.faults)]
    return f"## Faults{shown}\n\n" + table(("when", "kind", "went on from", "first step again", "detail"), rows)


def _fault(row: FaultRow) -> tuple[str, ...]:
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(row.time_unix_s))
    again = f"after {format_seconds(row.recovered_s)}" if row.recovered_s is not None else "not yet"
    return (when, row.kind, f"step {row.step:,}", again, row.detail[:300])


def _decisions(board: RunBoard) -> str:
    if not board.decisions:
        return ""
    rows = [_decision(row) for row in reversed(board.decisions)]
    return "## Decisions of the policy engine\n\n" + table(("steps", "verdict", "reason", "what reached the engine"), rows)


def _decision(row: DecisionRow) -> tuple[str, ...]:
    verdict = "allowed" if row.decision.allow else "**refused**"
    return (f"{row.from_step:,} to {row.until_step:,}", verdict, row.decision.reason, _values(row.decision))


def _values(decision: PolicyDecision) -> str:
    numbers = {name: value for name, value in decision.applied_hyperparams.model_dump().items() if isinstance(value, int | float)}
    values = ", ".join(f"{name} {value:g}" for name, value in numbers.items())
    clamps = "; ".join(f"{clamp.field} {clamp.proposed:g} clamped to {clamp.applied:g}" for clamp in decision.clamps)
    return f"{values} ({clamps})" if clamps else values


def _doctor(board: RunBoard) -> str:
    report = board.environment
    if report is None:
        return ""
    ranks, threads = _plural(report.num_ranks, "rank"), _plural(report.threads_per_rank, "thread")
    parts = [f"## Doctor\n\n{report.device} ({report.device_reason}), {report.dtype}, {ranks}, {threads} each"]
    todo = [(finding.severity, finding.check, finding.observed, finding.remedy) for finding in report.findings if finding.severity != "ok"]
    if todo:
        parts.append(table(("", "check", "observed", "what to do"), todo))
    parts.append(table(("fine", "observed"), [(found.check, found.observed) for found in report.findings if found.severity == "ok"]))
    return "\n\n".join(parts)


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'s' if count != 1 else ''}"


def _links(run_folder: str, report_url: str, board: RunBoard) -> str:
    lines = [f"- run folder: `{run_folder}`", f"- workers' logs: `{run_folder}/logs` (`mem logs {run_folder}`)"]
    if report_url:
        lines.append(f"- report: [{report_url}]({report_url})")
    if board.ended is None or board.ended.status != "completed":
        lines.append("- the same run id again goes on from the newest validated checkpoint")
    return "## Where things are\n\n" + "\n".join(lines)


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table; cells cannot break out of it."""
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
