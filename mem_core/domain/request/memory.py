"""How memory is watched and used."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from mem_core.domain.request.section import PositiveInt, Section
from mem_core.domain.units import parse_bytes


class MemorySection(Section):
    """How memory is watched and used."""

    mode: Literal["adaptive", "fixed"] = Field(
        default="adaptive", description="adaptive shrinks before the limit; fixed fails at the first OOM."
    )
    micro_batch_size: PositiveInt | Literal["auto"] = Field(default="auto", description="Sequences per forward pass and rank.")
    budget: int | str | None = Field(default=None, description="Own memory budget: bytes, or text such as 6GiB; null measures the machine.")
    high_watermark: float = Field(default=0.9, gt=0, le=1, description="Fraction of the budget above which the micro-batch shrinks.")
    low_watermark: float = Field(default=0.7, gt=0, lt=1, description="Fraction of the budget below which it may grow again.")

    @field_validator("budget")
    @classmethod
    def _bytes(cls, value: int | str | None) -> int | None:
        return None if value is None else parse_bytes(value)

    @model_validator(mode="after")
    def _ordered(self) -> "MemorySection":
        if self.low_watermark >= self.high_watermark:
            raise ValueError(f"low_watermark {self.low_watermark} must be below high_watermark {self.high_watermark}")
        return self
