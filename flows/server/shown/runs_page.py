"""The list of all runs as one HTML page: what `mem runs` prints, with a link to each report."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from flows.commands.inspection.runs import COLUMNS, RunRow, cells_of
from flows.prefect_view.served import page_path
from mem_core.infrastructure.telemetry.html import Cell, Html, chip, counted, element, join, section, table
from mem_core.infrastructure.telemetry.report_page.style import CSS

TONES = {"completed": "good", "interrupted": "warn", "stopped": "warn", "failed": "bad", "unreadable": "bad"}


def render_runs(stores: Mapping[Path, Sequence[RunRow]], now_unix_s: float) -> str:
    """The page as text; in each store the run with the newest sign of life first."""
    head = join(
        (
            Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
            element("title", "All runs: MEM"),
            Html(f"<style>{CSS}</style>"),
        )
    )
    num_runs = sum(len(rows) for rows in stores.values())
    moment = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now_unix_s))
    body = element(
        "main",
        element("h1", "All runs"),
        element("p", f"{counted(num_runs, 'run')} on this machine at {moment}. ", element("a", "Prefect's pages", href="/"), css="quiet"),
        *(_store(store, rows, now_unix_s) for store, rows in stores.items() if rows),
        element("p", "Nothing was trained on this machine yet.") if not num_runs else "",
        element("footer", "Runs in other stores: mem runs --store FOLDER_OR_URL."),
    )
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _store(store: Path, rows: Sequence[RunRow], now_unix_s: float) -> Html:
    ordered = sorted(rows, key=lambda row: -row.last_word_unix_s)
    cells = [_cells(store, row, now_unix_s) for row in ordered]
    return section(str(store), table("Newest sign of life first", (*COLUMNS[:-1], ""), cells, empty=""))


def _cells(store: Path, row: RunRow, now_unix_s: float) -> tuple[Cell, ...]:
    run_id, state, *numbers, _ = cells_of(row, now_unix_s)
    address = page_path(store / row.run_id)
    if row.problem:
        return (run_id, chip(state, TONES.get(state, "plain")), *numbers, row.problem)
    name = element("a", run_id, css="moment", href=address)
    return (name, chip(state, TONES.get(state, "plain")), *(element("span", text, css="moment") for text in numbers), _report(address))


def _report(address: str) -> Html:
    return element("a", "report", href=address)
