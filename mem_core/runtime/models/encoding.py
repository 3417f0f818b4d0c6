"""What decides the token ids that a model's tokenizer gives: its name for caches, part by part, and the files that belong to it.

Transformers chooses the tokenizer's class by several fields of config.json, by tokenizer_config.json and by which packages are
installed; byte-identical tokenizer files give other ids under another class. Every part is kept apart, so that whoever finds a
difference can say which one it is.
"""

import hashlib
import json
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mem_core.domain.errors import RequestError
from mem_core.infrastructure.storage.reading import open_regular
from mem_core.runtime.models.configuration import read_config
from mem_core.runtime.models.folders import is_preset, local_model_folder

CURRENT_RULES = 4
"""How rows become tokens. 1: runs whose record names no encoding. 2: the loss of a chat covers what its template marks, else all of it,
and packed documents see each other. 3: files are text or JSONL, by their names. A run goes on under the rules that it was born with."""

_PATTERNS = (
    "tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "*.model", "*.tiktoken", "tekken.json",
    "bpe.codes", "dict.txt", "byte_maps.json", "emoji.json", "entity_vocab.json", "prophetnet.tokenizer",
)  # fmt: skip
_CHAT_PATTERNS = ("chat_template*", "*.jinja")
_CHAT_FOLDER = "additional_chat_templates"
_CONFIG_FIELDS = (
    "model_type", "model_name", "tokenizer_class", "auto_map", "architectures", "transformers_version", "is_encoder_decoder",
)  # fmt: skip
_NESTED = ("encoder", "decoder", "text_config")
_PACKAGES = ("transformers", "tokenizers", "sentencepiece", "tiktoken", "mistral_common")
_CHAT_PACKAGES = ("jinja2",)
Encoding = dict[str, str]


def tokenizer_files(folder: Path, *, chat: bool = True) -> tuple[str, ...]:
    """Names of the files that a tokenizer may be made of, relative to the folder, sorted; `chat`: chat templates too."""
    patterns = (*_PATTERNS, *_CHAT_PATTERNS) if chat else _PATTERNS
    found = [path.name for path in folder.iterdir() if path.is_file() and any(fnmatch(path.name, pattern) for pattern in patterns)]
    templates = (folder / _CHAT_FOLDER).glob("*.jinja") if chat else ()
    return tuple(sorted([*found, *(f"{_CHAT_FOLDER}/{path.name}" for path in templates)]))


def encoding_of(source: str, cache_dir: Path | None = None, *, chat: bool = False, rules: int = CURRENT_RULES) -> Encoding:
    """The parts that decide ids, without importing anything heavy. `chat`: rows are messages, which a template renders.

    The class itself is not among them: it follows from them, and whoever loads the tokenizer adds it.

    Raises:
        RequestError: no such preset or folder, or a file in it that cannot be read.
    """
    named = {"rules": str(rules)}
    if is_preset(source):
        return {**named, "tokenizer": "bytes-1"}
    folder = local_model_folder(source, cache_dir)
    config = read_config(folder, source) if (folder / "config.json").exists() else {}  # a folder with a tokenizer and no model
    fields: dict[str, Any] = {name: config[name] for name in _CONFIG_FIELDS if name in config}
    fields |= {name: config[name].get("model_type") for name in _NESTED if isinstance(config.get(name), dict)}
    packages = (*_PACKAGES, *_CHAT_PACKAGES) if chat else _PACKAGES
    return {
        **named,
        **{f"file {name}": _digest(folder / name, source) for name in tokenizer_files(folder, chat=chat)},
        **{f"config.json {name}": _text(value) for name, value in fields.items()},
        **{name: _version(name) for name in packages},
    }


def architecture_identity(source: str, cache_dir: Path | None = None) -> str:
    """SHA-256 of what decides how a folder's model computes: its configuration and the library that reads it.

    Raises:
        RequestError: no such folder, or no configuration in it.
    """
    config = read_config(local_model_folder(source, cache_dir), source)
    return hashlib.sha256(json.dumps([config, _version("transformers")], sort_keys=True, default=str).encode()).hexdigest()


def rules_of(encoding: Encoding) -> int:
    """Under which rules a run prepares its rows, by the encoding in its record: one that names none was born under the first."""
    return int(encoding.get("rules", "1"))


def differences(before: Encoding, now: Encoding) -> tuple[str, ...]:
    """`transformers: 5.24.0 at birth, 5.25.0 now` for each part that is another one."""
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return tuple(f"{name}: {_shown(before.get(name))} at birth, {_shown(now.get(name))} now" for name in names)


def _shown(value: str | None) -> str:
    return "none" if value is None else value if len(value) <= 40 else f"{value[:16]}..."


def _text(value: Any) -> str:
    """Short enough for a record, whatever somebody wrote there."""
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 100 else f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _digest(path: Path, source: str) -> str:
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as exc:
        raise RequestError(
            f"{path.name} cannot be read: {exc.strerror}", field="model.source", value=source, remedy="Download the model again"
        ) from exc


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
