"""Makes the folder of a forked run beside its place and moves it there in one rename: a kill in the middle leaves nothing that trains.

    <root>/.forking-NEW_ID-xxxx/NEW_ID/   being made: record, journal, checkpoint, metrics, request.yaml
    <root>/NEW_ID/                        whole

The checkpoint is sealed anew as the fork's own, under its name and with what it is born with; its files are held against the origin's
manifest byte for byte, and it is judged again where it lies.
"""

import contextlib
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import yaml

from mem_core.core.fork.carrying import carried_events
from mem_core.core.fork.changes import Branch
from mem_core.core.results.length import RunLength
from mem_core.core.run.belonging import CheckpointWords, birth_of
from mem_core.core.run.goodput import GoodputLedger
from mem_core.core.run.lease import LEASE_S, read_lease
from mem_core.core.run.record import RunRecord
from mem_core.core.run.state_manager import StateManager
from mem_core.domain.checkpoint import CheckpointDraft, CheckpointExpectation
from mem_core.domain.errors import Interrupted, NoValidCheckpoint, RequestError, StoreUnavailable
from mem_core.domain.events import Forked, Resumed, RunEnded
from mem_core.domain.request import RuntimeRequest, shown_request
from mem_core.domain.results.origin import ForkOrigin
from mem_core.infrastructure.storage.disk import OsDisk, walk_folders
from mem_core.infrastructure.storage.reading import copy_regular
from mem_core.infrastructure.storage.whole_file import write_atomically
from mem_core.infrastructure.telemetry.metrics import read_metrics, write_segment_metrics
from mem_core.runtime.checkpoint_manager.inspection.validator import IntegrityValidator
from mem_core.runtime.checkpoint_manager.manager import CheckpointManager
from mem_core.runtime.checkpoint_manager.ports import CheckpointPorts, CheckpointScope
from mem_core.runtime.forking.origin import Origin

REQUEST_NAME = "request.yaml"
_STAGING = ".forking-"


@dataclass(frozen=True)
class Fork:
    """A run that was forked: its folder, and the request that trains it."""

    folder: Path
    request_file: Path
    origin: ForkOrigin


def make_fork(origin: Origin, branch: Branch, length: RunLength, root: Path, key: bytes | None) -> Fork:
    """The folder `<root>/<run_id of the branch>`, whole or not at all.

    Raises:
        RequestError: there is something of that name. StoreUnavailable: it cannot be written. NoValidCheckpoint: the copy is not what
            was read before.
    """
    run_id = branch.request.run_id
    final = root / run_id
    refuse_taken(final)
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        staging = Path(mkdtemp(prefix=f"{_STAGING}{run_id}-", dir=root))
    except OSError as exc:
        raise _unwritable(root, exc) from exc
    came = ForkOrigin(
        run_id=origin.record.run_id, step=origin.manifest.step, weights_digest=origin.manifest.weights_digest,
        trajectory_digest=origin.manifest.position.trajectory_digest, manifest_sha256=origin.manifest_sha256, store=origin.shown,
        changed=tuple(change.words() for change in branch.changes),
    )  # fmt: skip
    try:
        _fill(staging, origin, branch, forked_record(origin.record, branch, length, came), key)
        _publish(staging / run_id, final)
    except OSError as exc:
        raise _unwritable(root, exc) from exc
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return Fork(final, final / REQUEST_NAME, came)


def refuse_taken(folder: Path) -> None:
    """Raises RequestError: something of that name is there."""
    if os.path.lexists(folder):
        raise RequestError("there is a run of that name already", field="NEW_ID", value=folder, remedy="Choose another name.")


def forked_record(record: RunRecord, branch: Branch, length: RunLength, came: ForkOrigin) -> RunRecord:
    """What the fork is: what its origin was, with another request."""
    update = {"run_id": branch.request.run_id, "request": branch.request, "length": length, "born_unix_s": time.time(), "origin": came}
    if branch.request.model.compile != record.request.model.compile:  # else as the origin is, whose bits it shall have
        update["compiled"] = {"on": True, "off": False}.get(branch.request.model.compile, record.compiled)
    return record.model_copy(update=update)


def request_text(request: RuntimeRequest) -> str:
    """The request file of a fork: every value that is not a default, in steps."""
    values = shown_request(request).model_dump(mode="json", exclude_defaults=True)
    first = {name: values.pop(name) for name in ("run_id", "store") if name in values}
    shown = yaml.safe_dump(first | values, sort_keys=False, allow_unicode=True, width=120)
    return f"# Written by mem fork; values that are left out are defaults.\n{shown}"


def _fill(staging: Path, origin: Origin, branch: Branch, record: RunRecord, key: bytes | None) -> None:
    ledger = GoodputLedger(bucket="restore")
    state = StateManager.acquire(staging, record.run_id)
    try:
        came = record.origin
        assert came is not None
        state.write_record(record)
        state.start_attempt(None, note=came.words())
        state.emit(Forked(origin=came))
        _take_checkpoint(state, origin, record, key)
        position = origin.manifest.position
        for event in carried_events(origin.lines, position, branch):
            state.emit(event)
        state.emit(
            Resumed(
                step=came.step,
                batch_index=position.batch_index,
                tokens=position.tokens,
                weights_digest=came.weights_digest,
                trajectory_digest=came.trajectory_digest,
            )
        )
        columns = read_metrics(origin.metrics, came.step)
        if columns["step"].size:
            write_segment_metrics(state.folder / "metrics", came.step, columns)
        write_atomically(state.folder / REQUEST_NAME, request_text(branch.request))
        state.emit(ledger.drain())
        state.emit(RunEnded(status="interrupted", exit_code=Interrupted.exit_code, message=f"{came.words()}; nothing was trained yet"))
    finally:
        state.release()


def _take_checkpoint(state: StateManager, origin: Origin, record: RunRecord, key: bytes | None) -> None:
    """Copy, seal as the fork's own, hold every file against the origin's manifest, judge."""
    manifest = origin.manifest
    expectation = CheckpointExpectation(num_ranks=manifest.num_ranks, zero_stage=manifest.zero_stage, parameters=manifest.parameters)
    scope = CheckpointScope(state.folder, record.run_id, state.attempt, record.request.checkpoint, expectation, birth_of(record))
    words = CheckpointWords()
    state.listeners.append(lambda line: words.add(line.event))
    ports = CheckpointPorts(fence=state.fence, emit=state.emit, words=words)
    manager = CheckpointManager(scope, ports, IntegrityValidator(signature_key=key), signature_key=key)
    try:
        saved = manager.new_staging(manifest.step, expected_bytes=sum(entry.size_bytes for entry in manifest.files))
        for entry in manifest.files:
            target = saved / entry.path
            target.parent.mkdir(parents=True, exist_ok=True)
            copy_regular(origin.checkpoint / entry.path, target)
        fields = {name: getattr(manifest, name) for name in CheckpointDraft.model_fields}
        sealed = manager.commit(manifest.step, saved, CheckpointDraft(**fields))
        if {entry.path: entry for entry in sealed.files} != {entry.path: entry for entry in manifest.files}:
            raise NoValidCheckpoint(
                f"the checkpoint of step {manifest.step} changed while it was copied, and nothing was forked",
                remedy="Give the command again.",
            )
        verdict = manager.validate(manifest.step, "integrity")
        if not verdict.valid:
            raise NoValidCheckpoint(f"the copy is bad, and nothing was forked: {'; '.join(verdict.reasons)}", remedy="Look at the disk.")
    except FileNotFoundError as exc:
        raise NoValidCheckpoint(
            f"the checkpoint of step {manifest.step} was rotated away while it was copied",
            remedy="Take a newer step, or pin it: mem checkpoints pin.",
        ) from exc
    finally:
        manager.close()


def _publish(made: Path, final: Path) -> None:
    """Durable first, then in its place in one rename."""
    disk = OsDisk()
    for folder in walk_folders(disk, made):
        disk.sync_folder(folder)
    refuse_taken(final)
    try:
        os.rename(made, final)
    except OSError:
        refuse_taken(final)
        raise
    disk.sync_folder(final.parent)


def _remove_leftovers(root: Path) -> None:
    """What forks that were killed left: nobody holds the run in it any more."""
    for path in root.glob(f"{_STAGING}*"):
        leases = [read_lease(run) for run in path.iterdir()] if path.is_dir() else []
        held = any(lease is not None and lease.holder_alive(time.time()) for lease in leases)
        with contextlib.suppress(OSError):
            if not held and time.time() - path.stat().st_mtime > LEASE_S:
                shutil.rmtree(path, ignore_errors=True)


def _unwritable(root: Path, exc: OSError) -> StoreUnavailable:
    return StoreUnavailable(
        "the fork cannot be written",
        field="store",
        value=f"{exc.filename or root}: {exc.strerror or exc}",
        remedy="Free space or give a writable store.",
    )
