"""`mem fork RUN@STEP NEW_ID`: a new run that begins with the whole state of another one's proven checkpoint."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flows.commands.checkpoints import signature_key
from flows.commands.output import run_folder, split_run
from mem_core.bootstrap import live_root, remote_store
from mem_core.core.fork.changes import Branch, branched, horizon_words, values_to_change
from mem_core.core.results.length import RunLength
from mem_core.domain.errors import RequestError, StoreUnavailable
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.secrets import holds_credentials
from mem_core.infrastructure.machine.store import is_remote
from mem_core.infrastructure.request.file import apply_overrides, build_request
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.storage.opening import open_store
from mem_core.infrastructure.storage.retrying import RetryPolicy
from mem_core.infrastructure.storage.writing import replace_text
from mem_core.runtime.forking.fork import Fork, make_fork, refuse_taken, request_text
from mem_core.runtime.forking.origin import Origin, local_origin, remote_origin


@dataclass(frozen=True)
class ForkWish:
    """The command line: RUN with its step, the new name, where runs lie, what is to be changed, where the request is written too."""

    run: str
    new_id: str
    store: str = "./runs"
    overrides: tuple[str, ...] = ()
    output: Path | None = None


def fork_run(wish: ForkWish, as_json: bool, settings: Settings | None = None) -> int:
    """Make the fork and say how it is trained.

    Raises:
        RequestError: no such run, the name is taken, or something may not be changed. NoValidCheckpoint: no such checkpoint, or a bad
            one. StoreUnavailable.
    """
    settings = settings or Settings.from_environment()
    if wish.output is not None and os.path.lexists(wish.output):
        raise RequestError("there is a file already", field="--output", value=wish.output, remedy="Name another one, or remove it.")
    with _origin(wish, settings) as (origin, store):
        branch, length = _asked(wish, origin, store or _store_beside(origin, settings))
        root = live_root(branch.request, settings)
        refuse_taken(root / branch.request.run_id)
        _refuse_taken_remotely(branch.request, settings)
        made = make_fork(origin, branch, length, root, signature_key(settings))
    if wish.output is not None:
        _write(wish.output, request_text(branch.request))
    _tell(made, branch, wish.output or made.request_file, as_json)
    return 0


@contextlib.contextmanager
def _origin(wish: ForkWish, settings: Settings) -> Iterator[tuple[Origin, str]]:
    """The origin, and the remote store that it lies in; empty where it lies on this machine."""
    if holds_credentials(wish.run) or holds_credentials(wish.store):
        raise RequestError("it carries a user, password or key", field="--store", remedy="Leave them out; keys come from the environment.")
    run, wanted = split_run(wish.run, wish.store)
    key = signature_key(settings)
    store, run_id = run.rstrip("/").rsplit("/", 1) if is_remote(run) else (wish.store, run)
    if not is_remote(store):
        yield local_origin(run_folder(run, wish.store), wanted, key), ""
        return
    if "/" in run_id:  # a path beside --store URL is a folder on this machine
        yield local_origin(Path(run_id), wanted, key), ""
        return
    room = settings.mem_home / "live"
    room.mkdir(parents=True, exist_ok=True)
    with remote_origin(open_store(store, settings.storage_options(store)), run_id, wanted, key, room) as origin:
        yield origin, store


def _asked(wish: ForkWish, origin: Origin, store: str) -> tuple[Branch, RunLength]:
    record = origin.record
    named = [override.partition("=")[0].strip() for override in wish.overrides]
    values = values_to_change(record.request, wish.new_id, named)
    values["store"] = store
    asked = build_request(apply_overrides(values, wish.overrides))
    if asked.run_id != wish.new_id:
        raise RequestError(
            "the name of the fork is its second argument",
            field="run_id",
            value=asked.run_id,
            bound=wish.new_id,
            remedy="Leave it out of --set.",
        )
    branch = branched(record.request, asked, record.length, origin.manifest.step)
    same_steps = branch.request.training.max_steps == record.request.training.max_steps
    epochs = asked.training.epochs if asked.training.epochs is not None else record.length.epochs if same_steps else None
    ratio = asked.training.warmup_ratio if asked.training.warmup_ratio is not None else record.length.warmup_ratio
    return branch, RunLength(epochs=epochs, warmup_ratio=ratio, num_rows=record.length.num_rows)


def _store_beside(origin: Origin, settings: Settings) -> str:
    """Beside its origin: as the origin's request names that place, else as it was found."""
    stored = origin.record.request
    here = Path(origin.shown).absolute().parent
    return stored.store if live_root(stored, settings).absolute() == here else str(here)


def _refuse_taken_remotely(request: RuntimeRequest, settings: Settings) -> None:
    """Copies under the fork's name would be another run's. A second copy that does not answer is no reason to wait."""
    store = remote_store(request, settings, None if is_remote(request.store) else RetryPolicy(attempts=1))
    if store is None:
        return
    try:
        taken = bool(store.list(request.run_id))
    except StoreUnavailable:
        if is_remote(request.store):
            raise
        return
    if taken:
        raise RequestError(
            "there is a run of that name already", field="NEW_ID", value=f"{store.url}/{request.run_id}", remedy="Choose another name."
        )


def _write(path: Path, text: str) -> None:
    try:
        replace_text(path, text)
    except OSError as exc:
        raise StoreUnavailable(
            "the fork was made, and its request cannot be written there", field="--output", value=f"{path}: {exc.strerror or exc}",
            remedy="It lies in the fork's own folder, too: request.yaml.",
        ) from exc  # fmt: skip


def _tell(made: Fork, branch: Branch, request_file: Path, as_json: bool) -> None:
    command = f"mem train {request_file}"
    remark = horizon_words(branch)
    print(f"{made.folder.name}: {made.origin.words()}, {made.origin.changes()}", file=sys.stderr)
    if remark:
        print(f"note: {remark}", file=sys.stderr)
    if branch.request.training.max_steps <= made.origin.step:
        print("note: no step is left to do; --set training.max_steps=... asks for more", file=sys.stderr)
    print(f"next: {command}", file=sys.stderr)
    if as_json:
        answer = {"run_id": made.folder.name, "run_folder": str(made.folder.absolute()), "request": str(request_file), "train": command}
        print(json.dumps({**answer, "forked_from": made.origin.model_dump(mode="json")}))
