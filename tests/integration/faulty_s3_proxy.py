"""A small HTTP proxy in front of an S3 server that does one wrong thing at one chosen call."""

import http.client
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Fault = Literal["500", "503", "reset", "lost reply", "timeout", "slow", "expired", "short write", "short read"]
FAULTS: tuple[Fault, ...] = ("500", "503", "reset", "lost reply", "timeout", "slow", "expired", "short write", "short read")
_ERRORS = {"500": (500, "InternalError"), "503": (503, "SlowDown"), "expired": (400, "ExpiredToken")}
HANG_S = 2.0


class Proxy:
    """Counts calls; the call number `at` (from 0), and with `repeat` as many after it, meet `fault`. `fired` says how often it did.

    With `only`, calls are counted whose path and query hold one of these texts, and no other.
    """

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream.removeprefix("http://")
        self._lock = threading.Lock()
        self.reset(-1, "500")

    def reset(self, at: int, fault: Fault, repeat: int = 1, only: tuple[str, ...] = ()) -> None:
        """Start counting anew."""
        with self._lock:
            self.calls, self.fired, self.at, self.fault, self.repeat, self.only = 0, 0, at, fault, repeat, only

    def next_fault(self, path: str) -> Fault | None:
        with self._lock:
            if self.only and not any(text in path for text in self.only):
                return None
            number = self.calls
            self.calls += 1
            if self.at < 0 or not self.at <= number < self.at + self.repeat:
                return None
            self.fired += 1
            return self.fault

    @contextmanager
    def serve(self) -> Iterator[str]:
        """The proxy's own endpoint."""
        proxy = self

        class Handler(_Handler):
            owner = proxy

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def forward(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self._upstream, timeout=30)
        try:
            connection.request(method, path, body=body, headers=headers)
            reply = connection.getresponse()
            return reply.status, reply.getheaders(), reply.read()
        finally:
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: Proxy

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _handle(self) -> None:
        fault = self.owner.next_fault(self.path)
        if fault == "short write":
            self.rfile.read(min(int(self.headers.get("Content-Length") or 0), 10))
            return self._reset()
        body = self._body()
        match fault:
            case "500" | "503" | "expired":
                status, code = _ERRORS[fault]
                return self._reply(status, [("Content-Type", "application/xml")], _error(code))
            case "reset":
                return self._reset()
            case "timeout":
                time.sleep(HANG_S)
                return self._reset()
            case "slow":
                time.sleep(0.3)
            case _:
                pass
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("expect", "transfer-encoding")}
        status, reply_headers, data = self.owner.forward(self.command, self.path, headers, body)
        if fault == "lost reply":
            return self._reset()
        self._reply(status, reply_headers, data, cut=fault == "short read")

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts: list[bytes] = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _reply(self, status: int, headers: list[tuple[str, str]], data: bytes, cut: bool = False) -> None:
        self.send_response_only(status)
        skipped = ("content-length", "transfer-encoding", "connection")
        length = next((value for name, value in headers if name.lower() == "content-length"), str(len(data)))
        for name, value in headers:
            if name.lower() not in skipped:
                self.send_header(name, value)
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.wfile.flush()
            self._reset()

    def _reset(self) -> None:
        """Close so that the peer sees a reset, not an orderly end."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.wfile = _Nowhere()  # type: ignore[assignment]


class _Nowhere:
    closed = True

    def flush(self) -> None:
        pass

    def write(self, data: bytes) -> int:
        return len(data)


def _error(code: str) -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
