"""From a planner's raw reply to a directive, or to the reason why the whole reply is refused. Nothing is repaired."""

import json
import math
import unicodedata
from typing import cast

from mem_core.domain.directive import DIRECTIVE_SIZE_LIMIT_BYTES, ExecutiveDirective, Refusal, RefusalReason

_FLOAT_FIELDS = ("lr_multiplier", "gradient_clip_norm")
_INTEGER_FIELDS = ("loss_scale_initial_power",)
_KNOWN = (*_FLOAT_FIELDS, *_INTEGER_FIELDS)
_DEPTH_LIMIT = 8
_DIGITS_LIMIT = 400
_SHOWN_CHARACTERS = 60


def parse_directive(reply: bytes | str, size_limit_bytes: int = DIRECTIVE_SIZE_LIMIT_BYTES) -> ExecutiveDirective | Refusal:
    """Read one clear JSON object with known keys and finite numbers.

    Prose or a code fence around the object is ignored; a second object, or any brace or bracket outside of the object (look-alikes
    included), refuses the reply, since then it is not clear what is meant. So does a duplicate or unknown key, null, a
    string or bool for a number, a fraction for the integer, NaN, an infinity or a number too large to be finite.

    Total: never raises, whatever the reply; time and memory are linear in the size limit.
    """
    text = _decode(reply, size_limit_bytes)
    if isinstance(text, Refusal):
        return text
    body = _only_object(text)
    if isinstance(body, Refusal):
        return body
    try:
        pairs = json.loads(body, object_pairs_hook=list, parse_int=_integer, parse_float=float, parse_constant=_not_finite)
    except ValueError:
        return _refuse("broken_json", "the object is not valid JSON")
    return _directive(cast("list[tuple[str, object]]", pairs))


def read_advice(reply: bytes | Refusal | None, size_limit_bytes: int = DIRECTIVE_SIZE_LIMIT_BYTES) -> ExecutiveDirective | Refusal | None:
    """A planner's answer as the policy engine takes it: parsed, or the refusal that it already is, or None for no advice."""
    return parse_directive(reply, size_limit_bytes) if isinstance(reply, bytes) else reply


def reply_text(reply: bytes | Refusal | None, size_limit_bytes: int = DIRECTIVE_SIZE_LIMIT_BYTES) -> str | None:
    """The reply as the journal keeps it: readable and of limited size. A reply that was taken is kept as it is."""
    return reply[:size_limit_bytes].decode("utf-8", "replace") if isinstance(reply, bytes) else None


def _refuse(reason: RefusalReason, detail: str) -> Refusal:
    return Refusal(reason=reason, detail=detail)


def _decode(reply: object, size_limit_bytes: int) -> str | Refusal:
    if not isinstance(reply, bytes | str):
        return _refuse("not_text", f"the reply is a {type(reply).__name__}, not text")
    too_large = _refuse("too_large", f"the reply is larger than {size_limit_bytes} bytes")
    if len(reply) > size_limit_bytes:
        return too_large
    try:
        raw = reply if isinstance(reply, bytes) else reply.encode()
        return too_large if len(raw) > size_limit_bytes else raw.decode()
    except UnicodeError:
        return _refuse("not_utf8", "the reply is not valid UTF-8")


def _only_object(text: str) -> str | Refusal:
    """The text of the one object in the reply."""
    start = text.find("{")
    if start < 0:
        return _refuse("no_object", "the reply holds no JSON object")
    end = _object_end(text, start)
    if isinstance(end, Refusal):
        return end
    around = unicodedata.normalize("NFKC", text[:start] + text[end:])
    if any(mark in around for mark in "{}[]"):
        return _refuse("not_one_object", "the reply holds braces or brackets beside one JSON object")
    return text[start:end]


def _object_end(text: str, start: int) -> int | Refusal:
    """The index after the brace that closes the one at `start`. One pass, so that no reply can make it slow."""
    depth, in_string, escaped = 0, False, False
    for index in range(start, len(text)):
        mark = text[index]
        if in_string:
            in_string = escaped or mark != '"'
            escaped = mark == "\\" and not escaped
        elif mark == '"':
            in_string = True
        elif mark in "{[":
            depth += 1
            if depth > _DEPTH_LIMIT:
                return _refuse("nested", f"the reply is nested deeper than {_DEPTH_LIMIT} levels")
        elif mark in "}]":
            depth -= 1
            if depth == 0:
                return index + 1
    return _refuse("broken_json", "the JSON object is not closed")


def _integer(digits: str) -> float | int:
    """Numbers of absurd length count as infinite; converting them is slow and forbidden by Python beyond 4,300 digits."""
    return int(digits) if len(digits) <= _DIGITS_LIMIT else math.inf


def _not_finite(_word: str) -> float:
    return math.nan


def _directive(pairs: list[tuple[str, object]]) -> ExecutiveDirective | Refusal:
    values: dict[str, float | int] = {}
    for key, value in pairs:
        if key not in _KNOWN:
            return _refuse("unknown_key", f"{_shown(key)} is not a field of a directive; known: {', '.join(_KNOWN)}")
        if key in values:
            return _refuse("duplicate_key", f"{key} is given twice")
        number = _number(key, value)
        if isinstance(number, Refusal):
            return number
        values[key] = number
    return ExecutiveDirective.model_validate(values)


def _number(key: str, value: object) -> float | int | Refusal:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _refuse("wrong_type", f"{key} must be a number, not {_kind(value)}")
    try:
        as_float = float(value)
    except OverflowError:
        as_float = math.inf
    if not math.isfinite(as_float):
        return _refuse("non_finite", f"{key} is not a finite number")
    if key in _FLOAT_FIELDS:
        return as_float
    return value if isinstance(value, int) else _refuse("wrong_type", f"{key} must be an integer, not {_shown(value)}")


def _kind(value: object) -> str:
    """A JSON word for a type; objects arrive as lists of pairs."""
    words: dict[type, str] = {bool: "true or false", str: "a string", type(None): "null", list: "a list or an object"}
    return words.get(type(value), "something else")


def _shown(value: object) -> str:
    """A short ASCII form, so that a reply can smuggle neither length nor control characters into a log."""
    text = ascii(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
