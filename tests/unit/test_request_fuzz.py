"""Whatever is typed, a request is valid or refused with exit 64: no other exception, no silent change, no NaN inside."""

import json
import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mem_core.domain.errors import RequestError
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.request.errors import known_fields
from mem_core.infrastructure.request.file import apply_overrides, build_request, parse_mapping, parse_value

PATHS = sorted(path for path, _ in known_fields(RuntimeRequest))
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12))
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3), max_leaves=6
)


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for child in value.values() for number in numbers(child)]
    if isinstance(value, list | tuple):
        return [number for child in value for number in numbers(child)]
    return [value] if isinstance(value, float) else []


def nested(path: str, value: Any) -> dict[str, Any]:
    result: dict[str, Any] = {"run_id": "demo"}
    target = result
    *parents, last = path.split(".")
    for name in parents:
        target = target.setdefault(name, {})
    target[last] = value
    return result


@settings(max_examples=300, deadline=None)
@given(path=st.sampled_from(PATHS), value=VALUES)
def test_any_value_anywhere_is_valid_or_a_request_error(path: str, value: Any) -> None:
    refusal: RequestError | None = None
    try:
        request = build_request(nested(path, value))
    except RequestError as exc:
        refusal = exc
    if refusal is not None:
        assert refusal.remedy
        assert refusal.exit_code == 64
        return
    assert all(math.isfinite(number) for number in numbers(request.model_dump()))
    assert RuntimeRequest.model_validate_json(request.model_dump_json()) == request


@settings(max_examples=300, deadline=None)
@given(text=st.one_of(st.text(max_size=60), st.from_regex(r"[a-z_]{1,8}: [\[\]{}!&*|>%@`'\",:#a-z0-9. -]{0,30}", fullmatch=True)))
def test_any_text_is_a_mapping_or_a_request_error(text: str) -> None:
    try:
        mapping = parse_mapping(text)
    except RequestError:
        return
    assert all(isinstance(key, str) for key in json.loads(json.dumps(mapping)))


@settings(max_examples=300, deadline=None)
@given(path=st.sampled_from(PATHS), text=st.text(max_size=20))
def test_any_override_is_taken_or_a_request_error(path: str, text: str) -> None:
    try:
        values = apply_overrides({"run_id": "demo"}, [f"{path}={text}"])
        build_request(values)
    except RequestError as exc:
        assert exc.remedy  # noqa: PT017 - whatever is raised must be this


@given(number=st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_written_by_python_is_read_as_that_number(number: float) -> None:
    assert parse_value(repr(number)) == number
    assert isinstance(parse_value(repr(number)), float)
