"""The lower parts of the report: faults, checkpoints, policy, memory, environment, identity, request."""

import json
from collections.abc import Sequence
from typing import Any

from mem_core.domain.events import PolicyDecided
from mem_core.domain.plan import MemoryPlan
from mem_core.domain.results.evaluation import SetFigures, rows_words
from mem_core.domain.run import FaultRecord, SourceShare
from mem_core.domain.units import format_bytes, format_seconds, format_short
from mem_core.infrastructure.telemetry.html import Cell, Html, chip, counted, details, element, escape, join, section, table
from mem_core.infrastructure.telemetry.metrics import figures_of
from mem_core.infrastructure.telemetry.report_page.data import CheckpointRow, ReportData
from mem_core.infrastructure.telemetry.report_page.summary import shown_time

_SEVERITY_TONES = {"ok": "good", "notice": "plain", "warning": "warn", "failure": "bad"}
_MAX_TEXT = 600
_MOMENT = "_unix_s"


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + " ..."


def _code(text: str) -> Html:
    return element("code", text) if text else escape(None)


def _when(time_unix_s: float) -> Html:
    return element("span", shown_time(time_unix_s), css="moment")


def faults_section(data: ReportData) -> Html:
    """Every fault with its moment and what it cost."""
    header = ("when", "kind", "struck at step", "went on from", "recovered in", "what was seen")
    faults = table("Faults met, in order", header, [_fault_row(fault) for fault in data.result.faults], empty="No fault was met.")
    return section("Faults", faults)


def _fault_row(fault: FaultRecord) -> tuple[Cell, ...]:
    recovered = escape("not measured") if fault.recovered_s is None else format_seconds(fault.recovered_s)
    return (_when(fault.time_unix_s), fault.kind, fault.reached_step, fault.step, recovered, _short(fault.detail))


_LEFT_OUT_WORDS = {
    "blank_lines": "blank lines",
    "truncated_documents": "documents cut at data.sequence_length",
    "last_partial_sequence": "the last sequence, which packing could not fill",
    "rows_without_trained_label": "sequences without a token to train on",
}


def data_section(data: ReportData) -> Html:
    """What was trained on, and what was not and why."""
    seen = data.result.data
    if seen is None:
        return Html("")
    shown = "are an epoch" if seen.sources else "see every row once"
    epoch = "" if seen.steps_per_epoch is None else f"{seen.steps_per_epoch:,.4g} steps {shown}"
    amounts: list[tuple[Cell, ...]] = [
        ("files", seen.num_files, ""),
        ("documents", seen.num_documents, f"{seen.num_copies:,} of them copies of others" if seen.num_copies else ""),
        *(_lengths(name, number) for name, number in seen.document_tokens.items()),
        ("sequences trained on", seen.num_sequences, epoch),
        ("sequences held out", seen.num_validation_sequences, "for validation, never trained on"),
        ("tokens", seen.num_tokens, ""),
        ("tokens that count in the loss", seen.trained_tokens, "in an epoch"),
        *((_LEFT_OUT_WORDS.get(kind, kind), number, "not trained on, or not whole") for kind, number in seen.dropped_rows.items()),
        ("bad rows", seen.num_bad_rows, "skipped" if seen.num_bad_rows else "every row could be read"),
    ]
    bad: list[tuple[Cell, ...]] = [(_short(row),) for row in seen.bad_rows]
    more = f" (of {seen.num_bad_rows:,})" if seen.num_bad_rows > len(seen.bad_rows) else ""
    return section(
        "Data",
        table("What the files hold", ("what", "how many", ""), amounts, empty=""),
        table("What an epoch is made of", _MIX, _mix(seen.sources), empty=""),
        table(f"Bad rows that were skipped{more}", ("file, line and reason",), bad, empty=""),
        table("Notes on the rows", ("what",), [(_short(text),) for text in dict.fromkeys(seen.notes)], empty=""),
    )


_MIX = ("source", "weight", "rows", "rows in an epoch", "tokens in an epoch")


def _mix(sources: Sequence[SourceShare]) -> list[tuple[Cell, ...]]:
    """Of sources with weights; nothing where every row is seen once."""
    return [(_short(one.path), f"{one.weight:g}", one.num_rows, one.epoch_rows, one.epoch_tokens) for one in sources]


def _lengths(name: str, num_tokens: int) -> tuple[Cell, ...]:
    """`p95` in words: of how many documents in a hundred that length is not exceeded."""
    words = "the longest" if name == "longest" else f"at {name.removeprefix('p')} of 100"
    return (f"tokens of a document, {words}", num_tokens, "before it is cut")


def evaluation_section(data: ReportData) -> Html:
    """Every figure of held-out rows, the newest first, and which step was the best. Nothing where rows were never looked at."""
    result = data.result
    found = {event.step: event for event in data.timeline.evaluations if event.step <= result.applied_steps}
    best = result.best.step if result.best is not None else None
    rows = [
        _evaluated(f"{step:,}{', the best' if step == best else ''}", name, figures)
        for step in sorted(found, reverse=True)
        for name, figures in figures_of(found[step]).items()
    ]
    if not rows:
        return Html("")
    stopped = result.stopped_early
    note = f"Stopped early after step {stopped.step:,}: {stopped.metric} no longer fell." if stopped is not None else ""
    header = ("after step", "set", "loss", "perplexity", "tokens right", "over")
    return section("Held-out rows", table("Evaluations", header, rows, empty=""), note=note)


def _evaluated(step: str, name: str, figures: SetFigures) -> tuple[Cell, ...]:
    right = f"{figures.token_accuracy:.1%}" if figures.token_accuracy is not None else "–"
    over = rows_words(figures.rows, figures.rows_total) if figures.rows_total else "–"
    return (step, name, f"{figures.loss:.4f}", f"{figures.perplexity:.4g}", right, over)


def checkpoints_section(data: ReportData) -> Html:
    """Every checkpoint with its verdict; those that rotation took, as it should, are folded away."""
    header = ("step", "size", "saved in", "verdict", "level", "weights digest", "now")
    rows = [data.timeline.checkpoints[step] for step in sorted(data.timeline.checkpoints)]
    past = [_checkpoint_row(row) for row in rows if _is_past(row)]
    present = [_checkpoint_row(row) for row in rows if not _is_past(row)]
    parts = [table("Checkpoints that are there, were rejected or are not judged", header, present, empty="No checkpoint was written.")]
    if past:
        summary = f"{counted(len(past), 'validated checkpoint')} taken away by rotation"
        parts.append(details(summary, table("Rotated", header, past, empty="")))
    return section("Checkpoints", *parts)


def _is_past(row: CheckpointRow) -> bool:
    return bool(row.removed) and row.verdict is not None and row.verdict.valid


def _checkpoint_row(row: CheckpointRow) -> tuple[Cell, ...]:
    verdict = row.verdict
    if verdict is None:
        judged = chip("not judged", "plain")
    else:
        word = chip("valid", "good") if verdict.valid else chip("rejected", "bad")
        judged = join((word, " ", _short("; ".join(verdict.reasons))))
    saved = format_short(row.save_s) + (f" (saved {row.times_saved} times)" if row.times_saved > 1 else "")
    fate = f"removed: {_short(row.removed)}" if row.removed else "kept"
    return (row.step, format_bytes(row.size_bytes), saved, judged, verdict.level if verdict else None, _code(row.weights_digest[:16]), fate)


def policy_section(data: ReportData) -> Html:
    """Decisions that changed, clamped or refused something; plain ones are only counted."""
    decisions = data.timeline.decisions
    notable = [event for event in decisions if _is_notable(event)]
    plain = len(decisions) - len(notable)
    note = (
        f"{counted(len(decisions), 'decision')} in all; not listed: {plain:,} that let the request's own values pass." if decisions else ""
    )
    header = ("segment", "steps", "decision", "reason", "applied", "clamps and refusals", "directive as received")
    rows = [_decision_row(event) for event in notable]
    return section("Policy", table("Decisions of the policy engine", header, rows, empty="Nothing was clamped or refused."), note=note)


def _is_notable(event: PolicyDecided) -> bool:
    return bool(event.directive_text or event.decision.clamps or not event.decision.allow or event.decision.not_applicable)


def _decision_row(event: PolicyDecided) -> tuple[Cell, ...]:
    decision, applied = event.decision, event.decision.applied_hyperparams
    clamps = [f"{c.field}: asked {c.proposed:g}, applied {c.applied:g} (bound {c.bound}; {c.reason})" for c in decision.clamps]
    ignored = [f"{name}: not applicable" for name in decision.not_applicable]
    refused = [decision.detail] if decision.detail and not decision.allow else []
    return (
        event.segment_index,
        f"{event.plan.from_step:,} to {event.plan.until_step:,}",
        chip("allowed", "good") if decision.allow else chip("refused", "bad"),
        decision.reason,
        f"lr × {applied.lr_multiplier:g}, clip {applied.gradient_clip_norm:g}",
        join(element("div", _short(text)) for text in (*clamps, *refused, *ignored)) or None,
        _code(_short(event.directive_text or "")),
    )


def memory_section(data: ReportData) -> Html:
    """Changes of the memory plan, each with its reason."""
    header = ("from batch", "plan", "reason", "observed", "limit")
    rows: list[tuple[Cell, ...]] = [
        (
            event.change.batch_index,
            _plan_words(event.change.plan),
            _short(event.change.reason),
            format_bytes(event.observed_bytes) if event.observed_bytes else None,
            format_bytes(event.limit_bytes) if event.limit_bytes else None,
        )
        for event in data.timeline.plan_changes
    ]
    return section("Memory plan", table("Changes of the memory plan", header, rows, empty="The plan never changed."))


def _plan_words(plan: MemoryPlan) -> str:
    rows = f"{plan.micro_batch_rows} rows" if plan.micro_batch_rows else "any number of rows"
    tokens = f", {plan.micro_batch_tokens:,} tokens" if plan.micro_batch_tokens else ""
    recompute = ", activations recomputed" if plan.activation_checkpointing else ""
    offload = f", optimizer on {plan.offload_optimizer}" if plan.offload_optimizer != "none" else ""
    return rows + tokens + recompute + offload


def environment_section(data: ReportData) -> Html:
    """What the doctor found."""
    report = data.timeline.environment
    if report is None:
        return section("Environment", element("p", "The doctor has not reported.", css="quiet"))
    cores, threads = counted(report.num_cores, "core"), counted(report.threads_per_rank, "thread")
    note = f"{report.device} ({report.device_reason}), {report.dtype}, {cores}, {threads} per rank."
    rows: list[tuple[Cell, ...]] = [
        (chip(finding.severity, _SEVERITY_TONES[finding.severity]), finding.check, _short(finding.observed), finding.needed, finding.remedy)
        for finding in sorted(report.findings, key=lambda finding: -list(_SEVERITY_TONES).index(finding.severity))
    ]
    findings = table("The doctor's findings", ("severity", "check", "observed", "needed", "remedy"), rows, empty="No findings.")
    limits: list[tuple[Cell, ...]] = [
        (budget.kind, name, format_bytes(size_bytes), "binds" if name == budget.binding_limit else "")
        for budget in report.memory
        for name, size_bytes in budget.limits_bytes.items()
    ]
    return section("Environment", findings, table("Memory limits", ("memory", "limit", "size", ""), limits, empty=""), note=note)


def identity_section(data: ReportData) -> Html:
    """Digests, fingerprints and versions: what two runs are compared by."""
    result = data.result
    facts = {
        "trajectory digest": result.trajectory_digest,
        "weights digest": result.weights_digest,
        **{f"figures: {name}": address for name, address in result.logged_to.items()},
        **_flat({name: value for name, value in data.facts.items() if name not in ("versions", "run_id")}),
        **{f"version of {name}": words for name, words in _versions(data).items()},
    }
    rows: list[tuple[Cell, ...]] = [(name, _code(_short(str(value)))) for name, value in facts.items()]
    return section("Identity", table("Digests, fingerprints and versions", ("what", "value"), rows, empty=""))


def _versions(data: ReportData) -> dict[str, str]:
    """Each once: that of the newest attempt, with the one that the run was born with where they differ."""
    now = data.timeline.environment.versions if data.timeline.environment else {}
    stored = data.facts.get("versions")
    born = {name: str(value) for name, value in stored.items()} if isinstance(stored, dict) else {}
    versions = {**born, **now}
    return {name: f"{value} (born with {born[name]})" if born.get(name, value) != value else value for name, value in versions.items()}


def _flat(tree: dict[str, Any], prefix: str = "", depth: int = 3) -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and depth > 0:
            flat.update(_flat(value, f"{prefix}{name} / ", depth - 1))
        elif name.endswith(_MOMENT) and isinstance(value, int | float):
            flat[f"{prefix}{name.removesuffix(_MOMENT)}"] = shown_time(value)
        elif value is not None:
            flat[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value)
    return flat


def request_section(data: ReportData) -> Html:
    """The request as resolved."""
    if not data.request:
        return Html("")
    text = json.dumps(data.request, indent=2, ensure_ascii=False)
    return section("Request", details("The request with every default filled in", element("pre", text, tabindex="0")))


def problems_section(data: ReportData) -> Html:
    """Notes of the run, and what this report could not read."""
    told = set(data.result.data.notes) if data.result.data else set[str]()
    parts = [table("Notes in the journal", ("when", "note", "times"), _noted(data, told), empty="")]
    problems: list[tuple[Cell, ...]] = [(problem,) for problem in data.problems]
    parts.append(table("Left out because it could not be read", ("what",), problems, empty=""))
    return section("Notes", *parts) if any(parts) else Html("")


def _noted(data: ReportData, told: set[str]) -> list[tuple[Cell, ...]]:
    """Each note once, at the moment when it was first made; those that stand elsewhere on the page not at all."""
    found: dict[str, tuple[float, int]] = {}
    for time_s, text in data.timeline.notes:
        first_s, times = found.get(text, (time_s, 0))
        found[text] = (first_s, times + 1)
    return [(_when(time_s), _short(text), times) for text, (time_s, times) in found.items() if text not in told]
