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

from pydantic import Field, ValidationError

from mem_core.core.run.record import RECORD_NAME, SEAL_NAME, RunRecord, plain_text, read_record, refuse_lost_record, seal, sealed_text
from mem_core.domain.errors import RunHeld, StoreUnavailable
from mem_core.domain.events import GENESIS_SHA256, AttemptStarted, Event, JournalLine, Noted, PolicyDecided, SegmentStarted
from mem_core.domain.request import shown_request
from mem_core.domain.secrets import hide_in_urls, in_texts
from mem_core.domain.units import Value
from mem_core.infrastructure.machine.process_facts import boot_id, start_ticks
from mem_core.infrastructure.storage.journal_file import append_line, attempt_files, read_attempt
from mem_core.infrastructure.storage.reading import read_json
from mem_core.infrastructure.storage.writing import SHARED, replace_text

LEASE_S = 30.0


class Lease(Value):
    """Who holds a run. On one machine pid, start time and boot id name the holder for certain."""

    run_id: str
    attempt: int = Field(ge=1)
    pid: int = Field(ge=1, lt=2**31, description="Never 0 or less: a signal to such a number reaches every process there is.")
    start_ticks: int
    boot_id: str
    host: str
    since_unix_s: float
    expires_unix_s: float
    released: bool = False

    def holder_alive(self, now_unix_s: float) -> bool:
        """Whether the holder may still write: certain on this machine, by the lease time elsewhere."""
        if self.released:
            return False
        if self.host == socket.gethostname() and self.boot_id == boot_id() and start_ticks(self.pid) != self.start_ticks:
            return False
        if self.host == socket.gethostname() and self.boot_id != boot_id():
            return False
        return now_unix_s < self.expires_unix_s


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file as a whole: a reader sees the old or the new text, after a crash too."""
    try:
        replace_text(path, text)
    except OSError as exc:
        raise StoreUnavailable(
            "cannot write", field="store", value=f"{path}: {exc.strerror}", remedy="Free space or give a writable store."
        ) from exc


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

    def __init__(self, folder: Path, run_id: str, attempt: int, clock: Callable[[], float]) -> None:
        self.folder = folder
        self.run_id = run_id
        self.attempt = attempt
        self._clock = clock
        self._lock = threading.Lock()
        self._path = _journal_path(folder, attempt)
        self._num_lines = 0
        self.listeners: list[Callable[[JournalLine], None]] = []
        self._previous_sha256 = GENESIS_SHA256
        self._stop_renewal = threading.Event()

    @classmethod
    def acquire(
        cls, root: Path, run_id: str, clock: Callable[[], float] = time.time, lease_s: float = LEASE_S, at_least: int = 1
    ) -> "StateManager":
        """Take the run folder, replacing a dead holder at once and a silent one after its lease.

        `at_least` is the lowest attempt number to use: a store that other machines write to may have seen higher ones.

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
            raise _held(lease)
        state = cls(folder, run_id, max(_newest_attempt(folder) + 1, at_least), clock)
        state._claim(lease_s)
        return state

    def _claim(self, lease_s: float) -> None:
        raw = list(_raw_lines(self.folder / "journal"))
        self._num_lines = len(raw)
        if raw:
            self._previous_sha256 = hashlib.sha256(raw[-1]).hexdigest()
        try:
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, SHARED))
        except FileExistsError as exc:
            raise RunHeld(
                f"run {self.run_id} was taken by another start in the same moment", remedy="Wait for it, or use another run_id."
            ) from exc
        except OSError as exc:
            raise StoreUnavailable("cannot write the journal", value=exc.strerror, remedy="Free space or give a writable store.") from exc
        self._write_lease(lease_s, released=False)
        renewal = threading.Thread(target=self._renew, args=(lease_s,), name="lease-renewal", daemon=True)
        renewal.start()

    def _write_lease(self, lease_s: float, released: bool) -> None:
        now = self._clock()
        pid = os.getpid()
        since = getattr(self, "_since_unix_s", now)
        self._since_unix_s = since
        lease = Lease(
            run_id=self.run_id, attempt=self.attempt, pid=pid, start_ticks=start_ticks(pid) or 0, boot_id=boot_id(),
            host=socket.gethostname(), since_unix_s=since, expires_unix_s=now + lease_s, released=released,
        )  # fmt: skip
        write_atomically(self.folder / "lease.json", lease.model_dump_json(indent=2))

    def _renew(self, lease_s: float) -> None:
        while not self._stop_renewal.wait(lease_s / 3):
            if self.fenced_by() is not None:
                return
            with contextlib.suppress(StoreUnavailable):  # a full disk must not end training; the next try may succeed
                self._write_lease(lease_s, released=False)

    def release(self) -> None:
        """Give the run back, unless a newer attempt has it already."""
        self._stop_renewal.set()
        if self.fenced_by() is not None:
            return
        try:
            self._write_lease(0.0, released=True)
        except StoreUnavailable:  # a full disk takes no new lease, but lets the old one go
            with contextlib.suppress(OSError):
                (self.folder / "lease.json").unlink()

    def fenced_by(self) -> int | None:
        """The newer attempt that has taken over, or None."""
        return self.attempt + 1 if _journal_path(self.folder, self.attempt + 1).exists() else None

    def fence(self) -> None:
        """Raises RunHeld where a newer attempt has begun: this one must neither publish nor delete any more."""
        if self.fenced_by() is not None:
            lease = read_lease(self.folder)
            raise (
                _held(lease)
                if lease is not None
                else RunHeld(f"run {self.run_id} was taken over", remedy="Another process goes on with it; nothing is to be done here.")
            )

    def emit(self, event: Event) -> JournalLine:
        """Append one event, durably. The line carries the SHA-256 of the line before it."""
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


def read_lease(folder: Path) -> Lease | None:
    """lease.json, or None where there is none or it cannot be read."""
    try:
        return Lease.model_validate(read_json(folder / "lease.json"))
    except (OSError, ValueError):
        return None


def _without_secrets(line: JournalLine) -> JournalLine:
    """The line to be written. A decision stays as it is: it is recomputed from the very words of the advice, which hold no key."""
    raw = line.model_dump_json()
    if isinstance(line.event, PolicyDecided) or hide_in_urls(raw) == raw:
        return line
    return JournalLine.model_validate_json(json.dumps(in_texts(json.loads(raw), hide_in_urls)))


def _held(lease: Lease) -> RunHeld:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(lease.since_unix_s))
    return RunHeld(
        f"run {lease.run_id} is held by process {lease.pid} on {lease.host} since {since} (attempt {lease.attempt})",
        remedy=f"Wait for it, stop it with: mem stop {lease.run_id}, or use another run_id.",
    )


def _journal_path(folder: Path, attempt: int) -> Path:
    return folder / "journal" / f"attempt-{attempt:04d}.jsonl"


def _newest_attempt(folder: Path) -> int:
    return max((number for number, _ in attempt_files(folder / "journal")), default=0)
