"""Answers to prompts: what is asked for, and what came of it."""

from typing import Literal

from pydantic import Field

from mem_core.domain.units import Value

InferenceDtype = Literal["auto", "float32", "bfloat16", "float16"]
InferenceDevice = Literal["auto", "cpu", "cuda"]
FinishReason = Literal["stop", "length"]
ADDED_FIELDS = ("completion", "prompt_tokens", "completion_tokens", "finish_reason")
"""What an answer adds to the fields of its prompt's row."""


class Sampling(Value):
    """How the next token is chosen. At temperature 0 it is the likeliest one; else a draw that seed, row and position decide."""

    max_new_tokens: int = Field(default=128, ge=1, le=1_048_576, description="Tokens of an answer at most.")
    temperature: float = Field(default=0.0, ge=0, le=100, allow_inf_nan=False, description="0 takes the likeliest token.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Draw among the likeliest tokens that together have this share.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="What the draws are made from, with row and position.")


class GenerateOrder(Value):
    """One job. Paths are absolute; `model` is a preset or a local folder of a model or an adapter.

    What stands in `model`, `prompts`, `sampling`, `prompt_field`, `prefix`, `dtype` and `device` decides the answers; the bounds below
    them decide only which rows are answered together.
    """

    model: str = Field(min_length=1)
    prompts: str
    output: str
    sampling: Sampling = Sampling()
    prompt_field: str | None = Field(default=None, description="Field of a row with the prompt; null recognises it.")
    prefix: str = Field(default="", max_length=64, description="Put before the names of the fields that are added.")
    dtype: InferenceDtype = "auto"
    device: InferenceDevice = "auto"
    batch_rows: int = Field(default=64, ge=1, le=4096, description="Rows that are answered together, at most.")
    budget_bytes: int | None = Field(default=None, description="Memory for the answering process; null measures the machine.")
    cache_dir: str = ""


class GenerationResult(Value):
    """A finished file of answers. Of the rows, `stopped` ended by a stop token and `cut` at max_new_tokens."""

    output: str
    rows: int
    prompt_tokens: int
    completion_tokens: int
    stopped: int
    cut: int
    sha256: str
    batches: int = Field(description="Batches that were answered, as they are recorded.")
    shrunk: int = Field(default=0, description="Batches that did not fit and were composed anew.")
    already_complete: bool = Field(default=False, description="Nothing had to be done: the file was there.")

    def words(self) -> str:
        """For people, on one line."""
        shrunk = f", {self.shrunk:,} of them made smaller for memory" if self.shrunk else ""
        return (
            f"{self.rows:,} answers in {self.output}: {self.completion_tokens:,} tokens to {self.prompt_tokens:,} of prompts, "
            f"{self.stopped:,} ended by themselves and {self.cut:,} at the limit; {self.batches:,} batches{shrunk}"
        )
