"""The doctor's report for people: short, aligned, worst first."""

import textwrap

from mem_core.domain.environment import EnvironmentReport, Finding
from mem_core.domain.units import format_bytes

_MARKS = {"failure": "FAIL", "warning": "WARN", "notice": "note", "ok": "ok"}


def render_report(report: EnvironmentReport, width: int = 120) -> str:
    """Plain text of the report, lines of at most `width` characters where words allow."""
    column = max((len(finding.check) for finding in report.findings), default=0)
    lines = [_headline(report), ""]
    for finding in report.findings:
        lines += _finding_lines(finding, column, width)
    if report.estimates_bytes:
        sizes = ("training_peak_total", "save_copy_total", "resume_peak_total", "checkpoint")
        listed = ", ".join(f"{name.replace('_', ' ')} {format_bytes(report.estimates_bytes[name])}" for name in sizes)
        lines += ["", *textwrap.wrap(f"Predicted (within 25 %): {listed}", width, subsequent_indent="  ")]
    lines += ["", _verdict(report)]
    return "\n".join(lines)


def _headline(report: EnvironmentReport) -> str:
    ranks = f"{report.num_ranks} rank{'s' if report.num_ranks > 1 else ''}"
    threads = f"{report.threads_per_rank} thread{'s' if report.threads_per_rank > 1 else ''} each"
    return f"{report.device} ({report.device_reason}), {report.dtype}, {ranks}, {threads}"


def _finding_lines(finding: Finding, column: int, width: int) -> list[str]:
    indent = " " * (column + 8)
    parts = [finding.observed + (f"; needed: {finding.needed}" if finding.needed else "")]
    if finding.remedy and finding.severity != "ok":
        parts.append(f"-> {finding.remedy}")
    head = f"  {_MARKS[finding.severity]:<4}  {finding.check:<{column}}  "
    room = max(40, width - len(indent) - 2)  # what follows the first line stands two further in
    wrapped = [textwrap.wrap(part, room, break_long_words=False, break_on_hyphens=False) or [""] for part in parts]
    text = [line for lines in wrapped for line in lines]
    return [(head if index == 0 else indent + "  ") + line for index, line in enumerate(text)]


def _verdict(report: EnvironmentReport) -> str:
    failures = len(report.failures)
    warnings = sum(finding.severity == "warning" for finding in report.findings)
    tail = f" ({warnings} warning{'s' if warnings > 1 else ''})" if warnings else ""
    if failures:
        return f"This cannot run here: {failures} check{'s' if failures > 1 else ''} failed{tail}."
    return f"Ready to run{tail}."
