"""Work that is counted, as a progress bar in Prefect's UI: renewed by a thread, so that the work never waits for a server."""

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any
from uuid import UUID

from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL

from flows.prefect_view.api import PrefectApi, ViewApi
from flows.server.local_api import is_embedded
from mem_core.domain.printable import printable
from mem_core.infrastructure.telemetry.progress import NoProgress, Progress, ProgressView, View, describe, fraction

EVERY_S = 5.0
CLOSE_LIMIT_S = 8.0


def shown_counted(name: str) -> AbstractContextManager[Progress]:
    """Progress of counted work as the bar `mem-NAME-progress` of the current flow run; nothing where nobody can look at it. Call inside
    the flow or one of its tasks."""
    if not flow_run.id or is_embedded(PREFECT_API_URL.value()):
        return nullcontext(NoProgress())
    flow_run_id = UUID(str(flow_run.id))
    return CountedProgress(lambda: PrefectApi(flow_run_id, name, set()), f"mem-{name}-progress", get_run_logger())


class CountedProgress(NoProgress):
    """A `Progress` behind one progress artifact. What cannot be published is dropped; nothing here raises. Close it, or its block."""

    def __init__(self, open_api: Callable[[], ViewApi], key: str, log: "logging.Logger | logging.LoggerAdapter[Any]") -> None:
        self._open_api, self._key, self._log = open_api, key, log
        self._view: View | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefect-counted", daemon=True)
        self.every_s = EVERY_S

    def __enter__(self) -> "CountedProgress":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, view: View) -> None:
        """Only the newest view is kept."""
        self._view = view

    def note(self, text: str) -> None:
        """Into the flow run's log."""
        self._log.info("%s", printable(text))

    def close(self) -> None:
        """Publish the last view; a server that does not answer is waited for CLOSE_LIMIT_S at most."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_LIMIT_S)

    def _run(self) -> None:
        with suppress(Exception), self._open_api() as api:  # whatever goes wrong between here and the server
            while not self._closing.wait(self.every_s):
                self._publish(api)
            self._publish(api)

    def _publish(self, api: ViewApi) -> None:
        view, self._view = self._view, None
        if not isinstance(view, ProgressView):
            return
        with suppress(Exception):
            api.put_artifact(self._key, "progress", round(100.0 * fraction(view), 2), describe(view).replace("  ", " · "))
