"""Small files that are replaced as a whole."""

from pathlib import Path

from mem_core.domain.errors import StoreUnavailable
from mem_core.infrastructure.storage.writing import replace_text


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file as a whole: a reader sees the old or the new text, after a crash too. It follows the umask."""
    try:
        replace_text(path, text)
    except OSError as exc:
        raise StoreUnavailable(
            "cannot write", field="store", value=f"{path}: {exc.strerror}", remedy="Free space or give a writable store."
        ) from exc
