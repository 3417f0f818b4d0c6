"""The scored report of a drill: values, verdict, text. Pure."""

from html import escape
from typing import Any, Literal

from mem_core.domain.units import Value
from mem_core.runtime.chaos.real_chaos import MetFault


class FaultScore(Value):
    """One planned fault and what became of it."""

    number: int
    kind: str
    title: str
    planned: str
    fired: bool
    proof: str
    step: int = 0
    time_unix_s: float = 0.0
    recovered_s: float | None = None
    disturbed_s: float = 0.0
    steps_redone: int = 0
    verdict: Literal["survived", "not_fired", "not_recovered"]


class InvariantScore(Value):
    """One promise, whether it held, and what was seen."""

    name: str
    held: bool
    seen: str


class DrillReport(Value):
    """All of a drill. `passed` means that every invariant held and every planned fault fired and was survived."""

    passed: bool
    run_id: str
    run_folder: str
    twin_run_id: str
    twin_folder: str
    seed: int
    max_steps: int
    num_ranks: int
    weights_digest: str = ""
    twin_weights_digest: str = ""
    trajectory_digest: str = ""
    twin_trajectory_digest: str = ""
    kinds_fired: tuple[str, ...] = ()
    kinds_left_out: tuple[str, ...] = ()
    faults: tuple[FaultScore, ...] = ()
    invariants: tuple[InvariantScore, ...] = ()
    starts: tuple[int, ...] = ()
    """Exit code of each start of the run's command."""
    duration_s: float = 0.0
    goodput: dict[str, Any] = {}
    restarts: int = 0
    skipped_steps: int = 0
    ooms_absorbed: int = 0
    ooms_fatal: int = 0


def score_fault(met: MetFault) -> FaultScore:
    """A verdict on one fault."""
    verdict: Literal["survived", "not_fired", "not_recovered"] = (
        "not_fired" if not met.fired else "survived" if met.recovered_s is not None else "not_recovered"
    )
    return FaultScore(
        number=met.number, kind=met.kind, title=met.title, planned=met.planned, fired=met.fired, proof=met.proof, step=met.step,
        time_unix_s=met.time_unix_s, recovered_s=met.recovered_s, disturbed_s=met.disturbed_s, steps_redone=met.steps_redone,
        verdict=verdict,
    )  # fmt: skip


def passed(faults: tuple[FaultScore, ...], invariants: tuple[InvariantScore, ...]) -> bool:
    """Exit 0 depends on this alone."""
    return all(fault.verdict == "survived" for fault in faults) and all(item.held for item in invariants)


def same(name: str, first: str, second: str) -> InvariantScore:
    """Two digests are there and equal."""
    return InvariantScore(name=name, held=bool(first) and first == second, seen=f"{first[:16] or 'none'} and {second[:16] or 'none'}")


def text_report(report: DrillReport) -> str:
    """For people: verdict first, then promises, then each fault."""
    survived = sum(fault.verdict == "survived" for fault in report.faults)
    recovered = sorted(fault.recovered_s for fault in report.faults if fault.recovered_s is not None)
    median = f", median recovery {recovered[len(recovered) // 2]:.2f} s" if recovered else ""
    lines = [
        f"drill {'passed' if report.passed else 'FAILED'}: {survived} of {len(report.faults)} faults of {len(report.kinds_fired)} kinds "
        f"fired and survived in {report.max_steps} steps{median}",
        *(f"  {'held  ' if item.held else 'BROKEN'}  {item.name}: {item.seen}" for item in report.invariants),
    ]
    lines.extend(_fault_line(fault) for fault in report.faults)
    if report.kinds_left_out:
        lines.append(f"  left out here: {', '.join(report.kinds_left_out)}")
    return "\n".join(lines)


def _fault_line(fault: FaultScore) -> str:
    recovery = (
        f"recovered in {fault.recovered_s:.2f} s, {fault.steps_redone} steps redone" if fault.recovered_s is not None else "not recovered"
    )
    words = recovery if fault.fired else "did not fire"
    return f"  {fault.verdict:13}  step {fault.step:>7}  {fault.kind:22}  {words}: {fault.proof}"


def html_report(report: DrillReport) -> str:
    """The same as one self-contained page."""
    faults = "".join(
        f"<tr class={fault.verdict}><td>{fault.number}<td>{fault.verdict}<td>{fault.step}<td>{escape(fault.title)}"
        f"<td>{'' if fault.recovered_s is None else f'{fault.recovered_s:.2f}'}<td>{fault.steps_redone}<td>{escape(fault.proof)}</tr>"
        for fault in report.faults
    )
    promises = "".join(
        f"<tr class={'survived' if item.held else 'broken'}><td>{'held' if item.held else 'BROKEN'}<td>{escape(item.name)}"
        f"<td>{escape(item.seen)}</tr>"
        for item in report.invariants
    )
    verdict = text_report(report).splitlines()[0]
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>drill {escape(report.run_id)}</title><style>{_STYLE}</style>"
        f"<h1>{escape(verdict)}</h1><h2>Promises</h2><table>{promises}</table><h2>Faults</h2><table><tr><th>#<th>verdict<th>step<th>fault"
        f"<th>recovered s<th>steps redone<th>proof</tr>{faults}</table></html>"
    )


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:75rem;padding:0 1rem}table{border-collapse:collapse;width:100%}"
    "td,th{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #8884;vertical-align:top}h1{font-size:1.3rem}"
    ".not_fired,.not_recovered,.broken{background:#c003}@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}}"
)
