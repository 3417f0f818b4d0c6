"""Where a model's files lie: local folders as they are, URL folders fetched once. Only inert files are ever fetched or read."""

import hashlib
import os
import tempfile
from pathlib import Path

from mem_core.domain.errors import RequestError
from mem_core.infrastructure.storage.reading import local_name, read_regular
from mem_core.runtime.models.fetching import fetch_folder
from mem_core.runtime.models.presets import PRESETS, preset_choices, preset_name

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
TOKENIZER_LIMIT_BYTES = 512 * 2**20


def is_preset(source: str) -> bool:
    """Whether the source names a preset.

    Raises:
        RequestError: it looks like one and is unknown; the choices are named.
    """
    name = preset_name(source)
    if name is not None and name not in PRESETS:
        raise RequestError(
            "unknown preset", field="model.source", value=source, bound=preset_choices(), remedy="Use one of these, or give a model folder"
        )
    return name is not None


def at_hand(source: str, cache_dir: Path) -> str:
    """The same model without a URL: fetched into `cache_dir` once, so that no later step or process needs the network for it.

    Raises:
        RequestError: no such preset or folder. StoreUnavailable: a URL that cannot be read.
    """
    return source if is_preset(source) else str(local_model_folder(source, cache_dir))


def local_model_folder(source: str, cache_dir: Path | None = None) -> Path:
    """The local folder of a model that is no preset; a URL is downloaded once into `cache_dir` (default: the temporary folder).

    Raises:
        RequestError: no such folder, or a bare hub name.
        StoreUnavailable: a URL that cannot be read.
    """
    if "://" in source and not source.startswith("file://"):
        return fetch_folder(source, cache_dir or Path(tempfile.gettempdir()) / f"mem-models-{os.getuid()}")
    path = local_name(source)
    if os.path.isdir(path):  # unlike Path.is_dir it takes any text
        return Path(path)
    problem = "is a file, not a model folder" if os.path.exists(path) else "no such folder"
    raise RequestError(
        problem,
        field="model.source",
        value=source,
        bound=f"{preset_choices()}, or a folder or URL with config.json, *.safetensors and tokenizer files",
        remedy="Models are not fetched by hub name: download the model first and give its folder",
    )


def tokenizer_identity(source: str, cache_dir: Path | None = None) -> str:
    """A name that changes whenever the tokenizer's files do. Reads them, imports nothing heavy.

    Raises:
        RequestError: no such folder, or one of the files cannot be read.
    """
    if is_preset(source):
        return "bytes-1"
    folder = local_model_folder(source, cache_dir)
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            content = _read(folder / name, source)
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return f"sha256:{digest.hexdigest()}"


def _read(path: Path, source: str) -> bytes:
    try:
        return read_regular(path, TOKENIZER_LIMIT_BYTES)
    except OSError as exc:
        raise RequestError(
            f"{path.name} cannot be read: {exc.strerror}", field="model.source", value=source, remedy="Check the file and its permissions"
        ) from exc
