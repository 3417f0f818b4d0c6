"""Who may talk to MEM's own Prefect server: its own pages and hosts, whatever a tunnel makes of them, and the names that are allowed."""

import asyncio
from typing import Any

import pytest

from flows.cli import build_parser
from flows.server.gate import Gate, Message, Scope, allowed_hosts, refusal
from mem_core.domain.errors import RequestError

ANSWERED: list[tuple[str, str | None, tuple[str, ...]]] = [
    ("127.0.0.1:4200", None, ()),
    ("localhost:4200", None, ()),
    ("LOCALHOST.:4200", None, ()),
    ("[::1]:4200", None, ()),
    ("127.0.0.1:4200", "http://127.0.0.1:4200", ()),
    ("localhost:4200", "http://127.0.0.1:4200", ()),
    ("localhost:8080", "http://localhost:8080", ()),  # ssh -L 8080:127.0.0.1:4200
    ("localhost", "http://localhost", ()),
    ("mem.example.org", None, ("mem.example.org",)),
    ("mem.example.org", "https://mem.example.org", ("mem.example.org",)),
    ("mem.example.org:8443", "https://mem.example.org:8443", ("mem.example.org:8443",)),
    ("127.0.0.1:4200", "https://mem.example.org", ("mem.example.org",)),  # an ingress that writes Host anew
]
REFUSED: list[tuple[str, str | None, tuple[str, ...]]] = [
    ("evil.example:4200", None, ()),
    ("evil.example", None, ()),
    ("127.0.0.1.evil.example:4200", None, ()),
    ("localhost.evil.example", None, ()),
    ("10.0.0.7:4200", None, ()),
    ("127.0.0.1:4200", "http://evil.example", ()),
    ("127.0.0.1:4200", "http://127.0.0.1:3000", ()),
    ("127.0.0.1:4200", "http://localhost", ()),
    ("127.0.0.1:4200", "null", ()),
    ("127.0.0.1:4200", "file://", ()),
    ("127.0.0.1:4200", "http://127.0.0.1:4200.evil.example", ()),
    ("127.0.0.1:4200", "http://x@127.0.0.1:4200@evil.example", ()),
    ("127.0.0.1:4200", "", ()),
    ("mem.example.org", None, ("other.example.org",)),
    ("mem.example.org:80", None, ("mem.example.org:8443",)),
    ("sub.mem.example.org", None, ("mem.example.org",)),
    ("", None, ()),
    ("127.0.0.1:port", None, ()),
]


@pytest.mark.parametrize(("host", "origin", "allowed"), ANSWERED)
def test_its_own_pages_and_hosts_are_answered(host: str, origin: str | None, allowed: tuple[str, ...]) -> None:
    assert refusal([host], [] if origin is None else [origin], allowed) == ""


@pytest.mark.parametrize(("host", "origin", "allowed"), REFUSED)
def test_others_are_not(host: str, origin: str | None, allowed: tuple[str, ...]) -> None:
    why = refusal([host], [] if origin is None else [origin], allowed)
    assert why == (f"Host {host or 'nothing'}" if origin is None else f"Origin {origin}")


def test_none_and_several_hosts_are_refused_and_the_worst_origin_counts() -> None:
    assert refusal([], []) == "Host nothing"
    assert refusal(["127.0.0.1:1", "127.0.0.1:1"], []) == "Host 127.0.0.1:1, 127.0.0.1:1"
    assert refusal(["127.0.0.1:1"], ["http://127.0.0.1:1", "http://evil.example"]) == "Origin http://evil.example"


def test_names_to_allow_are_given_as_names_or_addresses() -> None:
    given = build_parser().parse_args(["serve", "--allow-host", "https://Mem.Example.org/ui", "--allow-host", "other:8080"]).hosts
    assert allowed_hosts(given) == ("mem.example.org", "other:8080")
    for wrong in ("", "*", "a b", "a/b", "a:b", "https://", "*.example.org"):
        with pytest.raises(RequestError, match="--allow-host: this is no host"):
            allowed_hosts([wrong])


def talk(kind: str, headers: dict[bytes, bytes]) -> tuple[list[Message], bool]:
    """What is sent back, and whether the application behind the gate was asked."""
    sent: list[Message] = []
    asked: list[Scope] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        asked.append(scope)

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": f"{kind}.connect"}

    asyncio.run(Gate(app)({"type": kind, "headers": list(headers.items())}, receive, send))
    return sent, bool(asked)


def test_the_gate_lets_through_or_says_what_it_did_not_like() -> None:
    assert talk("lifespan", {}) == ([], True)
    assert talk("http", {b"host": b"127.0.0.1:4200"}) == ([], True)
    assert talk("websocket", {b"host": b"127.0.0.1:4200"}) == ([], True)
    sent, asked = talk("http", {b"host": b"127.0.0.1:4200", b"origin": b"http://evil.example\x1b]0;x"})
    assert (sent[0]["status"], asked) == (403, False)
    assert b"Origin http://evil.example\\u001b]0;x is not one" in sent[1]["body"]
    sent, asked = talk("websocket", {b"host": b"evil.example"})
    assert (sent, asked) == ([{"type": "websocket.close", "code": 1008}], False)
