"""A run's second home in a remote store: checkpoints through the mirror, run.json and the journal as numbered objects.

Everything here happens beside training, in the mirror's thread. A new machine with an empty disk fetches the record first, then the
newest checkpoint that proves itself; decisions and memory plans are then replayed from the journal as on the old machine.
"""

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path

from mem_core.core.run.record import has_record, sealed_text
from mem_core.core.run.state_manager import StateManager
from mem_core.domain.checkpoint import CheckpointManifest
from mem_core.domain.errors import DataError, MemError, NoValidCheckpoint, RunHeld, StoreUnavailable
from mem_core.domain.events import CheckpointMirrored, Noted
from mem_core.domain.request import CheckpointSection
from mem_core.infrastructure.storage.journal_file import attempt_files, read_attempt
from mem_core.infrastructure.storage.port import AlreadyExists, KeyMissing, Store
from mem_core.infrastructure.storage.reading import RECORD_LIMIT_BYTES, read_regular_text
from mem_core.infrastructure.storage.whole_file import write_atomically
from mem_core.runtime.checkpoint_manager.manager import CheckpointManager
from mem_core.runtime.checkpoint_manager.mirror.background import BackgroundMirror, MirrorState
from mem_core.runtime.checkpoint_manager.mirror.mirror import Mirror
from mem_core.runtime.checkpoint_manager.mirror.remote_layout import Upload
from mem_core.runtime.checkpoint_manager.restore import restore_from_mirror

CLOSE_LIMIT_S = 120.0


def fetch_record(store: Store, run_id: str, folder: Path) -> bool:
    """On a machine that has never seen the run: bring run.json and the journal. False where the store has no such run.

    Raises:
        StoreUnavailable: the store does not answer.
    """
    if has_record(folder):
        return False
    try:
        record = store.read(f"{run_id}/run.json")
    except KeyMissing:
        return False
    parts: dict[str, bytes] = {}
    for item in store.list(f"{run_id}/journal"):
        attempt = item.key.split("/")[-2]
        parts[attempt] = parts.get(attempt, b"") + store.read(item.key)
    (folder / "journal").mkdir(parents=True, exist_ok=True)
    for attempt, data in parts.items():
        (folder / "journal" / f"{attempt}.jsonl").write_bytes(data)
    write_atomically(folder / "run.json", record.decode("utf-8"))
    return True


class JournalCopy:
    """The journal's lines as numbered objects, since object stores cannot append. Used from the mirror's thread alone."""

    def __init__(self, store: Store, state: StateManager) -> None:
        self._store = store
        self._state = state
        self._sent: dict[Path, int] = {}
        self._numbers: dict[Path, int] = {}

    def push(self) -> None:
        """Send run.json and every complete line that was not sent yet.

        Raises:
            StoreUnavailable: tried again with the next push; nothing is lost meanwhile.
        """
        for _, path in attempt_files(self._state.folder / "journal"):
            self._push_file(path)
        text = sealed_text(self._state.folder) or read_regular_text(self._state.folder / "run.json", RECORD_LIMIT_BYTES)
        self._store.write(f"{self._state.run_id}/run.json", text.encode())

    def _push_file(self, path: Path) -> None:
        data = read_attempt(path)
        whole = data[: data.rfind(b"\n") + 1]
        sent = self._sent.get(path)
        if sent is None:
            sent = self._already_there(path, whole)
        if len(whole) > sent:
            number = self._numbers.get(path, 0) + 1
            try:
                self._store.create(f"{self._state.run_id}/journal/{path.stem}/{number:06d}.jsonl", whole[sent:])
            except AlreadyExists:
                self._sent.pop(path, None)  # another machine's lines: look again at the next push
                return
            self._numbers[path] = number
        self._sent[path] = len(whole)

    def _already_there(self, path: Path, whole: bytes) -> int:
        """Bytes of this attempt's journal that the store holds already."""
        items = self._store.list(f"{self._state.run_id}/journal/{path.stem}")
        self._numbers[path] = len(items)
        there = b"".join(self._store.read(item.key) for item in items)
        if not whole.startswith(there):
            raise DataError(
                f"the store holds another journal of {path.stem}",
                value=hashlib.sha256(there).hexdigest()[:16],
                remedy="Two machines drove this run; use the run folder of the one that holds it now.",
            )
        return len(there)


class _MirrorWithJournal:
    """What the background thread pushes: a checkpoint, then the journal. A newer attempt elsewhere stops this one."""

    def __init__(self, mirror: Mirror, journal: JournalCopy, on_fenced: Callable[[str], None]) -> None:
        self._mirror, self._journal, self._on_fenced = mirror, journal, on_fenced

    @property
    def url(self) -> str:
        return self._mirror.url

    def push(self, folder: Path) -> Upload:
        try:
            upload = self._mirror.push(folder)
            self._journal.push()
        except RunHeld as exc:
            self._on_fenced(str(exc))
            raise
        except StoreUnavailable:
            with contextlib.suppress(MemError):
                self._journal.push()  # small, and it says what was proven: a new machine then knows what it misses
            raise
        return upload

    def rotate(self) -> tuple[Upload, ...]:
        return self._mirror.rotate()


class RemoteService:
    """The remote side of one attempt."""

    def __init__(self, store: Store, state: StateManager, section: CheckpointSection, on_fenced: Callable[[str], None]) -> None:
        self._state = state
        self._offered = False
        self._answers = True
        self._finished: bool | None = None
        self.mirror = Mirror(store, state.run_id, state.attempt, section, fence=state.fence, emit=state.emit)
        self._journal = JournalCopy(store, state)
        self._background = BackgroundMirror(_MirrorWithJournal(self.mirror, self._journal, on_fenced), state.emit)  # type: ignore[arg-type]

    def held(self) -> frozenset[int]:
        """Steps whose local copy must stay until the remote is proven."""
        return self._background.held()

    def state(self) -> MirrorState:
        """How far the mirror is."""
        return self._background.state()

    def offer(self, step: int, folder: Path) -> None:
        """What a start resumes from has been read and proven: mirror it where the remote lacks it, as after uploads that failed.

        Asked once in an attempt. A remote that does not answer is tried by the upload itself, beside training.
        """
        if self._offered:
            return
        self._offered = True
        try:
            newest = max((upload.step for upload in self.mirror.available()), default=None) if self._answers else None
        except MemError:
            newest = None
        if newest is None or newest < step:
            self.submit(step, folder)
        else:
            self._state.emit(CheckpointMirrored(step=newest, url=self.mirror.url))

    def submit(self, step: int, folder: Path) -> None:
        """Mirror a validated checkpoint soon; returns at once."""
        self._background.submit(step, folder)

    def catch_up(self, manager: CheckpointManager) -> CheckpointManifest | None:
        """At the start: take a newer proven checkpoint from the remote, and say which step is used and why.

        Raises:
            StoreUnavailable: the remote does not answer and this disk has nothing to go on from. RunHeld: a newer attempt has begun.
            NoValidCheckpoint: the remote holds another life of this run id.
        """
        local = max((info.step for info in manager.listing() if info.state == "valid"), default=-1)
        try:
            return restore_from_mirror(manager, self.mirror, self._state.emit, newer_than=local)
        except (RunHeld, NoValidCheckpoint):
            raise
        except MemError as exc:
            if local < 0 and self._state.record() is not None:
                raise
            self._answers = False
            self._state.emit(Noted(text=f"the mirror does not answer; going on from the local step {max(local, 0)}: {exc}"))
            return None

    def finish(self) -> None:
        """Finish what waits within a limit; then nothing of this attempt is left half sent. Once is enough."""
        if self._finished is not None:
            return
        self._finished = self._background.close(CLOSE_LIMIT_S)
        if not self._finished:
            late = f"an upload to {self.mirror.url} was still at work after {CLOSE_LIMIT_S:.0f} s; the next start sends it"
            self._state.emit(Noted(text=late))
            return
        try:
            left = self.mirror.abandon_unfinished()
        except (MemError, OSError) as exc:
            self._state.emit(Noted(text=f"what interrupted uploads left in {self.mirror.url} could not be removed: {exc}"))
            return
        if left:
            self._state.emit(Noted(text=f"{left} unfinished uploads were removed from {self.mirror.url}"))

    def close(self) -> bool:
        """`finish`, and send the journal's end. False where the remote is behind; the local copy has everything."""
        self.finish()
        try:
            self._journal.push()
        except (MemError, OSError) as exc:
            self._state.emit(Noted(text=f"the journal's end was not mirrored: {exc}"))
            return False
        return bool(self._finished)
