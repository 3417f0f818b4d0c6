"""An API for flows that are called from Python with no server configured, as in a notebook: one embedded server per process.

Prefect's own ephemeral server loses task-run records at exit and outlives a killed process; see `flows.server.embedded`.
"""

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator

from flows.server.embedded import EmbeddedServer
from mem_core.infrastructure.settings import Settings
from tasks.running import DRIVEN


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
    DRIVEN.api_servers.append(server)


def is_embedded(api_url: str | None) -> bool:
    """Whether nobody but this process can look at that API."""
    return api_url is None or any(server.url == api_url for server in DRIVEN.api_servers)


def _embedded_url() -> str:
    with DRIVEN.api_lock:
        if not DRIVEN.api_servers:
            server = EmbeddedServer.start(Settings.from_environment(), f"process-{os.getpid()}", note=_say)
            server.wait_ready()
            server.keep_alive()
            atexit.register(server.close)
            DRIVEN.api_servers.append(server)
        return DRIVEN.api_servers[0].url


def _say(text: str) -> None:
    print(f"mem: {text}", file=sys.stderr)
