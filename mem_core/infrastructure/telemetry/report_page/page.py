"""The run as one HTML page that needs nothing from outside and no script."""

from mem_core.domain.units import format_seconds
from mem_core.infrastructure.telemetry.charts import draw
from mem_core.infrastructure.telemetry.html import Html, contents, counted, element, join, section
from mem_core.infrastructure.telemetry.report_page.curves import all_charts, non_finite_steps
from mem_core.infrastructure.telemetry.report_page.data import ReportData
from mem_core.infrastructure.telemetry.report_page.samples import samples_section
from mem_core.infrastructure.telemetry.report_page.sections import (
    checkpoints_section,
    data_section,
    environment_section,
    evaluation_section,
    faults_section,
    identity_section,
    memory_section,
    policy_section,
    problems_section,
    request_section,
)
from mem_core.infrastructure.telemetry.report_page.style import CSS
from mem_core.infrastructure.telemetry.report_page.summary import goodput_bar, headline, key_numbers, shown_time, status_chip


def render_report(data: ReportData) -> str:
    """The page as text."""
    run_id = data.result.run_id
    head = join(
        (
            Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
            Html("<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"),
            element("title", f"{run_id}: MEM report"),
            Html(f"<style>{CSS}</style>"),
        )
    )
    body = element("main", *_parts(data))
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _parts(data: ReportData) -> tuple[Html, ...]:
    sections = _sections(data)
    return (
        element("h1", "Run ", data.result.run_id, " ", status_chip(data.result)),
        element("p", headline(data), css="headline"),
        key_numbers(data),
        contents(sections),
        *sections,
        element("footer", f"Folded from the journal up to {shown_time(data.timeline.last_unix_s)}. Written by MEM."),
    )


def _sections(data: ReportData) -> tuple[Html, ...]:
    return (
        _charts(data),
        section("Where the time went", goodput_bar(data), note=_goodput_note(data)),
        data_section(data),
        evaluation_section(data),
        samples_section(data),
        faults_section(data),
        checkpoints_section(data),
        policy_section(data),
        memory_section(data),
        environment_section(data),
        identity_section(data),
        request_section(data),
        problems_section(data),
    )


def _charts(data: ReportData) -> Html:
    lost = non_finite_steps(data)
    named = ", ".join(f"{step:,}" for step in lost[:10]) + (", ..." if lost.size > 10 else "")
    note = f"Left out of the curves, since the loss is not a finite number: {counted(lost.size, 'step')} ({named})." if lost.size else ""
    return section("Curves", element("div", *(draw(chart) for chart in all_charts(data)), css="charts"), note=note)


def _goodput_note(data: ReportData) -> str:
    goodput = data.result.goodput
    lived = f"{format_seconds(goodput.lived_s)} in which an attempt lived, {goodput.fraction:.1%} of them productive"
    return f"Every second of the run is in one bucket: {lived}."
