"""A relay between a run and its object store that can be told to misbehave: every connection reset, or every request answered 503.

It passes bytes on as they are, so that signatures over host and headers stay right; hence it needs an endpoint without TLS.
"""

import contextlib
import http.client
import socket
import struct
import threading
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Literal
from urllib.parse import urlsplit

BLOCK_BYTES = 1 << 16
CONNECT_LIMIT_S = 10.0
Misbehaviour = Literal["errors", "resets"]
BODY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>drill</Message></Error>"
REFUSAL = b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (
    len(BODY),
    BODY,
)


class StoreRelay:
    """Listens on loopback in front of `upstream` (http://host:port) from threads. `close` gives the port back."""

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._how: Misbehaviour | None = None
        self.refused = 0
        outer = self

        class Handler(BaseRequestHandler):
            def handle(self) -> None:
                outer._serve(self.request)

        class Server(ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, name="drill-relay", daemon=True)
        self._thread.start()
        self.port = int(self._server.server_address[1])
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def misbehave(self, how: Misbehaviour | None) -> None:
        """From now on, until told otherwise; connections that are open now are cut. `refused` counts anew."""
        with self._lock:
            self._how, self.refused = how, 0
            cut = list(self._open) if how else []
        for link in cut:
            _reset(link, in_use=True)

    def probe(self) -> str:
        """What a stranger gets who asks now: a status code, or the name of the error."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=CONNECT_LIMIT_S)
        try:
            link.request("GET", "/")
            return str(link.getresponse().status)
        except (OSError, http.client.HTTPException) as exc:
            return type(exc).__name__
        finally:
            link.close()

    def close(self) -> None:
        """End the threads."""
        self.misbehave("resets")
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _serve(self, client: socket.socket) -> None:
        with self._lock:
            how = self._how
            self.refused += how is not None
        if how == "errors":
            _answer_503(client)
        elif how == "resets":
            _reset(client)
        else:
            self._pass_on(client)

    def _pass_on(self, client: socket.socket) -> None:
        try:
            store = socket.create_connection(self._upstream, timeout=CONNECT_LIMIT_S)
        except OSError:
            return _reset(client)
        store.settimeout(None)
        with self._lock:
            self._open |= {client, store}
        back = threading.Thread(target=_pump, args=(store, client), daemon=True)
        back.start()
        try:
            _pump(client, store)
            back.join()
        finally:
            with self._lock:
                self._open -= {client, store}
            store.close()
        return None


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(BLOCK_BYTES):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _answer_503(client: socket.socket) -> None:
    """After the head of the request, or the peer would take the answer for that of an earlier one."""
    client.settimeout(CONNECT_LIMIT_S)
    head = b""
    with contextlib.suppress(OSError):
        while b"\r\n\r\n" not in head and len(head) < BLOCK_BYTES:
            data = client.recv(BLOCK_BYTES)
            if not data:
                return
            head += data
        client.sendall(REFUSAL)
        client.shutdown(socket.SHUT_WR)
        while client.recv(BLOCK_BYTES):  # the rest of an upload: closing with unread bytes would be a reset
            pass


def _reset(link: socket.socket, *, in_use: bool = False) -> None:
    """Close so that the peer sees a reset, not an orderly end. One `in_use` is shut down first, which wakes whoever reads from it."""
    with contextlib.suppress(OSError):
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if in_use:
            link.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        link.close()
