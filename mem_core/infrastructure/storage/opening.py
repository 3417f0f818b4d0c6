"""From a URL to a `Store`."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mem_core.domain.errors import RequestError
from mem_core.infrastructure.storage.fsspec_store import FsspecStore
from mem_core.infrastructure.storage.local import LocalStore
from mem_core.infrastructure.storage.port import Store
from mem_core.infrastructure.storage.redact import redact_url
from mem_core.infrastructure.storage.retrying import RetryPolicy


def open_store(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    *,
    retry: RetryPolicy | None = None,
    refresh_options: Callable[[], Mapping[str, Any]] | None = None,
) -> Store:
    """A store for a local path, a `file://` URL or any fsspec URL. Opens no connection.

    `storage_options` are fsspec's own (for S3: key, secret, token, endpoint_url, client_kwargs, ...); `refresh_options` gives fresh ones
    after an authentication error.

    Raises:
        RequestError: no adapter for this kind of URL, or no bucket in it.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme in ("file", "local"):
        return LocalStore(Path(os.path.expanduser(rest if separator else url)).absolute())
    import fsspec

    try:
        fsspec.get_filesystem_class("s3" if scheme == "s3a" else scheme)
    except (ValueError, ImportError) as exc:
        raise RequestError(
            f"no storage adapter for {scheme}:// ({exc})",
            field="store",
            value=redact_url(url),
            remedy="Use a local folder or s3://bucket/prefix, or install the fsspec package for it.",
        ) from exc
    if not rest.rpartition("@")[2].strip("/"):
        raise RequestError("the URL names no bucket", field="store", value=redact_url(url), remedy="Write it as s3://bucket/prefix.")
    return FsspecStore(url, storage_options, retry=retry, refresh_options=refresh_options)
