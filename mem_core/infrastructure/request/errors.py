"""Pydantic's errors about a request, as one `RequestError` for people: field, value, bound, remedy, closest known key."""

import difflib
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from mem_core.domain.errors import RequestError
from mem_core.domain.request import RuntimeRequest

_SECRET = re.compile(r"key|secret|token|password", re.IGNORECASE)
_SYMBOLS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "bool": "true or false",
    "tuple": "a list",
    "dict": "a mapping",
    "model": "a mapping of fields",
}


def request_error(error: ValidationError, model: type[BaseModel] = RuntimeRequest) -> RequestError:
    """All problems in one error; the first gives field, value and bound."""
    problems: dict[str, RequestError] = {}
    for raw in error.errors(include_url=False):
        one = _one(dict(raw), model)
        problems.setdefault(one.field or one.problem, one)
    first, *others = problems.values()
    if not others:
        return first
    more = "; ".join(str(other) for other in others[:5]) + (f"; and {len(others) - 5} more" if len(others) > 5 else "")
    return RequestError(first.problem, remedy=f"{first.remedy} Also: {more}", field=first.field, value=first.value, bound=first.bound)


def _one(raw: dict[str, Any], model: type[BaseModel]) -> RequestError:
    path, info = _resolve(raw["loc"], model)
    kind, value, context = str(raw["type"]), raw.get("input"), raw.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(raw["loc"], model)
    if kind == "missing":
        return RequestError("this field is required", field=path, remedy=_hint(info) or "Set it.")
    shown = None if isinstance(value, dict | BaseModel) or _SECRET.search(path.rpartition(".")[2]) else repr(value)
    if kind == "value_error":
        return _own_message(str(raw["msg"]).removeprefix("Value error, "), path, shown, info, model)
    bound = str(context["expected"]).replace("'", "") if kind == "literal_error" else _bound(info)
    if info is not None and _is_union(info.annotation):
        kinds = _union_bound(info)
        bound = f"{kinds} ({bound})" if kinds and bound else kinds or bound
    return RequestError(_problem(kind, str(raw["msg"])), field=path, value=shown, bound=bound, remedy=_hint(info) or "Correct the value.")


def _problem(kind: str, message: str) -> str:
    if kind == "finite_number":
        return "must be a finite number"
    if kind == "literal_error":
        return "is not one of the known values"
    if kind == "string_pattern_mismatch":
        return "does not have the right form"
    wanted = _KINDS.get(kind.split("_")[0])
    if wanted and kind.rpartition("_")[2] in ("type", "parsing", "float"):
        return f"must be {wanted}"
    return message.replace("Input should be", "must be").replace("Tuple should", "should").replace("String should", "should")


def _own_message(message: str, path: str, shown: str | None, info: FieldInfo | None, model: type[BaseModel]) -> RequestError:
    """Our own validators write "problem; remedy" and name the field where the error belongs to a whole section."""
    problem, _, remedy = message.partition("; ")
    if info is None or shown is None:
        section = f"{path}." if path else ""
        known = {known for known, _ in known_fields(model)}
        named = (word for word in re.findall(r"[a-z_]+(?:\.[a-z_]+)*", problem))
        path = next((full for word in named for full in (word, section + word) if full in known and "." in full), path)
        shown = None
    for prefix in (f"{path} ", f"{path.rpartition('.')[2]} "):
        problem = problem if problem.startswith(f"{prefix}and ") else problem.removeprefix(prefix)
    return RequestError(
        problem, field=path, value=None if shown and shown in problem else shown, remedy=_sentence(remedy) or _hint(info) or "Correct it."
    )


def _unknown_key(loc: tuple[str | int, ...], model: type[BaseModel]) -> RequestError:
    """Names the closest key of the same section, else the same name in another one."""
    *parents, key = (str(part) for part in loc)
    section = ".".join(parents)
    known = [path for path, _ in known_fields(model)]
    here = [path.rpartition(".")[2] for path in known if path.rpartition(".")[0] == section]
    close = difflib.get_close_matches(key, here, n=1, cutoff=0.6)
    elsewhere = [path for path in known if path.rpartition(".")[2] == key] or [
        path
        for path in known
        if path.rpartition(".")[2] in difflib.get_close_matches(key, [p.rpartition(".")[2] for p in known], n=1, cutoff=0.8)
    ]
    remedy = f"Known here: {', '.join(here)}."
    if close:
        remedy = f"Did you mean {'.'.join([*parents, close[0]])}? {remedy}"
    elif elsewhere:
        remedy = f"Did you mean {elsewhere[0]}?"
    return RequestError("unknown key", field=".".join([*parents, key]), remedy=remedy)


def known_fields(model: type[BaseModel] = RuntimeRequest, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """(dotted path, field) of every field of a request at any depth, sections included."""
    for name, info in model.model_fields.items():
        yield prefix + name, info
        section = _section(info.annotation)
        if section is not None:
            yield from known_fields(section, f"{prefix}{name}.")


def _resolve(loc: tuple[str | int, ...], model: type[BaseModel]) -> tuple[str, FieldInfo | None]:
    """Dotted path without pydantic's union tags, and the field that it ends in."""
    names: list[str] = []
    info: FieldInfo | None = None
    current: type[BaseModel] | None = model
    for part in loc:
        if current is not None and part in current.model_fields:
            info = current.model_fields[str(part)]
            current = _section(info.annotation)
            names.append(str(part))
        elif isinstance(part, int) and names:
            names.append(str(part))
    return ".".join(names), info if current is None else None


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section model of a field, also where it may be null."""
    for option in (annotation, *typing.get_args(annotation)):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _union_bound(info: FieldInfo) -> str:
    """What a field with several kinds of values takes, such as `auto, a number >= 1`."""
    parts: list[str] = []
    for option in typing.get_args(info.annotation):
        if typing.get_origin(option) is typing.Literal:
            parts += [str(choice) for choice in typing.get_args(option)]
        elif option is type(None):
            parts.append("null")
        else:
            base = typing.get_args(option)[0] if typing.get_origin(option) is typing.Annotated else option
            name = getattr(typing.get_origin(base) or base, "__name__", "")
            parts.append(_KINDS.get({"str": "string"}.get(name, name), name))
    return ", ".join(parts)


def _bound(info: FieldInfo | None) -> str:
    """Both ends of the allowed range, or the pattern."""
    if info is None:
        return ""
    ends = [
        f"{_SYMBOLS[name]} {getattr(rule, name)}" for rule in info.metadata for name in _SYMBOLS if getattr(rule, name, None) is not None
    ]
    patterns = [str(rule.pattern) for rule in info.metadata if getattr(rule, "pattern", None)]
    return " and ".join(ends + patterns)


def _hint(info: FieldInfo | None) -> str:
    return f"Meaning: {info.description}" if info is not None and info.description else ""


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?")) else ".") if text else ""
