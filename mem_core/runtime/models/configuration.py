"""What a model's config.json says: read, and judged by what would stop training later. Nothing heavy imported.

Everything in it was written by somebody else: each value that is used is checked here, so that a model folder can be refused (64) and
never crashes whoever looks at it.
"""

import ast
import os
import stat
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from mem_core.domain.errors import RequestError
from mem_core.infrastructure.storage.reading import read_json, read_regular_text, why

LIMIT_BYTES = 16 * 2**20
READ_SUFFIXES = (".json", ".safetensors", ".jinja", ".txt", ".model")
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_MOST = 2**31 - 1
_COUNTS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
           "max_position_embeddings", "head_dim", "n_layer", "n_embd", "n_head", "n_inner", "n_positions", "n_ctx", "num_layers",
           "num_heads", "d_model", "ffn_dim", "max_seq_len")  # fmt: skip
_AGAIN = "Download the model again"


def refused(problem: str, source: str, remedy: str = _AGAIN, bound: str = "") -> RequestError:
    """The error of a model that cannot be used."""
    return RequestError(problem, field="model.source", value=source, bound=bound, remedy=remedy)


def read_config(folder: Path, source: str) -> dict[str, Any]:
    """The parsed `config.json`.

    Raises:
        RequestError: missing, or not a JSON object.
    """
    try:
        config = read_json(folder / "config.json", LIMIT_BYTES)
    except FileNotFoundError as exc:
        raise refused("the folder has no config.json", source, "Give a Hugging Face causal language model folder") from exc
    except (OSError, ValueError) as exc:
        raise refused(f"config.json cannot be read: {why(exc)}", source) from exc
    if not isinstance(config, dict):
        raise refused("config.json is not a JSON object", source)
    return cast("dict[str, Any]", config)


def check_folder(folder: Path, source: str) -> None:
    """Whether every file that a loader of this folder would open is a file: others open a pipe and wait for ever.

    Raises:
        RequestError: one is not.
    """
    try:
        for path in sorted(folder.iterdir()):
            if path.suffix in READ_SUFFIXES and path.exists() and not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
                raise refused(f"{path.name} in the folder is no plain file", source)
            if path.suffix == ".json" and not os.access(path, os.R_OK):
                raise refused(f"{path.name} in the folder cannot be read", source, "Give this user read permission")
    except OSError as exc:
        raise refused(f"the folder cannot be looked at: {exc.strerror}", source, "Give this user read permission") from exc


def check_config(config: dict[str, Any], source: str) -> None:
    """Whether this is a causal language model that transformers builds by itself, of sane sizes.

    Raises:
        RequestError: it is not; or its weights are quantised.
    """
    _check_architecture(config, source)
    if config.get("quantization_config") is not None or config.get("compression_config") is not None:
        raise refused(
            f"its weights are quantised ({_method(config)}), which cannot be trained", source, "Give the model that it was made from"
        )
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise refused("config.json: text_config is no mapping", source)
    for part in (config, cast("dict[str, Any]", text)):
        for name in _COUNTS:
            _check_count(part, name, source)
    _check_known(config, source)


def _check_architecture(config: dict[str, Any], source: str) -> None:
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in cast("list[Any]", names)):
        raise refused("config.json: architectures must be a list of names", source)
    if names and not any(str(name).endswith(_CAUSAL) for name in cast("list[Any]", names)):
        raise refused(
            f"the model is a {', '.join(map(str, cast('list[Any]', names)))}, not a causal language model",
            source,
            "Give a model whose architecture ends in ForCausalLM",
        )


def _method(config: dict[str, Any]) -> str:
    section = config.get("quantization_config") or config.get("compression_config")
    method = cast("dict[str, Any]", section).get("quant_method") if isinstance(section, dict) else None
    return str(method)[:40] if method else "by a method that it does not name"


def _check_count(part: dict[str, Any], name: str, source: str) -> None:
    """Some architectures give one number a layer: then each must hold."""
    value = part.get(name)
    for number in cast("list[Any]", value) if isinstance(value, list) else [value]:
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= _MOST):
            raise refused(f"config.json: {name} is {number!r:.60}", source, bound="a whole number from 1")


def _check_known(config: dict[str, Any], source: str) -> None:
    kind = config.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise refused("config.json: model_type must be a name", source)
    known = causal_model_types()
    if known and kind not in known and (kind is not None or config.get("auto_map")):
        own_code = "; it comes with code of its own, which MEM never runs" if config.get("auto_map") else ""
        raise refused(
            f"config.json: transformers knows no causal language model of model_type {kind!r:.60}{own_code}",
            source,
            "Give a model that the installed transformers knows by itself",
        )


def count_of(config: dict[str, Any], names: tuple[str, ...]) -> int | None:
    """The first of these numbers that is there; of one number a layer the largest. None where there is none. `config` is checked."""
    value = next((config[name] for name in names if config.get(name) is not None), None)
    return max((int(number) for number in cast("list[Any]", value)), default=None) if isinstance(value, list) else value


@lru_cache(maxsize=1)
def causal_model_types() -> frozenset[str]:
    """Every model_type that the installed transformers builds as a causal language model; empty where that cannot be told.

    Read from its source, since importing it takes seconds.
    """
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return frozenset()
    try:
        tree = ast.parse(read_regular_text(Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py", LIMIT_BYTES))
    except (OSError, ValueError, SyntaxError):
        return frozenset()
    tables = [node.value for node in tree.body if isinstance(node, ast.Assign) and _is_named(node, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")]
    pairs = [pair for table in tables for pair in ast.walk(table) if isinstance(pair, ast.Tuple) and pair.elts]
    return frozenset(str(pair.elts[0].value) for pair in pairs if isinstance(pair.elts[0], ast.Constant))


def _is_named(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
