"""Sources of rows with a weight: how often each is seen."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic import Field

from mem_core.domain.errors import RequestError
from mem_core.domain.request.section import Section

MOST_WEIGHT = 100.0
_WAY_OUT = "Write {path: files/*.jsonl, weight: 0.5}; a source without a weight is its path alone, and is seen once."


class WeightedSource(Section):
    """One source of `data.train`, and how often its rows are seen."""

    path: str = Field(description="As without a weight: a file, folder, glob or URL.")
    weight: float = Field(
        gt=0,
        le=MOST_WEIGHT,
        description="How often its rows are seen in one epoch: 2 is twice, 0.5 a half of them, and the other half in the next epoch.",
    )

    def __str__(self) -> str:
        return f"{self.path} × {self.weight:g}"


def as_sources(raw: Any, field: str) -> Any:
    """A list of sources as it was given, each either a path or a `WeightedSource`; where all are seen once, paths alone.

    Raises:
        RequestError: what stands for a source is neither, or its weight is out of bounds. Not a ValueError: pydantic would answer for
            each kind of source that this is not.
    """
    if isinstance(raw, str | Mapping):
        raw = [raw]
    if not isinstance(raw, list | tuple):
        return raw
    return [_as_source(item, f"{field}.{number}") for number, item in enumerate(cast("Sequence[Any]", raw))]


def refuse_weights(raw: Any, field: str) -> None:
    """Sets that are evaluated take every row once. Raises RequestError."""
    for number, item in enumerate(cast("Sequence[Any]", raw)) if isinstance(raw, list | tuple) else ():
        if isinstance(item, Mapping | WeightedSource):
            raise RequestError(
                "a source with a weight, and of what is evaluated every row counts once", field=f"{field}.{number}",
                bound="paths alone; weights are for data.train", remedy="Give the path alone.",
            )  # fmt: skip


def _as_source(item: Any, field: str) -> str | WeightedSource:
    if isinstance(item, str):
        return item
    if isinstance(item, WeightedSource):
        return item if item.weight != 1 else item.path
    if not isinstance(item, Mapping):
        raise RequestError("must be a path, or a path with a weight", field=field, value=repr(item)[:80], remedy=_WAY_OUT)
    source = cast("Mapping[Any, Any]", item)
    unknown = [str(name) for name in source if name not in WeightedSource.model_fields]
    if unknown or "path" not in source:
        problem = f"unknown field {unknown[0]!r}" if unknown else "a source without its path"
        raise RequestError(problem, field=field, bound="path and weight", remedy=_WAY_OUT)
    path, weight = source["path"], source.get("weight", 1.0)
    if not isinstance(path, str):
        raise RequestError("must be text", field=f"{field}.path", value=repr(path)[:80], remedy=_WAY_OUT)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= MOST_WEIGHT:
        raise RequestError(
            "is no weight of a source", field=f"{field}.weight", value=repr(weight)[:80],
            bound=f"a number above 0 and at most {MOST_WEIGHT:g}", remedy=_WAY_OUT,
        )  # fmt: skip
    return path if weight == 1 else WeightedSource(path=path, weight=float(weight))
