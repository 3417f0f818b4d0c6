"""Who may talk to MEM's own Prefect server: its own pages, and programs that call it by a name that is its own.

Prefect itself answers every Host and every Origin. A server that listens on loopback alone is reached by any web page that the
operator opens: through a name that its owner points to 127.0.0.1 (DNS rebinding, told by Host), or directly (told by Origin).
"""

from collections.abc import Awaitable, Callable, Collection, Iterable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from mem_core.domain.errors import RequestError
from mem_core.domain.printable import printable

OWN_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
DEFAULT_PORTS = {"http": 80, "https": 443}
POLICY_VIOLATION = 1008

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def allowed_hosts(given: Iterable[str]) -> tuple[str, ...]:
    """Names from the command line, with or without a port; an address such as https://mem.example.org/ is taken for its host.

    Raises:
        RequestError: this is no host.
    """
    return tuple(_host_given(text) for text in given)


def _host_given(text: str) -> str:
    address = text.strip()
    address = urlsplit(address).netloc if "://" in address else address
    parsed = _parsed(address)
    if parsed is None or any(character in address for character in "/?#@*, "):
        raise RequestError("this is no host", field="--allow-host", value=text, remedy="Give a name such as mem.example.org.")
    name, port = parsed
    return name if port is None else f"{name}:{port}"


def refusal(hosts: Collection[str], origins: Collection[str], allowed: Collection[str] = ()) -> str:
    """Why a request with these Host and Origin headers is not answered; empty where it is. Pure.

    A host is our own by name, whatever its port, since tunnels change that. An origin is our own where it is the very place that
    the request goes to, or our own name at the same port.
    """
    parsed = [_parsed(host) for host in hosts]
    if len(parsed) != 1 or parsed[0] is None or not _known(parsed[0], allowed):
        return f"Host {', '.join(hosts) or 'nothing'}"
    return next((f"Origin {origin}" for origin in origins if not _same_place(origin, parsed[0], allowed)), "")


def _known(place: tuple[str, int | None], allowed: Collection[str]) -> bool:
    name, port = place
    return name in OWN_NAMES or name in allowed or f"{name}:{port}" in allowed


def _same_place(origin: str, host: tuple[str, int | None], allowed: Collection[str]) -> bool:
    scheme, _, address = origin.partition("://")
    place = _parsed(address)
    if place is None or scheme not in DEFAULT_PORTS:
        return False
    name, port = place[0], place[1] or DEFAULT_PORTS[scheme]
    if name in allowed or f"{name}:{port}" in allowed:
        return True
    same_name = name == host[0] or {name, host[0]} <= OWN_NAMES
    return same_name and port in ({host[1]} if host[1] else set(DEFAULT_PORTS.values()))


def _parsed(address: str) -> tuple[str, int | None] | None:
    """(name in lower case, port) of `name`, `name:port` or `[::1]:port`; None where it is none of them."""
    try:
        parts = urlsplit(f"//{address}")
        name, port = parts.hostname, parts.port
    except ValueError:
        return None
    if not name or parts.path or parts.query or parts.fragment or parts.username is not None:
        return None
    return name.rstrip("."), port


class Gate:
    """An ASGI application that lets through to another one what may talk to it, and answers 403 to the rest, web sockets included."""

    def __init__(self, app: App, allowed: Collection[str] = ()) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection."""
        if scope["type"] in ("http", "websocket"):
            why = refusal(_values(scope, b"host"), _values(scope, b"origin"), self._allowed)
            if why:
                await _refuse(scope, send, why)
                return
        await self._app(scope, receive, send)


def _values(scope: Scope, wanted: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == wanted]


async def _refuse(scope: Scope, send: Send, why: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": POLICY_VIOLATION})
        return
    text = printable(f"{why[:200]} is not one that this server answers. To allow a name: mem serve --allow-host NAME\n").encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"x-content-type-options", b"nosniff"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": text})
