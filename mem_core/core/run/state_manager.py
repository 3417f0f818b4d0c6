"""The run folder: who may write it (lease, fencing), what happened in it (journal), what it is a run of (run.json).

The claim of an attempt is the create-only journal file `journal/attempt-000N.jsonl`: exactly one process can make it, and
whoever sees a higher one is fenced. `lease.json` says for people and for the next start who holds the run and until when.
"""

import contextlib
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import ValidationError

from mem_core.core.run.lease import LEASE_S, LeaseFile, newest_attempt, read_lease
from mem_core.core.run.record import RECORD_NAME, SEAL_NAME, RunRecord, plain_text, read_record, refuse_lost_record, seal, sealed_text
from mem_core.domain.errors import RunHeld, StoreUnavailable
from mem_core.domain.events import GENESIS_SHA256, AttemptStarted, Event, JournalLine, Noted, PolicyDecided, SegmentStarted
from mem_core.domain.request import shown_request
from mem_core.domain.secrets import hide_in_urls, in_texts
from mem_core.infrastructure.storage.journal_file import append_line, attempt_files, read_attempt
from mem_core.infrastructure.storage.presence import Patience, StorePresence
from mem_core.infrastructure.storage.whole_file import write_atomically
from mem_core.infrastructure.storage.writing import SHARED


def read_journal(folder: Path) -> list[JournalLine]:
    """Every complete line of every attempt, in order. A last line cut by a crash is dropped.

    Raises:
        StoreUnavailable: a file cannot be read; what it says must not be missed in silence.
    """
    return [JournalLine.model_validate_json(raw) for raw in _raw_lines(folder)]


def _raw_lines(folder: Path) -> Iterator[bytes]:
    try:
        contents = [read_attempt(path) for _, path in attempt_files(folder)]
    except OSError as exc:
        raise StoreUnavailable(
            "the journal cannot be read", value=f"{exc.filename}: {exc.strerror}", remedy="Mend its permissions, or restore the file."
        ) from exc
    for content in contents:
        for raw in content.split(b"\n")[:-1]:
            with contextlib.suppress(ValidationError):
                JournalLine.model_validate_json(raw)
                yield raw


class StateManager:
    """Holds one run folder for one attempt. Create with `acquire`; every writer asks `fence` before it publishes."""

    def __init__(self, folder: Path, run_id: str, attempt: int, clock: Callable[[], float], patience: Patience) -> None:
        self.folder = folder
        self.run_id = run_id
        self.attempt = attempt
        self._clock = clock
        self._lock = threading.Lock()
        self._path = _journal_path(folder, attempt)
        self._lease = LeaseFile(folder, run_id, attempt, clock)
        self._presence = StorePresence(self._path, patience)
        self._num_lines = 0
        self.listeners: list[Callable[[JournalLine], None]] = []
        self._previous_sha256 = GENESIS_SHA256
        self._stop_renewal = threading.Event()

    @classmethod
    def acquire(
        cls,
        root: Path,
        run_id: str,
        clock: Callable[[], float] = time.time,
        lease_s: float = LEASE_S,
        at_least: int = 1,
        patience: Patience | None = None,
    ) -> "StateManager":
        """Take the run folder, replacing a dead holder at once and a silent one after its lease.

        `at_least` is the lowest attempt number to use: a store that other machines write to may have seen higher ones. `patience`: how
        long a store that goes away later is waited for. Here and nowhere else the store's root is made.

        Raises:
            RunHeld: another process holds it (who, since when). StoreUnavailable: the folder cannot be written.
        """
        folder = root / run_id
        try:
            (folder / "journal").mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise StoreUnavailable(
                "cannot create the run folder", field="store", value=f"{folder}: {exc.strerror}", remedy="Give a writable local folder."
            ) from exc
        lease = read_lease(folder)
        if lease is not None and lease.holder_alive(clock()):
            raise lease.held()
        state = cls(folder, run_id, max(newest_attempt(folder) + 1, at_least), clock, patience or Patience())
        state._claim(lease_s)
        return state

    def _claim(self, lease_s: float) -> None:
        raw = list(_raw_lines(self.folder / "journal"))
        self._num_lines = len(raw)
        if raw:
            self._previous_sha256 = hashlib.sha256(raw[-1]).hexdigest()
        try:
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, SHARED))
            self._presence.remember()
        except FileExistsError as exc:
            raise RunHeld(
                f"run {self.run_id} was taken by another start in the same moment", remedy="Wait for it, or use another run_id."
            ) from exc
        except OSError as exc:
            raise StoreUnavailable("cannot write the journal", value=exc.strerror, remedy="Free space or give a writable store.") from exc
        self._lease.write(lease_s)
        self._lease.forget_older()
        renewal = threading.Thread(target=self._renew, args=(lease_s,), name="lease-renewal", daemon=True)
        renewal.start()

    def _renew(self, lease_s: float) -> None:
        while not self._stop_renewal.wait(lease_s / 3):
            if self.fenced_by() is not None:
                return
            with contextlib.suppress(StoreUnavailable):  # a full disk must not end training; the next try may succeed
                self._lease.write(lease_s)

    def release(self) -> None:
        """Give the run back, unless a newer attempt has it already."""
        self._stop_renewal.set()
        if self.fenced_by() is not None:
            return
        try:
            self._lease.write(0.0, released=True)
        except StoreUnavailable:
            self._lease.drop()

    def await_store(self) -> None:
        """Return when the run folder is where it was taken; at once unless the store was moved away or unmounted under the run.

        Nothing of it is ever made again in the middle of a run: that would fill the disk under a mount point, and stand in the way when
        the store comes back.

        Raises:
            StoreUnavailable: it did not come back in time.
        """
        self._presence.wait()

    def fenced_by(self) -> int | None:
        """The newer attempt that has taken over, or None."""
        return self.attempt + 1 if _journal_path(self.folder, self.attempt + 1).exists() else None

    def fence(self) -> None:
        """Raises RunHeld where a newer attempt has begun: this one must neither publish nor delete any more. See also `await_store`."""
        self.await_store()
        if self.fenced_by() is not None:
            lease = read_lease(self.folder)
            raise (
                lease.held()
                if lease is not None
                else RunHeld(f"run {self.run_id} was taken over", remedy="Another process goes on with it; nothing is to be done here.")
            )

    def emit(self, event: Event) -> JournalLine:
        """Append one event, durably. The line carries the SHA-256 of the line before it. Raises StoreUnavailable."""
        self.await_store()
        with self._lock:
            line = _without_secrets(
                JournalLine(
                    sequence=self._num_lines,
                    time_unix_s=self._clock(),
                    attempt=self.attempt,
                    previous_sha256=self._previous_sha256,
                    event=event,
                )
            )
            raw = line.model_dump_json().encode()
            try:
                append_line(self._path, raw)
            except OSError as exc:
                raise StoreUnavailable(
                    "cannot write the journal",
                    value=f"{self._path}: {exc.strerror}",
                    remedy="Free space; the run resumes by the same command.",
                ) from exc
            self._previous_sha256 = hashlib.sha256(raw).hexdigest()
            self._num_lines += 1
        for listener in self.listeners:
            listener(line)
        return line

    def lines(self) -> list[JournalLine]:
        """The whole journal, read from disk: kept in memory it would grow with every segment of a long run."""
        return read_journal(self.folder / "journal")

    def start_attempt(self, resumed_step: int | None, note: str = "") -> None:
        """Journal that this process drives the run now."""
        self.emit(AttemptStarted(attempt=self.attempt, pid=os.getpid(), host=socket.gethostname(), resumed_step=resumed_step, note=note))

    # -- run.json -------------------------------------------------------------------------------------------------------

    def record(self) -> RunRecord | None:
        """What this run is, or None before birth.

        Raises:
            NoValidCheckpoint: the record is damaged, or it is gone and the run has trained already.
        """
        record = read_record(self.folder)
        if record is None and any(isinstance(line.event, SegmentStarted) for line in self.lines()):
            raise refuse_lost_record(self.folder)
        return record

    def write_record(self, record: RunRecord) -> None:
        """Store what this run is, without signatures of URLs: the sealed copy first, which decides from then on."""
        text = record.model_copy(update={"request": shown_request(record.request)}).model_dump_json(indent=2)
        write_atomically(self.folder / SEAL_NAME, seal(text))
        write_atomically(self.folder / RECORD_NAME, text)

    def mend_record(self) -> None:
        """Write both copies again where one is lost or damaged, and say so. Does nothing before birth."""
        record, sealed, plain = self.record(), sealed_text(self.folder), plain_text(self.folder)
        if record is None or (sealed is not None and sealed == plain):
            return
        damaged = RECORD_NAME if sealed is not None else SEAL_NAME if (self.folder / SEAL_NAME).exists() else ""
        self.write_record(record)
        if damaged:
            self.emit(Noted(text=f"{damaged} was lost or damaged and was written again from its copy"))


def _without_secrets(line: JournalLine) -> JournalLine:
    """The line to be written. A decision stays as it is: it is recomputed from the very words of the advice, which hold no key."""
    raw = line.model_dump_json()
    if isinstance(line.event, PolicyDecided) or hide_in_urls(raw) == raw:
        return line
    return JournalLine.model_validate_json(json.dumps(in_texts(json.loads(raw), hide_in_urls)))


def _journal_path(folder: Path, attempt: int) -> Path:
    return folder / "journal" / f"attempt-{attempt:04d}.jsonl"
