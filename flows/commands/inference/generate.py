"""`mem generate`: answers to a file of prompts, each exactly once, whatever kills it meanwhile."""

import json
import sys
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from flows.commands.inference.sources import budget_of, find_model
from mem_core.domain.errors import RequestError
from mem_core.domain.results.generation import GenerateOrder, GenerationResult
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.storage.reading import local_name, open_regular
from mem_core.infrastructure.telemetry.progress import Progress, ProgressDisplay
from mem_core.runtime.inference.supervise import generate as generate_answers

SHOWN_CHARS = 200
_SAMPLING = ("max_new_tokens", "temperature", "top_p", "seed")
_OTHERS = ("prompt_field", "prefix", "dtype", "device", "batch_rows")


def generate(model: str, store: str, options: Mapping[str, Any], as_json: bool) -> int:
    """Answer and say what came of it. `options` by the names of the flags, those that were not given left out or None.

    Raises:
        MemError: as `mem_core.runtime.inference.supervise.generate`.
    """
    with ProgressDisplay() as progress:
        result = answered(model, store, options, Settings.from_environment(), progress)
    print(f"{'complete already: ' if result.already_complete else ''}{result.words()}", file=sys.stderr)
    if as_json:
        print(result.model_dump_json())
    return 0


def answered(model: str, store: str, options: Mapping[str, Any], settings: Settings, progress: Progress) -> GenerationResult:
    """The same without words."""
    order = order_of("model", options)  # what is wrong with it costs no export
    found = find_model(model, store, settings, progress)
    dtype = found.dtype if order.dtype == "auto" else order.dtype
    order = order.model_copy(update={"model": found.model, "dtype": dtype})
    return generate_answers(order, settings, progress)


def order_of(model: str, options: Mapping[str, Any]) -> GenerateOrder:
    """A valid order. Raises RequestError: all that is wrong in one message."""
    from pydantic import ValidationError

    from mem_core.infrastructure.request.errors import request_error

    given = {name: value for name, value in options.items() if value is not None}
    paths: dict[str, str] = {}
    for name in ("prompts", "output"):
        if not given.get(name):
            raise RequestError("a path is due", field=f"--{name}", remedy="Give the path of a file.")
        paths[name] = str(Path(local_name(str(given[name]))).absolute())
    try:
        return GenerateOrder.model_validate(
            {
                "model": model, **paths, "budget_bytes": budget_of(given.get("memory")),
                "sampling": {name: given[name] for name in _SAMPLING if name in given},
                **{name: given[name] for name in _OTHERS if name in given},
            }
        )  # fmt: skip
    except ValidationError as exc:
        raise request_error(exc, GenerateOrder) from exc


def first_answers(result: GenerationResult, num_rows: int) -> list[tuple[int, str, str, str]]:
    """(row, end of its prompt, answer, how it ended) of the first rows of a finished file, cut to what can be shown.

    Raises:
        OSError: the file is gone.
    """
    with open_regular(result.output) as file:
        rows: list[dict[str, Any]] = [json.loads(line) for line in islice(file, num_rows)]
    return [(number, *_shown(row)) for number, row in enumerate(rows)]


def _shown(row: dict[str, Any]) -> tuple[str, str, str]:
    """Added fields come last, whatever prefix their names have."""
    *own, completion, _, _, reason = row.values()
    asked = next((value for value in own if isinstance(value, str) and value.strip()), None)
    asked = json.dumps(own, ensure_ascii=False) if asked is None else asked
    return asked[-SHOWN_CHARS:], str(completion)[:SHOWN_CHARS], str(reason)
