"""Where bytes live: the `Store` port and its adapters (local disk, any fsspec URL, S3).

Called by the mirror, the doctor's probe and the journal. One contract suite holds for all; no listing is trusted from a cache.
"""

from mem_core.infrastructure.storage.disk import Disk, OsDisk
from mem_core.infrastructure.storage.local import LocalStore
from mem_core.infrastructure.storage.opening import open_store
from mem_core.infrastructure.storage.port import AlreadyExists, KeyMissing, ObjectStat, Store, Unfinished
from mem_core.infrastructure.storage.redact import redact, redact_url
from mem_core.infrastructure.storage.retrying import RetryPolicy

__all__ = [
    "AlreadyExists",
    "Disk",
    "KeyMissing",
    "LocalStore",
    "ObjectStat",
    "OsDisk",
    "RetryPolicy",
    "Store",
    "Unfinished",
    "open_store",
    "redact",
    "redact_url",
]
