"""An OpenAI-compatible endpoint as planner. Whatever it does, the answer is bytes to be parsed, or a refusal, in time."""

import json
import socket
import ssl
import threading
import time
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from mem_core.domain.advice import TelemetrySummary
from mem_core.domain.directive import DIRECTIVE_SIZE_LIMIT_BYTES, Refusal
from mem_core.domain.errors import RequestError
from mem_core.domain.secrets import scrub
from mem_core.infrastructure.planner.prompt import chat_request

_TRIES = 2


class HttpPlanner:
    """POST `{base_url}/chat/completions`, at most twice, within one total time limit and one size limit.

    Follows no redirect and reads no proxy or credential from the environment: all it knows is passed in. The key is in no
    error, reply or repr; an endpoint that echoes it gets it replaced.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        *,
        time_limit_s: float = 10.0,
        size_limit_bytes: int = DIRECTIVE_SIZE_LIMIT_BYTES,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`tls` replaces the usual trusted authorities, for an endpoint with a private one.

        Raises RequestError where the URL or the key cannot be used; the message holds neither key nor URL credentials.
        """
        self._url = _endpoint(base_url)
        self._headers = _headers(api_key)
        self._secrets = (api_key,) if api_key else ()
        self._model = model
        self._time_limit_s = time_limit_s
        self._size_limit_bytes = size_limit_bytes
        self._tls = tls

    def advise(self, summary: TelemetrySummary) -> bytes | Refusal:
        """The content of the endpoint's message, or why there is none. Never raises for anything that the endpoint does."""
        deadline = time.monotonic() + self._time_limit_s
        body = json.dumps(chat_request(self._model, summary)).encode()
        answer: bytes | Refusal = _late(self._time_limit_s)
        for _ in range(_TRIES):
            with _SocketGuard(deadline) as guard:
                answer, may_retry = self._exchange(body, guard)
            if guard.expired:
                return _late(self._time_limit_s)
            if not may_retry:
                break
        return _content(answer, self._secrets) if isinstance(answer, bytes) else answer

    def _exchange(self, body: bytes, guard: "_SocketGuard") -> tuple[bytes | Refusal, bool]:
        """One request: the raw body or a refusal, and whether another try makes sense."""
        try:
            with (
                httpx.Client(
                    trust_env=False, follow_redirects=False, timeout=guard.remaining_s(), verify=self._tls if self._tls else True
                ) as client,
                client.stream("POST", self._url, content=body, headers=self._headers, extensions={"trace": guard.trace}) as response,
            ):
                return self._read(response, guard)
        except httpx.TimeoutException:
            return _late(self._time_limit_s), False
        except (httpx.ConnectError, OSError) as exc:
            return Refusal(reason="unreachable", detail=f"no connection to the planner ({type(exc).__name__})"), True
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL) as exc:
            return Refusal(reason="dropped", detail=f"the exchange broke off ({type(exc).__name__})"), True

    def _read(self, response: httpx.Response, guard: "_SocketGuard") -> tuple[bytes | Refusal, bool]:
        status = response.status_code
        if 300 <= status < 400:
            return Refusal(reason="redirected", detail=f"the planner answered with a redirect ({status}), which is not followed"), False
        if status != 200:
            return Refusal(reason="http_error", detail=f"the planner answered with status {status}"), status >= 500 or status == 429
        if response.headers.get("content-encoding", "identity") != "identity":
            return Refusal(reason="bad_reply", detail="the reply is compressed, which was not asked for"), False
        received = bytearray()
        for chunk in response.iter_raw():
            received += chunk
            if len(received) > self._size_limit_bytes:
                return Refusal(reason="too_large", detail=f"the reply is larger than {self._size_limit_bytes} bytes"), False
            if guard.expired:
                return _late(self._time_limit_s), False
        return bytes(received), False


class _SocketGuard:
    """Shuts the connection down at the deadline.

    Timeouts of an HTTP client count from the last byte, so a server that trickles bytes would hold it for ever; only
    closing the socket from outside ends a blocked read at a total limit.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._timer = threading.Timer(self.remaining_s(), self._expire)
        self._timer.daemon = True
        self.expired = False

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self.expired = self.expired or time.monotonic() >= self._deadline

    def remaining_s(self) -> float:
        """Seconds until the deadline, never 0, which an HTTP client could take for "no limit"."""
        return max(self._deadline - time.monotonic(), 0.001)

    def trace(self, event: str, info: dict[str, Any]) -> None:
        """httpx's trace hook: keeps the socket of the connection as soon as there is one."""
        if not event.endswith(("connect_tcp.complete", "start_tls.complete")):
            return
        with self._lock:
            self._socket = info["return_value"].get_extra_info("socket")
            if self.expired:
                self._shut()

    def _expire(self) -> None:
        with self._lock:
            self.expired = True
            self._shut()

    def _shut(self) -> None:
        try:
            if self._socket is not None:
                # The base class's shutdown: SSLSocket's own one pulls the TLS state away from under the reading thread.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        except OSError:
            pass  # closed already, which is what was wanted


def _late(time_limit_s: float) -> Refusal:
    return Refusal(reason="late", detail=f"no complete reply within {time_limit_s:g} s")


def _content(body: bytes, secrets: tuple[str, ...]) -> bytes | Refusal:
    """`choices[0].message.content`, secrets replaced."""
    try:
        envelope: Any = json.loads(body)
        content = envelope["choices"][0]["message"]["content"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return Refusal(reason="bad_reply", detail="the reply is not a chat completion")
    if not isinstance(content, str):
        return Refusal(reason="bad_reply", detail="the reply's message has no text")
    return scrub(content, secrets).encode("utf-8", "surrogatepass")


def _endpoint(base_url: str) -> str:
    try:
        parts = urlsplit(base_url)
        good = parts.scheme in ("http", "https") and parts.hostname and not (parts.query or parts.fragment) and (parts.port or 1)
        credentials = "@" in parts.netloc
    except ValueError:
        good, credentials = False, False
    if not good or credentials:
        raise RequestError(
            "a URL with credentials in it is not used" if credentials else "this is no URL of an endpoint",
            field="policy.planner.base_url",
            value=scrub(base_url),
            bound="http:// or https://, host, optional port and path",
            remedy="Write the URL without user, password, query or fragment, and name the key's variable in policy.planner.api_key_env.",
        )
    return f"{base_url.rstrip('/')}/chat/completions"


def _headers(api_key: str | None) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
    if not api_key:
        return headers
    if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise RequestError(
            "the planner's key holds characters that no HTTP header can carry",
            field="policy.planner.api_key_env",
            remedy="Look for a line break or blank in the variable that holds the key.",
        )
    return {**headers, "Authorization": f"Bearer {api_key}"}
