"""MEM's own pages beside Prefect's: the list of all runs and the report of each, at `/mem/` of the same server.

Only runs of stores that MEM trained into on this machine are shown. A path from outside is never joined to a folder: it is looked for
among the names that are there. Pages are sent without the right to run a script, or to act as the server that sends them.
"""

import subprocess
import sys
import threading
import time
from asyncio import to_thread
from dataclasses import dataclass, field
from pathlib import Path

from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response

from flows.prefect_view.served import PREFIX, known_stores
from flows.server.gate import App, Receive, Scope, Send
from mem_core.infrastructure.storage.journal_file import attempt_files
from mem_core.infrastructure.storage.reading import read_regular
from mem_core.infrastructure.telemetry.report_page import REPORT_NAME

POLICY = "sandbox; default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'self'"
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
}
REPORT_LIMIT_BYTES = 64 << 20
DRAWING_LIMIT_S = 120.0
FRESH_S = 30.0
LIST_FRESH_S = 2.0


@dataclass
class Pages:
    """An ASGI application that answers what begins with `/mem` and hands everything else to `app`."""

    app: App
    mem_home: Path
    _drawing: threading.Lock = field(default_factory=threading.Lock)
    _listing: threading.Lock = field(default_factory=threading.Lock)
    _listed: str = ""
    _listed_unix_s: float = float("-inf")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection."""
        if scope["type"] != "http" or not f"{scope['path']}/".startswith(PREFIX):
            await self.app(scope, receive, send)
            return
        await (await to_thread(self.answer, scope["method"], scope["path"]))(scope, receive, send)

    def answer(self, method: str, path: str) -> Response:
        """The page at a path."""
        if method not in ("GET", "HEAD"):
            return PlainTextResponse("These pages are only read.\n", 405, {**HEADERS, "allow": "GET, HEAD"})
        if path == PREFIX.rstrip("/"):
            return RedirectResponse(PREFIX, headers=HEADERS)
        if path == PREFIX:
            return HTMLResponse(self._all_runs(), headers=HEADERS)
        run_folder = self._run_at(path)
        if run_folder is None:
            return PlainTextResponse("There is no such page. All runs: /mem/\n", 404, HEADERS)
        return self._report(run_folder, draw=method == "GET")

    def _all_runs(self) -> str:
        from flows.commands.inspection.runs import local_row
        from flows.server.shown.runs_page import render_runs

        now_unix_s = time.time()
        with self._listing:
            if now_unix_s - self._listed_unix_s > LIST_FRESH_S:
                stores = {store: [local_row(folder) for folder in _run_folders(store)] for store in known_stores(self.mem_home).values()}
                self._listed, self._listed_unix_s = render_runs(stores, now_unix_s), now_unix_s
            return self._listed

    def _run_at(self, path: str) -> Path | None:
        """The run folder that a path names: one of those that lie in a known store."""
        parts = path.removeprefix(PREFIX).split("/")
        if len(parts) != 4 or (parts[0], parts[3]) != ("runs", REPORT_NAME):
            return None
        store = known_stores(self.mem_home).get(parts[1])
        found = _run_folders(store) if store is not None else []
        return next((folder for folder in found if folder.name == parts[2]), None)

    def _report(self, run_folder: Path, *, draw: bool) -> Response:
        """As it was written at the end of the attempt; of a run that goes on, drawn when it is looked at."""
        if draw and _is_stale(run_folder, time.time()):
            with self._drawing:  # one at a time: it takes a second of a processor and half a gigabyte
                if _is_stale(run_folder, time.time()):
                    _draw(run_folder)
        elif not draw:
            return HTMLResponse("", headers=HEADERS)
        try:
            path = run_folder / REPORT_NAME
            if path.is_symlink():
                raise OSError("a link, not a report")
            return HTMLResponse(read_regular(path, REPORT_LIMIT_BYTES), headers=HEADERS)
        except OSError:
            return PlainTextResponse("This run has no report, and none could be drawn: mem report says why.\n", 404, HEADERS)


def _run_folders(store: Path) -> list[Path]:
    """The run folders of a store; a link that leads elsewhere is none."""
    try:
        return [path for path in sorted(store.iterdir()) if not path.is_symlink() and (path / "journal").is_dir()]
    except OSError:
        return []


def _is_stale(run_folder: Path, now_unix_s: float) -> bool:
    """Whether the journal has gone on since the report was drawn."""
    try:
        drawn_unix_s = (run_folder / REPORT_NAME).lstat().st_mtime
        heard_unix_s = max((path.lstat().st_mtime for _, path in attempt_files(run_folder / "journal")), default=0.0)
    except OSError:
        return True
    return heard_unix_s > drawn_unix_s and now_unix_s - drawn_unix_s > FRESH_S


def _draw(run_folder: Path) -> None:
    """In a process of its own, since what draws would stay in this one's memory."""
    command = [sys.executable, "-P", "-m", "flows.cli", "report", str(run_folder)]
    try:
        subprocess.run(command, capture_output=True, timeout=DRAWING_LIMIT_S, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return
