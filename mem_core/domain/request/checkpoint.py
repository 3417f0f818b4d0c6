"""When to save, how to prove it, what to keep."""

from typing import Annotated, Literal

from pydantic import Field

from mem_core.domain.request.section import PositiveInt, Section


class CheckpointSection(Section):
    """When to save, how to prove it, what to keep."""

    keep_last: int = Field(default=3, ge=1, le=1_000, description="Validated checkpoints to keep.")
    keep_every_steps: PositiveInt | None = Field(
        default=None,
        description="Keep each proven checkpoint whose step is a multiple of this too, here and in the mirror: mem audit trains from them.",
    )
    every_s: Annotated[float, Field(ge=1)] | Literal["auto"] | None = Field(
        default=None, description="End a segment after this many seconds; auto chooses by measured save cost and fault rate."
    )
    validation: Literal["integrity", "replay"] = Field(default="integrity", description="How a checkpoint is proven.")
    export: Literal["auto", "off"] = Field(
        default="auto", description="auto writes a model folder to export/ at the end of a run that began with one; off leaves that out."
    )
    mirror: str | None = Field(
        default=None, description="fsspec URL that gets a copy of every validated checkpoint; only with a local store."
    )
