"""The relay before an object store: passes bytes on, answers 503 or resets when it is told to, and is itself again afterwards."""

import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from mem_core.runtime.chaos.faults.store_relay import StoreRelay

PART = b"x" * 300_000


class Store(BaseHTTPRequestHandler):
    """Answers a PUT with the number of bytes it got."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(b"here")

    def do_PUT(self) -> None:
        self._answer(str(len(self.rfile.read(int(self.headers["Content-Length"])))).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def relay() -> Iterator[StoreRelay]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Store)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    made = StoreRelay(f"http://127.0.0.1:{server.server_address[1]}")
    yield made
    made.close()
    server.shutdown()
    server.server_close()
    thread.join()


def put(link: http.client.HTTPConnection) -> tuple[int, bytes]:
    link.request("PUT", "/object", body=PART)
    reply = link.getresponse()
    return reply.status, reply.read()


def test_bytes_pass_on_and_connections_are_kept(relay: StoreRelay) -> None:
    """Two uploads over one connection arrive whole; nothing counts as refused."""
    link = http.client.HTTPConnection("127.0.0.1", relay.port, timeout=10)
    assert put(link) == put(link) == (200, str(len(PART)).encode())
    link.close()
    assert relay.refused == 0


def test_errors_are_answered_whole_and_end_when_told(relay: StoreRelay) -> None:
    """An upload under way meets 503 after its body was taken, a stranger too; afterwards the store answers again."""
    relay.misbehave("errors")
    link = http.client.HTTPConnection("127.0.0.1", relay.port, timeout=10)
    status, body = put(link)
    link.close()
    assert (status, b"SlowDown" in body, relay.probe()) == (503, True, "503")
    assert relay.refused == 2
    relay.misbehave(None)
    assert (relay.probe(), relay.refused) == ("200", 0)


def test_resets_cut_what_is_open_and_refuse_what_is_new(relay: StoreRelay) -> None:
    """A kept connection dies, a new one too; afterwards the store answers again."""
    link = http.client.HTTPConnection("127.0.0.1", relay.port, timeout=10)
    assert put(link)[0] == 200
    relay.misbehave("resets")
    with pytest.raises((OSError, http.client.HTTPException)):
        put(link)
    link.close()
    assert relay.probe() in ("ConnectionResetError", "RemoteDisconnected", "BrokenPipeError")
    relay.misbehave(None)
    assert relay.probe() == "200"
