"""`mem evaluate`: loss, perplexity and accuracy of a data file, as the evaluations of a run would say them."""

import json
import sys
from collections.abc import Mapping
from typing import Any

from flows.commands.inference.sources import Found, budget_of, find_model
from mem_core.domain.errors import RequestError
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.results.evaluation import SetFigures
from mem_core.infrastructure.request.file import apply_overrides, parse_request
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.telemetry.progress import Progress, ProgressDisplay
from mem_core.runtime.inference.evaluating import Asked
from mem_core.runtime.inference.evaluating import evaluate as evaluate_rows
from mem_core.runtime.models.encoding import CURRENT_RULES, rules_of
from mem_core.runtime.models.facts import describe_model
from mem_core.runtime.models.folders import at_hand

LONGEST_DEFAULT = 1_024  # tokens of a row where no run says another length


def evaluate(model: str, data: str, store: str, options: Mapping[str, Any], as_json: bool) -> int:
    """Print the figures. `options`: overrides (of data.*), memory, dtype, device.

    Raises:
        MemError: as `mem_core.runtime.inference.evaluating.evaluate`.
    """
    settings = Settings.from_environment()
    with ProgressDisplay() as progress:
        found = find_model(model, store, settings, progress)
        figures = figures_of(found, data, options, settings, progress)
    print(f"{data}: {figures.words()}, {figures.tokens:,} tokens that count", file=sys.stderr)
    if as_json:
        print(json.dumps({**figures.model_dump(mode="json"), "model": found.model, "step": found.step, "data": data}))
    return 0


def figures_of(found: Found, data: str, options: Mapping[str, Any], settings: Settings, progress: Progress) -> SetFigures:
    """The same without words."""
    asked = Asked(
        model=found.model,
        request=_request(found, data, options.get("overrides") or []),
        tokenizer=_tokenizer(found, settings),
        rules=CURRENT_RULES if found.record is None else rules_of(found.record.encoding),
        dtype=found.dtype if options.get("dtype", "auto") == "auto" else options["dtype"],
        device=options.get("device") or "auto",
        budget_bytes=budget_of(options.get("memory")),
    )
    return evaluate_rows(asked, settings, progress)


def _tokenizer(found: Found, settings: Settings) -> str:
    """That of the run's own model folder, under whose name prepared rows are kept; of a model its own."""
    return Asked.tokenizer_of(found.model) if found.record is None else at_hand(found.record.request.model.source, settings.model_cache_dir)


def _is_about_rows(override: str) -> bool:
    return override.startswith("data.") and not override.startswith(("data.train", "data.validation"))


def _request(found: Found, data: str, overrides: list[str]) -> RuntimeRequest:
    """A request whose training data are the rows; the run's own settings of rows where there is a run."""
    foreign = [each for each in overrides if not _is_about_rows(each.strip())]
    if foreign:
        raise RequestError(
            "only how rows are read can be set here", field="--set", value=foreign[0], bound="data.*, but train and validation",
            remedy="Write --set data.text_field=body and the like.",
        )  # fmt: skip
    if found.record is None:
        source = Asked.source_of(found.model)
        positions = describe_model(source).max_positions or LONGEST_DEFAULT
        given: dict[str, Any] = {"run_id": "evaluate", "data": {"sequence_length": min(LONGEST_DEFAULT, positions)}}
    else:
        sections = ("run_id", "data", "model", "training")  # what else a run asks says nothing of its rows
        given = found.record.request.model_dump(mode="json", include=set(sections), exclude_unset=True)
    values = apply_overrides(given, overrides)
    values["data"] = {**values.get("data", {}), "train": [data], "validation": None}
    return parse_request(values)
