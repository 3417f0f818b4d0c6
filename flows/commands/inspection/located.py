"""RUN as a folder to look into: one that is here, or record and journal of one in a remote store, brought for as long as the look lasts."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from flows.commands.output import run_folder
from flows.commands.report import require_run
from mem_core.domain.errors import RequestError
from mem_core.domain.secrets import holds_credentials
from mem_core.infrastructure.machine.store import is_remote
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.storage.opening import open_store
from mem_core.runtime.session.remote_service import fetch_record


@contextlib.contextmanager
def located(run: str, store: str, settings: Settings) -> Iterator[tuple[Path, str]]:
    """(folder, where the run lies, for people). RUN is a run id, or the path or URL of a run folder.

    Raises:
        RequestError: there is no such run. StoreUnavailable: the store does not answer.
    """
    if holds_credentials(run) or holds_credentials(store):
        raise RequestError("it carries a user, password or key", field="--store", remedy="Leave them out; keys come from the environment.")
    place, run_id = run.rstrip("/").rsplit("/", 1) if is_remote(run) else (store, run)
    if not is_remote(place) or "/" in run_id:
        folder = run_folder(run, "" if is_remote(store) else store)
        require_run(folder)
        yield folder, str(folder)
        return
    with TemporaryDirectory(prefix="mem-look-") as made:
        folder = Path(made) / run_id
        opened = open_store(place, settings.storage_options(place))
        if not fetch_record(opened, run_id, folder):
            remedy = "See mem runs --store URL."
            raise RequestError("there is no such run", field="RUN", value=f"{opened.url}/{run_id}", remedy=remedy)
        yield folder, f"{opened.url}/{run_id}"
