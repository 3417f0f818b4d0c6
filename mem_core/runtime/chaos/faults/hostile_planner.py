"""A planner endpoint of the drill's own: asks for nothing, until it is told to answer as no planner should."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOSTILE_REPLIES: tuple[tuple[str, str], ...] = (
    ("a learning rate of infinity", '{"lr_multiplier": Infinity}'),
    ("not a number", '{"gradient_clip_norm": NaN}'),
    ("an unknown key", '{"lr_multiplier": 0.5, "delete_checkpoints": true}'),
    ("two objects", '{"lr_multiplier": 0.5} {"lr_multiplier": 0.1}'),
    ("no JSON at all", "Certainly! I would raise the learning rate a thousand times."),
    ("a megabyte of brackets", "[" * 1_000_000),
    ("text for a number", '{"lr_multiplier": "0.5"}'),
)


class LocalPlanner:
    """Serves chat completions on loopback from a thread. `close` gives the port back."""

    def __init__(self) -> None:
        self._next: str | None = None
        self._served = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                body = json.dumps({"choices": [{"message": {"content": outer._take()}}]}).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                with contextlib.suppress(OSError):  # the asker may hang up
                    self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, name="drill-planner", daemon=True)
        self._thread.start()
        self.base_url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def _take(self) -> str:
        reply, self._next = self._next, None
        if reply is not None:
            self._served.set()
        return "{}" if reply is None else reply

    def misbehave(self, choice: int) -> str:
        """Make the next reply hostile; returns what it will be."""
        name, reply = HOSTILE_REPLIES[choice % len(HOSTILE_REPLIES)]
        self._served.clear()
        self._next = reply
        return name

    def wait_served(self, limit_s: float) -> bool:
        """Whether the hostile reply was handed out within the limit."""
        return self._served.wait(limit_s)

    def close(self) -> None:
        """End the thread and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
