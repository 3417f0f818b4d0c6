"""An API for flows that are called from Python with no server configured, as in a notebook: one embedded server per process.

Prefect's own ephemeral server loses task-run records at exit and outlives a killed process; see `flows.server.embedded`.
"""

import atexit
import contextlib
import os
import threading
from collections.abc import Iterator

from flows.server.embedded import EmbeddedServer
from mem_core.infrastructure.settings import Settings

_SERVER: list[EmbeddedServer] = []
_LOCK = threading.Lock()


@contextlib.contextmanager
def api_at_hand() -> Iterator[None]:
    """Within the block Prefect has an API to talk to: the configured one, or an embedded one of this process."""
    from prefect.context import FlowRunContext
    from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings

    if PREFECT_API_URL.value() or FlowRunContext.get() is not None:
        yield
        return
    with temporary_settings({PREFECT_API_URL: _embedded_url(), PREFECT_LOGGING_TO_API_ENABLED: False}):
        yield


def note_embedded(server: EmbeddedServer) -> None:
    """Flows of this process use that server: nobody else can look at it, so that nothing is published to it."""
    _SERVER.append(server)


def is_embedded(api_url: str | None) -> bool:
    """Whether nobody but this process can look at that API."""
    return api_url is None or any(server.url == api_url for server in _SERVER)


def _embedded_url() -> str:
    with _LOCK:
        if not _SERVER:
            server = EmbeddedServer.start(Settings.from_environment(), f"process-{os.getpid()}")
            server.wait_ready()
            server.keep_alive()
            atexit.register(server.close)
            _SERVER.append(server)
        return _SERVER[0].url
