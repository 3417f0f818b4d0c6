"""What the model is held against while it trains, and what follows from the figures."""

import re
from typing import Any, cast

from pydantic import Field, field_validator, model_validator

from mem_core.domain.request.section import PositiveInt, Section
from mem_core.domain.request.sources import refuse_weights

VALIDATION = "validation"
"""The name of the set that `data.validation` holds out."""
_NAME = re.compile(r"^[a-z0-9][a-z0-9_-]{0,31}$")


class EvaluationSection(Section):
    """Held-out rows and what follows from their figures."""

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
