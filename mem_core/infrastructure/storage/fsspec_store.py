"""Any fsspec object store as a `Store`; S3 through s3fs is the one that is tested over HTTP.

What is worked around here was measured: an exception inside `fs.open(..., "wb")` still publishes a short object, so nothing is streamed;
`put(recursive)` nests on the second call, so keys are explicit; listings go stale, so no cache is used; an instance keeps expired
credentials and does not survive a fork, so it is built anew after an authentication error and in another process.
"""

import hashlib
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mem_core.domain.errors import MemError, StoreUnavailable
from mem_core.infrastructure.storage.disk import OsDisk
from mem_core.infrastructure.storage.port import AlreadyExists, KeyMissing, ObjectStat, Unfinished, check_key
from mem_core.infrastructure.storage.redact import redact, redact_url, secrets_in
from mem_core.infrastructure.storage.retrying import RetryPolicy
from mem_core.infrastructure.storage.s3_details import etag_of_file, is_etag, part_size_bytes, s3_options

Result = TypeVar("Result")
_READ_CHUNK_BYTES = 4 << 20
_ACCESS_CODES = (
    "ExpiredToken",
    "InvalidToken",
    "TokenRefreshRequired",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "AccessDenied",
    "403",
    "401",
)


_NO_BUCKET = "NoSuchBucket"
# The reply to a completed multipart upload was lost, and what s3fs did next (abort it) found it gone: nothing is missing, try again.
_NOT_A_MISSING_KEY = (_NO_BUCKET, "NoSuchUpload")


class _Unproven(OSError):
    """What is stored is not what was sent; worth another try."""


class FsspecStore:
    """`Store` over an fsspec object store: single calls are atomic there, so each object is old or new, never a part.

    `storage_options` hold endpoint and keys (never the environment: see settings). `refresh_options` gives fresh ones after an
    authentication error, so that credentials that expire in a long run are replaced.
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any] | None = None,
        *,
        retry: RetryPolicy | None = None,
        refresh_options: Callable[[], Mapping[str, Any]] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        seed: int | None = None,
    ) -> None:
        scheme, _, rest = url.partition("://")
        self._protocol = "s3" if scheme in ("s3", "s3a") else scheme
        self._root = rest.partition("?")[0].rpartition("@")[2].rstrip("/")
        self._options: Mapping[str, Any] = dict(storage_options or {})
        self._refresh = refresh_options
        self._retry = retry or RetryPolicy()
        self._sleep = sleep
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._built: tuple[int, Any] | None = None

    @property
    def url(self) -> str:
        return redact_url(f"{self._protocol}://{self._root}")

    def read(self, key: str) -> bytes:
        path = self._path(key)
        return self._call("read", key, lambda fs: fs.cat_file(path))

    def write(self, key: str, data: bytes) -> None:
        path = self._path(key)
        self._call("write", key, lambda fs: self._write(fs, path, data))

    def create(self, key: str, data: bytes) -> None:
        path = self._path(key)

        def once(fs: Any) -> None:
            try:
                fs.pipe_file(path, data, mode="create")
            except FileExistsError:
                # The HTTP client sends a put again by itself when a kept connection breaks, and then our own first one is in the way.
                if fs.cat_file(path) != data:
                    raise

        self._call("create", key, once)

    def put_file(self, source: Path, key: str, *, sha256: str = "") -> ObjectStat:
        path = self._path(key)
        size_bytes = source.stat().st_size
        part_bytes = part_size_bytes(size_bytes)

        def once(fs: Any) -> ObjectStat:
            fs.put_file(str(source), path, **({"chunksize": part_bytes} if self._protocol == "s3" else {}))
            self._prove(fs, path, source, part_bytes, sha256)
            return ObjectStat(key, size_bytes)

        return self._call("upload", key, once)

    def get_file(self, key: str, target: Path) -> None:
        path = self._path(key)
        partial = target.with_name(f".partial-{uuid.uuid4().hex}")

        def once(fs: Any) -> None:
            wanted = self._info(fs, path)
            if wanted is None:
                raise KeyMissing(f"nothing under {key} in {self.url}")
            fs.get_file(path, str(partial))
            if partial.stat().st_size != wanted["size"]:
                raise _Unproven(f"got {partial.stat().st_size} bytes of {wanted['size']}")

        try:
            self._call("download", key, once)
            OsDisk().sync_file(partial)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    def list(self, prefix: str) -> tuple[ObjectStat, ...]:
        check_key(prefix, allow_empty=True)
        folder = f"{self._root}/{prefix}" if prefix else self._root
        before = f"{folder}/"

        def once(fs: Any) -> tuple[ObjectStat, ...]:
            fs.invalidate_cache()
            found: dict[str, dict[str, Any]] = fs.find(folder, detail=True)
            stats = [
                ObjectStat(name[len(self._root) + 1 :], int(info["size"]), _modified_s(info))
                for raw, info in found.items()
                if (name := raw.lstrip("/") if not self._root.startswith("/") else raw).startswith(before) and info["type"] == "file"
            ]
            return tuple(sorted(stats, key=lambda item: item.key))

        try:
            return self._call("list", prefix, once)
        except KeyMissing:
            return ()

    def stat(self, key: str) -> ObjectStat | None:
        path = self._path(key)
        info = self._call("stat", key, lambda fs: self._info(fs, path))
        return None if info is None else ObjectStat(key, int(info["size"]), _modified_s(info))

    def delete(self, key: str) -> bool:
        path = self._path(key)

        def once(fs: Any) -> bool:
            if self._info(fs, path) is None:
                return False
            fs.rm_file(path)
            return True

        try:
            return self._call("delete", key, once)
        except KeyMissing:
            return False

    def unfinished(self, prefix: str) -> tuple[Unfinished, ...]:
        check_key(prefix, allow_empty=True)
        if self._protocol != "s3":
            return ()  # no other store of fsspec's says what it keeps of them
        bucket, _, folder = self._root.partition("/")
        before = "/".join(part for part in (folder, prefix) if part)
        cut = len(folder) + 1 if folder else 0

        def once(fs: Any) -> tuple[Unfinished, ...]:
            reply = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{before}/" if before else "")
            return tuple(
                sorted((Unfinished(str(item["Key"])[cut:], str(item["UploadId"])) for item in reply.get("Uploads") or ()), key=str)
            )

        return self._call("list unfinished uploads", prefix, once)

    def abandon(self, unfinished: Unfinished) -> None:
        bucket, _, key = self._path(unfinished.key).partition("/")

        def once(fs: Any) -> None:
            try:
                fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=unfinished.upload_id)
            except FileNotFoundError as exc:
                if _code_of(exc) == _NO_BUCKET:
                    raise

        if self._protocol == "s3":
            self._call("abandon", unfinished.key, once)

    # -- inside -------------------------------------------------------------------------------------------------------------------

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _write(self, fs: Any, path: str, data: bytes) -> None:
        fs.pipe_file(path, data)
        info = self._info(fs, path)
        if info is None or info["size"] != len(data):
            raise _Unproven(f"wrote {len(data)} bytes, found {info and info['size']}")

    def _info(self, fs: Any, path: str) -> dict[str, Any] | None:
        fs.invalidate_cache()
        try:
            info: dict[str, Any] = fs.info(path)
        except FileNotFoundError as exc:
            if _code_of(exc) == _NO_BUCKET:
                raise
            return None
        return info if info["type"] == "file" else None

    def _prove(self, fs: Any, path: str, source: Path, part_bytes: int, sha256: str) -> None:
        """Size and checksum of what is stored; the ETag where it is a digest of the content, else the bytes themselves."""
        info = self._info(fs, path)
        if info is None or info["size"] != source.stat().st_size:
            raise _Unproven(f"sent {source.stat().st_size} bytes, found {info and info['size']}")
        etag = str(info.get("ETag", "")).strip('"')
        if self._protocol == "s3" and is_etag(etag) and etag == etag_of_file(source, part_bytes):
            return
        digest = hashlib.sha256()
        with fs.open(path, "rb", block_size=_READ_CHUNK_BYTES, cache_type="readahead") as stored:
            while chunk := stored.read(_READ_CHUNK_BYTES):
                digest.update(chunk)
        if digest.hexdigest() != (sha256 or OsDisk().digest(source)[1]):
            raise _Unproven("the checksum of the stored object differs")

    def _filesystem(self) -> Any:
        with self._lock:
            if self._built is None or self._built[0] != os.getpid():
                import fsspec

                options = s3_options(self._options) if self._protocol == "s3" else dict(self._options)
                ours = {"skip_instance_cache": True, "use_listings_cache": False}  # whatever the options say
                fs: Any = fsspec.filesystem(self._protocol, **{**options, **ours})
                if self._protocol == "s3":
                    fs.retries = 1  # one layer of retries: this one
                self._built = (os.getpid(), fs)
            return self._built[1]

    def _renew(self) -> None:
        """Forget the instance; take fresh credentials where there is a source of them."""
        with self._lock:
            self._built = None
            if self._refresh is not None:
                self._options = dict(self._refresh())

    def _call(self, verb: str, key: str, once: Callable[[Any], Result]) -> Result:
        delays_s = self._retry.delays_s(self._rng)
        while True:
            try:
                return once(self._filesystem())
            except MemError:
                raise
            except KeyMissing:
                raise
            except FileExistsError as exc:
                raise AlreadyExists(f"{key} is already in {self.url}") from exc
            except Exception as exc:
                if isinstance(exc, FileNotFoundError) and _code_of(exc) not in _NOT_A_MISSING_KEY:
                    raise KeyMissing(f"nothing under {key} in {self.url}") from exc
                if isinstance(exc, PermissionError) or _code_of(exc) in _ACCESS_CODES:
                    self._renew()
                delay_s = next(delays_s, None)
                if delay_s is None or not _worth_a_retry(exc):
                    raise self._unavailable(verb, key, exc) from None  # the cause may hold credentials in its text
                self._sleep(delay_s)

    def _unavailable(self, verb: str, key: str, exc: Exception) -> StoreUnavailable:
        text = redact(f"{type(exc).__name__}: {exc}", secrets_in(self._options))[:300]
        return StoreUnavailable(
            f"{self.url} did not take the call to {verb} {key or 'its root'} after {self._retry.attempts} tries ({text})",
            field="store",
            remedy="Check address, credentials and network, then give the same command again; nothing local was removed.",
        )


def _code_of(exc: BaseException) -> str:
    """The store's own error code, where the exception carries one."""
    response = getattr(exc.__cause__ or exc, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def _worth_a_retry(exc: Exception) -> bool:
    """Everything that a network or a store may do is tried again; a bucket that is not there and a mistake in our own call are not."""
    return _code_of(exc) != _NO_BUCKET and not isinstance(exc, (TypeError, ValueError, NotImplementedError, ImportError, IsADirectoryError))


def _modified_s(info: Mapping[str, Any]) -> float:
    when: Any = info.get("LastModified") or info.get("created") or info.get("mtime")
    return float(when.timestamp()) if hasattr(when, "timestamp") else float(when or 0.0)
