"""The HTTP planner over TLS: the time limit holds there too, and an unknown certificate is refused."""

import datetime
import ipaddress
import json
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from mem_core.domain.advice import TelemetrySummary
from mem_core.domain.directive import Refusal
from mem_core.domain.plan import Hyperparams
from mem_core.domain.policy import BUILT_IN_BOUNDS
from mem_core.infrastructure.planner.http import HttpPlanner

SUMMARY = TelemetrySummary(
    segment_index=0, applied_steps=0, max_steps=1, current=Hyperparams(), base=Hyperparams(), bounds=BUILT_IN_BOUNDS.cpu
)
ANSWER = json.dumps({"choices": [{"message": {"content": "{}"}}]}).encode()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate and its key for 127.0.0.1, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "planner")])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "planner.pem"
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(private + built.public_bytes(serialization.Encoding.PEM))
    return path


class Handler(BaseHTTPRequestHandler):
    """Answers at once under /good, and one byte at a time under /slow."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        pieces = [ANSWER] if self.path.startswith("/good") else [b" "] * 1_000
        try:
            self.send_response(200)
            self.send_header("Content-Length", str(sum(map(len, pieces))))
            self.end_headers()
            for piece in pieces:
                self.wfile.write(piece)
                time.sleep(0.02)
        except OSError:
            self.close_connection = True  # the planner hung up, as it should

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


class QuietServer(ThreadingHTTPServer):
    """A refused handshake is part of the test and not worth a traceback."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Quiet."""


@pytest.fixture
def url(certificate: Path) -> Iterator[str]:
    """Base URL of a TLS server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = QuietServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"https://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_private_authority_can_be_passed_in(url: str, certificate: Path) -> None:
    planner = HttpPlanner(f"{url}/good", "some-model", "sk-canary", tls=ssl.create_default_context(cafile=str(certificate)))
    assert planner.advise(SUMMARY) == b"{}"


def test_an_unknown_certificate_is_unreachable(url: str) -> None:
    refusal = HttpPlanner(f"{url}/good", "some-model", "sk-canary").advise(SUMMARY)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "unreachable"


def test_a_trickle_over_tls_is_late(url: str, certificate: Path) -> None:
    trusted = ssl.create_default_context(cafile=str(certificate))
    started = time.monotonic()
    refusal = HttpPlanner(f"{url}/slow", "some-model", "sk-canary", time_limit_s=0.5, tls=trusted).advise(SUMMARY)
    assert time.monotonic() - started < 3.5
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "late"
