"""A `RunResult` as people see it in a notebook or as text; light imports only."""

from mem_core.domain.results.evaluation import rows_words
from mem_core.domain.run import BETWEEN_ATTEMPTS, RunResult
from mem_core.domain.units import format_bytes, format_seconds
from mem_core.infrastructure.telemetry.html import Html, element, escape, join

_COLOURS = {"completed": "#2f9e6b", "interrupted": "#b8860b", "failed": "#c4473a", "running": "#5b7fd1"}


def result_facts(result: RunResult) -> list[tuple[str, str]]:
    """(name, value) pairs in the order in which people ask for them; shared by notebook and terminal."""
    counts, memory, goodput = result.checkpoints, result.memory, result.goodput
    num_recovered = sum(fault.recovered_s is not None for fault in result.faults)
    budget = f" of {format_bytes(memory.budget_bytes)} ({memory.binding_limit})" if memory.budget_bytes else ""
    facts = [
        ("forked from", _origin(result)),
        ("steps", f"{result.applied_steps:,} applied, {result.skipped_steps:,} skipped{_epochs(result)}"),
        (
            "loss",
            f"{_number(result.loss_first)} → {_number(result.loss_last)}, validation {_validation(result)}",
        ),
        *(
            (f"held out: {name}" if len(result.evaluation) > 1 else "held out", figures.words())
            for name, figures in result.evaluation.items()
        ),
        ("best", f"step {result.best.step:,}, {result.best.metric} {result.best.value:.4f}" if result.best else ""),
        ("stopped early", f"after step {result.stopped_early.step:,}" if result.stopped_early else ""),
        ("samples", result.samples.words() if result.samples else ""),
        ("tokens", f"{result.tokens:,} at {result.tokens_per_s:,.0f} a second of training"),
        ("goodput", f"{goodput.fraction:.1%} of {format_seconds(goodput.lived_s)}"),
        ("faults", f"{len(result.faults):,} met, {num_recovered:,} recoveries measured, {result.restarts:,} restarts"),
        ("out of memory", f"{result.ooms_absorbed:,} absorbed, {result.ooms_fatal:,} fatal"),
        ("memory", f"peak {format_bytes(memory.peak_bytes)}{budget}" if memory.peak_bytes else ""),
        ("checkpoints", f"{counts.written:,} written, {counts.validated:,} validated, {counts.rejected:,} rejected, {counts.kept:,} kept"),
        ("remote copies", f"{result.mirror} in {result.mirror.url}" if result.mirror else ""),
        ("policy", f"{result.policy.decisions:,} decisions, {result.policy.clamped:,} clamped, {result.policy.refused:,} refused"),
        ("device", result.device),
        ("trajectory digest", result.trajectory_digest),
        ("weights digest", result.weights_digest),
        ("message", result.message),
        ("export", (result.export.folder or f"none: {result.export.problem}") if result.export else ""),
        *((f"figures: {name}", address) for name, address in result.logged_to.items()),
        ("report", result.report_url),
        ("run folder", result.run_folder),
    ]
    return [(name, value) for name, value in facts if value]


def result_html(result: RunResult) -> str:
    """The result as an HTML fragment for `_repr_html_`: self-contained, escaped, readable on light and dark pages."""
    colour = _COLOURS[result.status]
    word = element("strong", result.status, style=f"color:{colour};border:1px solid {colour};border-radius:9px;padding:0 7px")
    title = element("div", element("strong", "Run ", result.run_id), " ", word, style="font-size:1.15em;margin-bottom:6px")
    rows = join(
        element(
            "tr",
            element("th", name, scope="row", style="text-align:left;padding-right:14px"),
            element("td", value, style="text-align:left"),
        )
        for name, value in result_facts(result)
    )
    return element("div", title, element("table", rows), _goodput_words(result))


def _goodput_words(result: RunResult) -> Html:
    lived_s = result.goodput.lived_s
    if lived_s <= 0:
        return escape("")
    seconds = result.goodput.seconds.items()
    shares = ", ".join(f"{name} {value / lived_s:.1%}" for name, value in seconds if name != BETWEEN_ATTEMPTS)
    return element("div", f"Time: {shares}", style="opacity:0.75;margin-top:4px")


def result_text(result: RunResult) -> str:
    """The result as lines of plain text for a terminal."""
    rows = [f"  {name:<18} {value}" for name, value in result_facts(result)]
    faults = [f"    {fault.kind} at step {fault.step:,}: {_recovery(fault.recovered_s)}" for fault in result.faults[-5:]]
    newest = ["  last faults", *faults] if faults else []
    return "\n".join([f"run {result.run_id}: {result.status}", *rows, *newest])


def _origin(result: RunResult) -> str:
    origin = result.forked_from
    return f"{origin.run_id} at step {origin.step:,}: {origin.changes()}" if origin is not None else ""


def _epochs(result: RunResult) -> str:
    return f", {result.epochs:.3g} epochs" if result.epochs is not None else ""


def _recovery(recovered_s: float | None) -> str:
    return "recovery not measured" if recovered_s is None else f"recovered in {format_seconds(recovered_s)}"


def _validation(result: RunResult) -> str:
    words = rows_words(result.validation_rows, result.validation_rows_total)
    return f"{_number(result.validation_loss)}{f' over {words}' if words else ''}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
