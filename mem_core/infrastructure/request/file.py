"""From a file, standard input or `--set` to a `RuntimeRequest`, with messages that name field, value, bound and remedy."""

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import yaml

from mem_core.domain.capabilities import refuse_unsupported
from mem_core.domain.errors import RequestError
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.request.errors import request_error
from mem_core.infrastructure.storage.reading import MAX_JSON_DEPTH, parse_json, read_handed

SIZE_LIMIT_BYTES = 2**20
_PATH = re.compile(r"^[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*$")


def load_request(path: str, overrides: Sequence[str] = ()) -> RuntimeRequest:
    """The request in a YAML or JSON file (`-` is standard input), changed by `--set a.b=c` overrides.

    Raises:
        RequestError: the file cannot be read or parsed, a key is unknown or given twice, a value is out of bounds, or something is
            asked for that this build cannot do.
    """
    return build_request(apply_overrides(load_mapping(path), overrides))


def build_request(values: Mapping[str, Any]) -> RuntimeRequest:
    """A request that may be run. Raises RequestError (exit 64) for whatever is wrong or not supported, all of it in one message."""
    request = parse_request(values)
    refuse_unsupported(request)
    return request


def parse_request(values: Mapping[str, Any]) -> RuntimeRequest:
    """Validate plain values against the schema alone: for the doctor, which reports what is not supported among its findings, and
    where values are still to be changed. Raises RequestError."""
    from pydantic import ValidationError

    try:
        return RuntimeRequest.model_validate(dict(values))
    except ValidationError as exc:
        raise request_error(exc) from exc


def load_mapping(path: str) -> dict[str, Any]:
    """Top-level mapping of a request file, unvalidated. Raises RequestError."""
    try:
        raw = read_handed(path, SIZE_LIMIT_BYTES)
    except OSError as exc:
        raise RequestError(
            f"the request file cannot be read: {exc.strerror or exc}", value=path, remedy="Give the path of a YAML or JSON file."
        ) from exc
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise RequestError(f"the request file is not UTF-8 (byte {exc.start})", value=path, remedy="Save it as UTF-8.") from exc
    return parse_mapping(text, "standard input" if path == "-" else path)


def parse_mapping(text: str, name: str = "request") -> dict[str, Any]:
    """Parse YAML or JSON text whose top level is a mapping. Raises RequestError with line and column."""
    content = _parse(text, name)
    if not isinstance(content, dict):
        kind = "empty" if content is None else f"a {type(content).__name__}"
        raise RequestError(f"{name} is {kind}, not a mapping of request fields", remedy="Start with a line such as run_id: demo.")
    mapping = cast("dict[Any, Any]", content)
    _check_plain(mapping, name)
    return cast("dict[str, Any]", mapping)


def parse_value(text: str) -> Any:
    """One value as YAML, as in a request file: `3e-4` is a number, `null` is None, `[a, b]` a list, `stdlib:` text.

    Raises:
        RequestError: broken YAML.
    """
    value = _parse(text, "value")
    if isinstance(value, dict) and not text.lstrip().startswith("{"):
        return text.strip()  # "stdlib:" and "a: b" are YAML mappings by accident
    _check_plain(value, "value")
    return value


def apply_overrides(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of `values` with each `a.b=c` set; sections that are missing or null are made.

    Raises:
        RequestError: not of the form path=value, or the path runs through something that is no section.
    """
    result = copy.deepcopy(dict(values))
    for override in overrides:
        path, equals, text = override.partition("=")
        path = path.strip()
        if not equals or not _PATH.match(path):
            raise RequestError(
                "an override must look like training.max_steps=200", value=override, remedy="Write --set section.field=value."
            )
        *parents, last = path.split(".")
        target = result
        for depth, name in enumerate(parents, start=1):
            child = target.get(name)
            child = {} if child is None else child
            if not isinstance(child, dict):
                where = ".".join(parents[:depth])
                raise RequestError("this is a value, not a section", field=where, value=override, remedy=f"Set {where} itself.")
            target[name] = child
            target = cast("dict[str, Any]", child)
        target[last] = parse_value(text)
    return result


def _parse(text: str, name: str) -> Any:
    stripped = text.lstrip()
    try:
        if stripped.startswith("{"):
            try:
                return json.loads(text, object_pairs_hook=_unique_pairs)
            except json.JSONDecodeError:
                pass  # a YAML flow mapping; its parser says what is wrong
        return yaml.load(text, _RequestLoader)
    except _TooLarge as exc:
        raise RequestError(f"{name} {exc}", bound=f"{SIZE_LIMIT_BYTES} characters", remedy="Write it without aliases (*name).") from exc
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark
        where = f"{name}, line {mark.line + 1}, column {mark.column + 1}" if mark else name
        raise RequestError(f"{where}: {exc.problem or exc}", remedy="Correct the YAML there.") from exc
    except (yaml.YAMLError, RecursionError, ValueError) as exc:
        raise RequestError(f"{name} cannot be parsed: {str(exc)[:200]}", remedy="Correct the YAML or JSON.") from exc


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} is given twice")
        found[key] = value
    return found


def _check_plain(value: Any, name: str) -> None:
    """Only text keys, no anchor that contains itself, no binary values: what JSON can say, so that every run folder can keep it."""
    try:
        parse_json(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as exc:
        raise RequestError(
            f"{name} holds something that JSON cannot: {exc}", remedy="Use plain mappings, lists, text and numbers."
        ) from exc
    for path, key in _keys(value):
        if not isinstance(key, str):
            raise RequestError("a key must be text", field=path, value=key, remedy="Put it in quotes.")


def _keys(value: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, child in cast("dict[Any, Any]", value).items():
            yield prefix.rstrip("."), key
            yield from _keys(child, f"{prefix}{key}.")
    elif isinstance(value, list):
        for index, child in enumerate(cast("list[Any]", value)):
            yield from _keys(child, f"{prefix}{index}.")


class _TooLarge(Exception):
    """The text stands for more than it has room for."""


def _measure(node: yaml.Node, known: dict[int, int | None], depth: int) -> int:
    """Characters that a node stands for with every alias written out. `known` holds what was measured, None for what is being measured.

    Raises:
        _TooLarge: more than a request file may have, nested too deeply, or within itself.
    """
    if depth > MAX_JSON_DEPTH:
        raise _TooLarge(f"is nested more than {MAX_JSON_DEPTH} levels deep")
    if id(node) not in known:
        known[id(node)] = None
        if isinstance(node, yaml.ScalarNode):
            size = len(node.value) + 1
        elif isinstance(node, yaml.MappingNode):
            size = 1 + sum(_measure(part, known, depth + 1) for pair in node.value for part in pair)
        else:
            size = 1 + sum(_measure(part, known, depth + 1) for part in node.value)
        known[id(node)] = size
    size = known[id(node)]
    if size is None:
        raise _TooLarge("contains itself, which JSON cannot say")
    if size > SIZE_LIMIT_BYTES:
        raise _TooLarge("is too large with its aliases written out")
    return size


class _RequestLoader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2: `on` and `off` are words, `3e-4` is a number, dates are text; no key twice."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def get_single_node(self) -> yaml.Node | None:
        """The document, if it is of a sane size with every alias written out: nine levels of nine aliases would be 400 million values."""
        node = super().get_single_node()
        if node is not None:
            _measure(node, {}, depth=1)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else id(key_node)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    """Decimal unless it says 0x or 0o: a leading zero is no octal number."""
    text = loader.construct_scalar(node).replace("_", "")
    base = 16 if "0x" in text else 8 if "0o" in text else 10
    return int(text, base)


_RequestLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)
for _tag, _pattern, _first in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?(?:0x[0-9a-fA-F]+|0o[0-7]+|[0-9][0-9_]*)$", list("-+0123456789")),
    (
        "float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*\.[0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+.0123456789"),
    ),
    ("merge", r"^(?:<<)$", ["<"]),
):
    _RequestLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)
