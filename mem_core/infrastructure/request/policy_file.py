"""Reading bounds from a YAML file: the edge where text becomes `PolicyBounds`, or a `RequestError` that names the line's field."""

from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError

from mem_core.domain.errors import RequestError
from mem_core.domain.policy import BUILT_IN_BOUNDS, PolicyBounds
from mem_core.infrastructure.storage.reading import local_name, open_regular

_SIZE_LIMIT_BYTES = 65_536
_EXAMPLE = "Write for example: lanes: {cpu: {lr_multiplier: {at_least: 0.1, at_most: 0.5}}}."


class _StrictLoader(yaml.SafeLoader):
    """Plain values only: no aliases (they can grow without bound) and no key given twice (the second would win in silence)."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for position, key in enumerate(keys):
            if key in keys[:position]:
                raise yaml.YAMLError(f"key {key!r} is given twice (line {node.value[position][0].start_mark.line + 1})")
        return super().construct_mapping(node, deep)


def load_policy_file(path: str | Path) -> PolicyBounds:
    """Bounds from a file; what it leaves out stays as built in.

    Raises:
        RequestError: the file cannot be read, or `parse_policy` refuses it.
    """
    try:
        with open_regular(local_name(str(path))) as file:
            raw = file.read(_SIZE_LIMIT_BYTES + 1)
    except (OSError, ValueError) as exc:
        problem = getattr(exc, "strerror", None) or "not a path"
        raise RequestError(
            "the policy file cannot be read", field="policy.file", value=f"{path}: {problem}", remedy="Give the path of a YAML file."
        ) from exc
    return parse_policy(raw)


def parse_policy(raw: bytes) -> PolicyBounds:
    """Bounds from YAML: `lanes: {cpu: {...}, cuda: {...}}` with the fields of `LaneBounds`, over the built-in ones.

    Raises:
        RequestError: not YAML, too large, a key twice or unknown, a value of the wrong type or outside of what is possible.
    """
    if len(raw) > _SIZE_LIMIT_BYTES:
        raise RequestError(
            "the policy file is too large",
            field="policy.file",
            bound=f"at most {_SIZE_LIMIT_BYTES} bytes",
            remedy="Bounds need a few lines.",
        )
    given = _read_yaml(raw)
    lanes = _mapping("lanes", _known(given, "", ("schema_version", "lanes")).get("lanes", {}))
    if given.get("schema_version", 1) != 1:
        raise _wrong("schema_version", given["schema_version"], "1", "Write schema_version: 1, or leave it out.")
    merged = {
        device: _merge(BUILT_IN_BOUNDS.of(device).model_dump(), _mapping(f"lanes.{device}", lanes.get(device, {})))
        for device in ("cpu", "cuda")
    }
    _known(lanes, "lanes.", ("cpu", "cuda"))
    try:
        return PolicyBounds.model_validate(merged)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        field = ".".join(("lanes", *(str(part) for part in first["loc"])))
        value = first["input"] if isinstance(first["input"], int | float | str) else None
        raise _wrong(field, value, first["msg"].removeprefix("Value error, "), _EXAMPLE) from exc


def _read_yaml(raw: bytes) -> dict[str, Any]:
    try:
        given: object = yaml.load(raw.decode(), Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as exc:
        shown = " ".join(str(exc).split())[:200] or type(exc).__name__
        raise RequestError("the policy file is not readable YAML", field="policy.file", value=shown, remedy=_EXAMPLE) from exc
    return {} if given is None else _mapping("", given)


def _mapping(field: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in cast("dict[object, object]", value)):
        raise _wrong(field or "the file", type(value).__name__, "a mapping with names as keys", _EXAMPLE)
    return cast("dict[str, Any]", value)


def _known(value: dict[str, Any], prefix: str, names: tuple[str, ...]) -> dict[str, Any]:
    for key in value:
        if key not in names:
            raise _wrong(f"{prefix}{key[:60]}", None, ", ".join(names), "Remove the key or correct its name.")
    return value


def _merge(built_in: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """`given` over `built_in`, one level of bounds deep; unknown keys stay in and are refused by the schema."""
    return {
        **built_in,
        **{
            key: {**built_in[key], **value} if isinstance(built_in.get(key), dict) and isinstance(value, dict) else value
            for key, value in given.items()
        },
    }


def _wrong(field: str, value: object, bound: str, remedy: str) -> RequestError:
    return RequestError("not a valid policy", field=f"policy.file: {field}", value=value, bound=bound, remedy=remedy)
