"""Small files that are replaced as a whole."""

import contextlib
import os
import tempfile
from pathlib import Path

from mem_core.domain.errors import StoreUnavailable


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file as a whole: a reader sees the old or the new text, after a crash too."""
    temporary = ""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as exc:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise StoreUnavailable(
            "cannot write", field="store", value=f"{path}: {exc.strerror}", remedy="Free space or give a writable store."
        ) from exc
