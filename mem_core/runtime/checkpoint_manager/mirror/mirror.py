"""Copies of validated checkpoints in a remote store: uploaded file by file, each proven, manifest last; never on the training path."""

import json
import time
import uuid
from collections.abc import Callable, Collection
from pathlib import Path

from mem_core.domain.checkpoint import MANIFEST_NAME, SIGNATURE_NAME, CheckpointManifest, CheckpointVerdict
from mem_core.domain.errors import InternalError, RunHeld, StoreUnavailable
from mem_core.domain.events import Event
from mem_core.domain.request import CheckpointSection
from mem_core.infrastructure.storage.port import AlreadyExists, KeyMissing, Store
from mem_core.infrastructure.storage.reading import parse_json, read_regular
from mem_core.runtime.checkpoint_manager.inspection.manifest_codec import MAX_MANIFEST_BYTES, decode_manifest, sha256_hex
from mem_core.runtime.checkpoint_manager.mirror.remote_layout import (
    RemoteRun,
    Upload,
    attempt_key,
    attempt_of,
    believable,
    decode_baseline,
    encode_baseline,
    is_record_of,
    manifest_key,
    mark_key,
    sort_keys,
    upload_prefix,
)
from mem_core.runtime.checkpoint_manager.rotation import plan_rotation


class Mirror:
    """The remote side of one run as seen by one attempt. Methods block; see `BackgroundMirror` for the thread.

    An older attempt can neither publish (readers ignore what it publishes late) nor delete anything but what was marked more than one
    lease time ago (I6). `owner` tells two machines of one attempt number apart; give the same one when a mirror is built again in the same
    attempt. Raises `StoreUnavailable` after bounded retries and `RunHeld` when a newer attempt has begun.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        attempt: int,
        section: CheckpointSection,
        *,
        fence: Callable[[], None],
        emit: Callable[[Event], object],
        owner: str = "",
        lease_s: float = 60.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._run_id, self._attempt, self._section = store, run_id, attempt, section
        self._fence, self._emit, self._lease_s, self._clock = fence, emit, lease_s, clock
        self._owner = owner or uuid.uuid4().hex
        self._begun = False
        self.also_keep: Callable[[], Collection[int]] = frozenset
        """Steps that stay whatever the section says: the best one, where that is kept."""

    @property
    def url(self) -> str:
        """Where the mirror is, without credentials."""
        return self._store.url

    def begin(self) -> None:
        """Record that this attempt drives the run, with what it saw; from here on older attempts publish in vain. Once is enough.

        Raises:
            RunHeld: a newer attempt has begun.
        """
        self._fence()
        run = self._look()
        if run.attempts and run.attempts[-1] > self._attempt:
            raise self._held(run.attempts[-1])
        key = attempt_key(self._run_id, self._attempt)
        if self._attempt in run.attempts:
            if not is_record_of(self._store.read(key), self._owner):
                raise self._held(self._attempt)
        else:
            try:
                self._store.create(key, encode_baseline(self._attempt, self._trusted(run), self._clock(), self._owner))
            except AlreadyExists as exc:
                raise self._held(self._attempt) from exc
        self._begun = True

    def push(self, folder: Path) -> Upload:
        """Upload one validated checkpoint. Doing it again after a failure goes on where it stopped; doing it twice changes nothing.

        Raises:
            InternalError: files in the folder are not those of its manifest.
        """
        data = read_regular(folder / MANIFEST_NAME, MAX_MANIFEST_BYTES)
        manifest = decode_manifest(data)
        upload = Upload(manifest.step, self._attempt, sha256_hex(data)[:8])
        prefix = upload_prefix(self._run_id, upload)
        if not self._begun:
            self.begin()
        for entry in manifest.files:
            if (folder / entry.path).stat().st_size != entry.size_bytes:
                raise InternalError(f"{entry.path} of step {manifest.step} changed before it was mirrored", remedy="Verify the checkpoint.")
            self._store.put_file(folder / entry.path, f"{prefix}/{entry.path}", sha256=entry.sha256)
        if (folder / SIGNATURE_NAME).is_file():
            self._store.put_file(folder / SIGNATURE_NAME, f"{prefix}/{SIGNATURE_NAME}")
        self._refuse_if_stale()
        key = manifest_key(self._run_id, upload)
        try:
            self._store.create(key, data)
        except AlreadyExists:
            if self._store.read(key) != data:
                raise InternalError(f"{key} holds another manifest", remedy="Report this as a bug.") from None
        return upload

    def available(self) -> tuple[Upload, ...]:
        """Uploads to restore from, best first: newest to oldest, those marked for deletion last."""
        run = self._look()
        trusted = self._trusted(run)
        return tuple(sorted(trusted, key=lambda upload: (upload not in run.marks, upload), reverse=True))

    def rotate(self) -> tuple[Upload, ...]:
        """Two phases: mark what is not to be kept, delete what was marked more than a lease time ago. Returns what was deleted.

        The manifest goes first, so that a half-deleted upload is no candidate.
        """
        self._refuse_if_stale()
        run = self._look()
        trusted = self._trusted(run)
        keep = self._to_keep(trusted)
        doomed = [
            upload for upload in run.keys if upload not in keep and upload.attempt <= self._attempt and not self._in_progress(upload, run)
        ]
        deleted: list[Upload] = []
        for upload in sorted(doomed):
            if upload not in run.marks:
                body = {"attempt": self._attempt, "marked_unix_s": self._clock()}
                self._store.write(mark_key(self._run_id, upload), json.dumps(body).encode())
            elif self._is_due(upload):
                self._refuse_if_stale()
                self._delete(upload, run)
                deleted.append(upload)
        self._tidy(run)
        self._abandon(self._attempt - 1)  # their writers are dead or shut out; our own may be at work
        return tuple(deleted)

    def abandon_unfinished(self) -> int:
        """Remove what uploads of this and older attempts began and did not finish: no listing shows it, and a store bills it. Returns how
        many. Only when no upload of this attempt is at work any more; of a number that another machine holds nothing is touched."""
        return self._abandon(self._attempt) if self._begun else 0

    def _abandon(self, up_to_attempt: int) -> int:
        left = [item for item in self._store.unfinished(self._run_id) if 0 < attempt_of(self._run_id, item.key) <= up_to_attempt]
        for item in left:
            self._store.abandon(item)
        return len(left)

    def orphans(self) -> tuple[str, ...]:
        """Keys of uploads that no manifest completes (interrupted ones): bounded, and rotation removes them."""
        run = self._look()
        return tuple(key for upload in run.incomplete for key in run.keys[upload])

    def read_manifest(self, upload: Upload) -> CheckpointManifest:
        """Manifest of an upload. Raises `KeyMissing` or `ManifestDamaged`."""
        return decode_manifest(self._store.read(manifest_key(self._run_id, upload)))

    def download(self, upload: Upload, folder: Path) -> None:
        """All objects of an upload into an empty folder; the caller checks them against the manifest."""
        manifest = self.read_manifest(upload)
        prefix = upload_prefix(self._run_id, upload)
        for name in (*(entry.path for entry in manifest.files), MANIFEST_NAME):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            self._store.get_file(f"{prefix}/{name}", folder / name)
        if self._store.stat(f"{prefix}/{SIGNATURE_NAME}") is not None:
            self._store.get_file(f"{prefix}/{SIGNATURE_NAME}", folder / SIGNATURE_NAME)

    def highest_attempt(self) -> int:
        """Greatest attempt number that the remote has seen, 0 if none: a new machine starts above it."""
        return highest_attempt(self._store, self._run_id)

    # -- inside -------------------------------------------------------------------------------------------------------------------

    def _look(self) -> RemoteRun:
        return sort_keys(self._run_id, self._store.list(self._run_id))

    def _trusted(self, run: RemoteRun) -> tuple[Upload, ...]:
        if not run.attempts:
            return run.complete
        key = attempt_key(self._run_id, run.attempts[-1])
        try:
            return believable(run, decode_baseline(self._store.read(key)))
        except ValueError as exc:
            raise StoreUnavailable(f"{key} in {self._store.url} is damaged ({exc})", field="checkpoint.mirror",
                                   remedy="Delete that object to trust every complete checkpoint of the mirror.") from exc  # fmt: skip

    def _to_keep(self, trusted: tuple[Upload, ...]) -> frozenset[Upload]:
        newest_of_step = {upload.step: upload for upload in trusted}  # ascending: the last attempt wins
        verdicts = {
            step: CheckpointVerdict(step=step, level="integrity", valid=True, weights_bad=False, manifest_sha256="")
            for step in newest_of_step
        }
        plan = plan_rotation(tuple(newest_of_step), verdicts, self._section, self.also_keep())
        return frozenset(newest_of_step[step] for step in plan.keep)

    def _in_progress(self, upload: Upload, run: RemoteRun) -> bool:
        """An own upload without a manifest may be going up at this moment, unless a newer one of ours is complete."""
        newest_own = max((item.step for item in run.complete if item.attempt == self._attempt), default=-1)
        return upload.attempt == self._attempt and upload in run.incomplete and upload.step > newest_own

    def _is_due(self, upload: Upload) -> bool:
        try:
            marked_unix_s = float(parse_json(self._store.read(mark_key(self._run_id, upload)))["marked_unix_s"])
        except (KeyMissing, ValueError, KeyError, TypeError):
            return False
        return self._clock() - marked_unix_s > self._lease_s

    def _delete(self, upload: Upload, run: RemoteRun) -> None:
        last = manifest_key(self._run_id, upload)
        for key in sorted(run.keys[upload], key=lambda item: item != last):
            self._store.delete(key)
        self._store.delete(mark_key(self._run_id, upload))

    def _tidy(self, run: RemoteRun) -> None:
        """Remove marks of what is gone, and records of attempts before the newest, which alone is read."""
        for upload in run.marks:
            if upload not in run.keys:
                self._store.delete(mark_key(self._run_id, upload))
        for attempt in run.attempts[:-1]:
            self._store.delete(attempt_key(self._run_id, attempt))

    def _refuse_if_stale(self) -> None:
        self._fence()
        attempts = self._look().attempts
        if attempts and attempts[-1] > self._attempt:
            raise self._held(attempts[-1])

    def _held(self, newer: int) -> RunHeld:
        return RunHeld(
            f"attempt {newer} of run {self._run_id} has begun in {self._store.url}",
            field="attempt",
            value=self._attempt,
            remedy="Let the newer attempt go on, or start again to get a newer one.",
        )


def highest_attempt(store: Store, run_id: str) -> int:
    """Greatest attempt number that the store has seen of a run, 0 if none: a new machine starts above it."""
    run = sort_keys(run_id, store.list(run_id))
    return max((*run.attempts, *(upload.attempt for upload in run.keys)), default=0)
