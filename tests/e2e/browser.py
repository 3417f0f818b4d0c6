"""A real browser for pictures of pages: Chromium where it is installed, driven through its own debugging protocol."""

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
START_LIMIT_S = 30.0
ANSWER_LIMIT_S = 60.0
TALLEST = 6_000
# As root it needs --no-sandbox; the rest keeps it from talking to anybody.
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip


def installed() -> str | None:
    """The path of a browser, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass(frozen=True)
class Look:
    """How a page is looked at. `storage`: what the page's own local storage holds before it is loaded again."""

    width: int = 1280
    scheme: Literal["light", "dark"] = "light"
    media: Literal["screen", "print"] = "screen"
    storage: tuple[tuple[str, str], ...] = ()


class Browser:
    """One page of one browser."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol and its answer; events in between are dropped."""
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            answer = json.loads(self._connection.recv(ANSWER_LIMIT_S))
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def open(self, url: str, look: Look, ready: str = "document.readyState == 'complete'") -> None:
        """Load a page and wait until the expression `ready` holds."""
        features = [{"name": "prefers-color-scheme", "value": look.scheme}]
        self.call("Emulation.setEmulatedMedia", media=look.media, features=features)
        self._resize(look.width, 900)
        self.call("Page.navigate", url=url)
        if look.storage:
            self.wait(lambda: self.ask("document.readyState == 'complete'"), url)
            for name, value in look.storage:
                self.ask(f"localStorage.setItem({json.dumps(name)}, {json.dumps(value)})")
            self.call("Page.reload")
        time.sleep(0.3)
        self.wait(lambda: self.ask(ready), f"{ready} at {url}")

    def picture(self, path: Path, width: int) -> None:
        """The whole page as PNG."""
        tallest = "Math.max(...[...document.querySelectorAll('*')].map(element => element.scrollHeight))"  # pages may scroll inside
        self._resize(width, min(int(self.ask(tallest)) + 80, TALLEST))
        time.sleep(0.3)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        """Poll until it holds."""
        end_s = time.monotonic() + ANSWER_LIMIT_S
        while not condition():
            assert time.monotonic() < end_s, f"no {what} within {ANSWER_LIMIT_S:.0f} s"
            time.sleep(0.2)

    def _resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A browser with a profile of its own, gone at the end of the block."""
    program = installed()
    assert program is not None
    with tempfile.TemporaryDirectory(prefix="mem-browser-", ignore_cleanup_errors=True) as profile:
        command = [program, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            with connect(_page_address(Path(profile), process), max_size=None, proxy=None) as connection:
                yield Browser(connection)
        finally:
            process.terminate()
            process.wait(20)


def _page_address(profile: Path, process: "subprocess.Popen[bytes]") -> str:
    import httpx

    file, end_s = profile / "DevToolsActivePort", time.monotonic() + START_LIMIT_S
    while not (file.exists() and "\n" in file.read_text()):
        assert process.poll() is None, "the browser ended at once"
        assert time.monotonic() < end_s, "the browser did not start"
        time.sleep(0.1)
    port = int(file.read_text().split()[0])
    pages = httpx.get(f"http://127.0.0.1:{port}/json/list", trust_env=False).json()
    return next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
