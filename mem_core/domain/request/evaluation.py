"""What the model is held against while it trains, and what follows from the figures."""

import re
from typing import Any, cast

from pydantic import Field, field_validator, model_validator

from mem_core.domain.request.section import PositiveInt, Section
from mem_core.domain.request.sources import refuse_weights
from mem_core.domain.results.samples import MOST_PROMPTS, MOST_SAMPLE_TOKENS

VALIDATION = "validation"
"""The name of the set that `data.validation` holds out."""
_NAME = re.compile(r"^[a-z0-9][a-z0-9_-]{0,31}$")


class EvaluationSection(Section):
    """Held-out rows and what follows from their figures; prompts that are answered meanwhile."""

    every_steps: PositiveInt | None = Field(
        default=None,
        description="Evaluate after every so many steps; a checkpoint is saved there too. Null: once, after the last step. Raised by "
        "itself where a run would need over 1,000 evaluations.",
    )
    sets: dict[str, tuple[str, ...]] = Field(
        default={}, description="More sets by name, each files, globs or URLs like data.train; data.validation is the set validation."
    )
    max_rows: PositiveInt | None = Field(default=None, description="Rows of each set at most, evenly spread over it; null takes every row.")
    keep_best: bool = Field(default=False, description="Keep the checkpoint with the lowest loss of the first set, whatever rotation says.")
    patience: PositiveInt | None = Field(
        default=None, description="Stop, completed, after so many evaluations in a row without a lower loss of the first set."
    )

    prompts: tuple[str | tuple[dict[str, Any], ...], ...] | str | None = Field(
        default=None,
        description="Fixed prompts to answer before training, at each evaluation and at the end: a list of texts or of chats (lists of "
        f"messages with role and content), at most {MOST_PROMPTS}; or the path of a file of prompt rows, as mem generate reads them; "
        "chats need a model folder with a chat template.",
    )
    sample_tokens: int = Field(
        default=64, ge=1, le=MOST_SAMPLE_TOKENS, description="New tokens of an answer to evaluation.prompts, at most."
    )
    sample_temperature: float = Field(
        default=1.0, gt=0, le=100, description="Temperature of the drawn answer; beside it stands the one of the likeliest tokens."
    )

    @field_validator("prompts")
    @classmethod
    def _asks_something(cls, value: tuple[Any, ...] | str | None) -> tuple[Any, ...] | str | None:
        if value is None:
            return value
        if not value:
            raise ValueError("prompts is empty; give texts, chats or the path of a file, or leave it out")
        if isinstance(value, tuple) and not all(value):
            raise ValueError("one of the prompts is empty; give it words, or leave it out")
        if isinstance(value, tuple) and len(value) > MOST_PROMPTS:
            raise ValueError(f"prompts are {len(value)}; at most {MOST_PROMPTS} are answered at each evaluation")
        return value

    @field_validator("sets", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        named = cast("dict[Any, Any]", value).items()
        for name, files in named:
            refuse_weights(files, f"evaluation.sets.{name}")
        return {name: [files] if isinstance(files, str) else files for name, files in named}

    @field_validator("sets")
    @classmethod
    def _named(cls, value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        for name, files in value.items():
            if name == VALIDATION:
                raise ValueError(f"the name {VALIDATION} belongs to data.validation; choose another")
            if not _NAME.match(name):
                raise ValueError(f"{name!r} is no name of a set; use a-z, 0-9, _ and -, at most 32 of them")
            if not files:
                raise ValueError(f"set {name} is an empty list; leave it out, or give it files")
        return value

    @model_validator(mode="after")
    def _has_figures_to_follow(self) -> "EvaluationSection":
        for name in ("keep_best", "patience"):
            if getattr(self, name) and self.every_steps is None:
                raise ValueError(f"{name} follows evaluations during training; set every_steps, or leave {name} out")
        return self
