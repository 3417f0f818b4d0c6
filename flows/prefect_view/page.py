"""From the board to Markdown that Prefect's UI shows: headings, tables, pictures as data URLs. Pure."""

import time
from dataclasses import dataclass

from flows.prefect_view.board import CheckpointRow, DecisionRow, FaultRow, RunBoard
from flows.prefect_view.curves import BLUE, GREEN, ORANGE, Line, curve_lines, data_url, lines_svg, value_words
from flows.prefect_view.markdown import bullets, code, inline, table
from mem_core.domain.checkpoint import CheckpointVerdict
from mem_core.domain.policy import PolicyDecision
from mem_core.domain.results.samples import StepSamples
from mem_core.domain.units import format_bytes, format_seconds, format_short
from mem_core.infrastructure.telemetry.markdown import sample_markdown
from mem_core.infrastructure.telemetry.metrics import figures_of
from mem_core.infrastructure.telemetry.progress import ProgressView, describe, epoch_words

MOST_SAMPLES = 8
STEPPING = ("", "forward", "backward", "step", "data")


@dataclass(frozen=True)
class Places:
    """Where more can be found. `report_page` and `all_runs` are paths on the server that shows this page; "" where it serves none."""

    run_folder: str = ""
    report_file: str = ""
    report_page: str = ""
    all_runs: str = ""


def render_page(board: RunBoard, places: Places) -> str:
    """The whole page."""
    parts = [
        f"# Run {inline(board.run_id)}",
        inline(status_line(board)),
        loss_picture(board),
        _progress(board),
        memory_picture(board),
        samples(board.samples),
        _checkpoints(board),
        _faults(board),
        _decisions(board),
        _doctor(board),
        links(places, board),
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
        f"{format_seconds(board.left_s)} left" if board.left_s is not None else "",
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
        ("elapsed", _elapsed(board)),
        ("time left", _left(board)),
        *_held_out(board),
        ("loss", loss_words(board)),
        ("validated", f"step {board.validated_step:,} ({board.num_validated:,} checkpoints)"),
        ("segment", f"steps {segment.from_step:,} to {segment.until_step:,}, try {segment.try_number}" if segment else ""),
        ("learning rate", f"{view.learning_rate:.3g}" if view is not None and view.learning_rate is not None else ""),
        ("tokens a second", f"{view.tokens_per_s:,.0f}" if view is not None and view.tokens_per_s is not None else ""),
        ("memory", _memory(view) if view is not None else ""),
        ("faults", f"{board.num_faults:,} met, {board.num_ooms_absorbed:,} OOMs absorbed"),
        ("attempt", f"{board.attempt}"),
        ("last news", time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(board.updated_unix_s)) if board.updated_unix_s else ""),
    ]
    return table(("progress", ""), [row for row in rows if row[1]])


def _elapsed(board: RunBoard) -> str:
    attempts = f" in {board.attempt} attempts" if board.lived_before_s else ""
    return f"{format_seconds(board.elapsed_s)}{attempts}" if board.began_unix_s else ""


def _left(board: RunBoard) -> str:
    per_s = board.rate.per_s()
    return f"{format_seconds(board.left_s)} at {per_s:,.3g} steps/s" if board.left_s is not None and per_s else ""


def loss_words(board: RunBoard) -> str:
    """`2.19 smoothed (2.2207 last)`; the newest alone where there are too few points for a mean."""
    if board.loss.newest is None:
        return ""
    step, newest = board.loss.newest
    means = board.loss.smoothed()
    return f"{value_words(means[-1][1])} smoothed ({newest:.4f} last)" if means else f"{newest:.4f} at step {step:,}"


def _held_out(board: RunBoard) -> list[tuple[str, str]]:
    """The last figures of each set, in rows that are short enough for a telephone."""
    event, rows = board.evaluation, list[tuple[str, str]]()
    for name, figures in figures_of(event).items() if event is not None else ():
        rows.append((f"{name} loss", f"{figures.loss:.4f} at step {event.step:,}" if event is not None else ""))
        right = f", {figures.token_accuracy:.1%} of tokens right" if figures.token_accuracy is not None else ""
        rows.append((f"{name} perplexity", f"{figures.perplexity:.4g}{right}"))
    return rows


def _memory(view: ProgressView) -> str:
    used = format_bytes(view.memory_bytes) if view.memory_bytes else ""
    return f"{used} of {format_bytes(view.memory_limit_bytes)}" if used and view.memory_limit_bytes else used


def loss_picture(board: RunBoard) -> str:
    """Training loss with its mean and the points of held-out rows, as soon as one of them has two points."""
    held_out = Line("held-out rows", board.held_out.drawn, ORANGE, dots=True)
    trained = curve_lines(board.loss, "training loss", BLUE) if len(board.loss.points) > 1 else []
    if not trained and len(held_out.points) < 2:
        return ""
    return f"![Training loss and loss of held-out rows over steps]({data_url(lines_svg([*trained, held_out]))})"


def memory_picture(board: RunBoard) -> str:
    """What the workers held, from zero."""
    if len(board.memory.points) < 2:
        return ""
    memory = Line("memory of the workers, MiB", board.memory.drawn, GREEN)
    return f"![Memory of the workers over steps]({data_url(lines_svg([memory], from_zero=True))})"


def samples(found: StepSamples | None) -> str:
    """The last answers to fixed prompts; a model wrote them, so that nothing of them is read as Markdown."""
    if found is None or not found.samples:
        return ""
    shown = [sample_markdown(sample) for sample in found.samples[:MOST_SAMPLES]]
    left_out = len(found.samples) - len(shown)
    more = f"{left_out:,} more in the report." if left_out > 0 else ""
    when = f"after step {found.step:,}" if found.step else "before training"
    return "\n\n".join(part for part in (f"## Samples {when}", *shown, more) if part)


def _checkpoints(board: RunBoard) -> str:
    if not board.checkpoints:
        return ""
    found = [board.checkpoints[step] for step in sorted(board.checkpoints, reverse=True)]
    reasons = [
        f"step {row.step:,} is rejected: {inline('; '.join(row.verdict.reasons))}" for row in found if row.verdict and not row.verdict.valid
    ]
    shown = table(("step", "verdict", "size", "saved in", "proven in", "kept"), [_checkpoint(row) for row in found])
    return "\n\n".join(part for part in ("## Checkpoints", shown, bullets(reasons)) if part)


def _checkpoint(row: CheckpointRow) -> tuple[str, ...]:
    verdict = row.verdict
    word = _verdict(verdict)
    judged = format_short(verdict.duration_s) if verdict is not None else ""
    kept = f"no ({row.removed})" if row.removed else "yes"
    return (f"{row.step:,}", word, format_bytes(row.size_bytes), format_short(row.save_s), judged, kept)


def _verdict(verdict: CheckpointVerdict | None) -> str:
    if verdict is None:
        return "being judged"
    return f"valid ({verdict.level})" if verdict.valid else "REJECTED"


def _faults(board: RunBoard) -> str:
    if not board.faults:
        return ""
    shown = f" (newest {len(board.faults)} of {board.num_faults:,})" if board.num_faults > len(board.faults) else ""
    return f"## Faults{shown}\n\n" + bullets([_fault(row) for row in reversed(board.faults)])


def _fault(row: FaultRow) -> str:
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(row.time_unix_s))
    again = f"first step again after {format_seconds(row.recovered_s)}" if row.recovered_s is not None else "not yet recovered"
    return f"{when} **{inline(row.kind)}**: went on from step {row.step:,}, {again}. {inline(row.detail[:300])}"


def _decisions(board: RunBoard) -> str:
    if not board.decisions:
        return ""
    return "## Decisions of the policy engine\n\n" + bullets([_decision(row) for row in reversed(board.decisions)])


def _decision(row: DecisionRow) -> str:
    verdict = "allowed" if row.decision.allow else "**refused**"
    return f"steps {row.from_step:,} to {row.until_step:,}: {verdict}, {inline(row.decision.reason)}. {inline(_values(row.decision))}"


def _values(decision: PolicyDecision) -> str:
    numbers = {name: value for name, value in decision.applied_hyperparams.model_dump().items() if isinstance(value, int | float)}
    values = ", ".join(f"{name} {value:g}" for name, value in numbers.items())
    clamps = "; ".join(f"{clamp.field} {clamp.proposed:g} clamped to {clamp.applied:g}" for clamp in decision.clamps)
    return f"{values} ({clamps})" if clamps else values


def _doctor(board: RunBoard) -> str:
    """What somebody should act on first."""
    report = board.environment
    if report is None:
        return ""
    ranks, threads = _plural(report.num_ranks, "rank"), _plural(report.threads_per_rank, "thread")
    device = inline(f"{report.device} ({report.device_reason}), {report.dtype}, {ranks}, {threads} each")
    todo = [
        f"**{found.severity}** {code(found.check)}: {inline(found.observed)}. {inline(found.remedy)}"
        for found in report.findings
        if found.severity != "ok"
    ]
    fine = [f"{code(found.check)} {inline(found.observed)}" for found in report.findings if found.severity == "ok"]
    more = (f"{_plural(len(fine), 'check')} fine:", bullets(fine)) if fine else ()
    return "\n\n".join(part for part in ("## Doctor", device, bullets(todo), *more) if part)


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'s' if count != 1 else ''}"


def links(places: Places, board: RunBoard) -> str:
    """The report first, by a path on this very server where it serves it; paths on the machine that trains below."""
    lines: list[str] = []
    if places.report_page:
        lines.append(f"[report with every curve and table]({places.report_page})")
    if places.all_runs:
        lines.append(f"[all runs]({places.all_runs})")
    lines.append(f"run folder, on the machine that trains: {code(places.run_folder)}")
    if places.report_file:
        lines.append(f"the report there: {code(places.report_file)}")
    lines.append(f"its story there: {code(f'mem logs {places.run_folder}')}, with `--workers` what its workers wrote")
    if board.ended is None or board.ended.status != "completed":
        lines.append("the same run id again goes on from the newest validated checkpoint")
    return "## Where things are\n\n" + bullets(lines)
