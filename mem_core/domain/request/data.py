"""What to train on and how rows become token sequences."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from mem_core.domain.request.section import Section
from mem_core.domain.request.sources import WeightedSource, as_sources, refuse_weights


class DataSection(Section):
    """What to train on and how rows become token sequences."""

    train: tuple[str | WeightedSource, ...] = Field(
        default=("stdlib:",),
        min_length=1,
        description="Files, folders, globs or URLs of text or rows (JSONL, JSON, CSV, TSV, parquet, Arrow), also compressed; "
        "'stdlib:' is Python's own library sources. {path, weight}: seen so many times in an epoch; 0.5 is a half, the other half next.",
    )
    validation: float | tuple[str, ...] | None = Field(
        default=0.01, description="A fraction held out, a list like train, or null for none."
    )
    format: Literal["auto", "text", "jsonl", "parquet", "json", "csv", "tsv", "arrow"] = Field(
        default="auto", description="File format; auto goes by the first bytes and the name of each file."
    )
    text_field: str = Field(
        default="text",
        description="Field of a row that holds the text. Where rows have no field of this name and no other field is given, chats, prompts "
        "with completions, instructions and questions are recognised by theirs.",
    )
    messages_field: str | None = Field(
        default=None,
        description="Field with chat messages (role and content, or from and value), for the tokenizer's chat template; presets have none.",
    )
    assistant_only: bool = Field(
        default=True, description="Chat rows: the loss covers the assistant's words and end-of-turn tokens; false: the whole conversation."
    )
    prompt_field: str | None = Field(default=None, description="Field with the prompt: text, or a list of chat messages.")
    context_field: str | None = Field(
        default=None, description="Field whose text, where a row has any, follows the prompt after an empty line; needs prompt_field."
    )
    completion_field: str | None = Field(default=None, description="Field with the completion: text, or a list of chat messages.")
    completion_only: bool = Field(default=True, description="Prompt rows: the loss covers the completion; false: the prompt too.")
    sequence_length: int = Field(default=128, ge=2, le=1_048_576, description="Tokens per training sequence.")
    long_documents: Literal["chunk", "truncate", "refuse"] = Field(
        default="chunk", description="What to do with documents longer than sequence_length."
    )
    packing: bool = Field(default=True, description="Join documents into full sequences; off keeps one document per row, padded.")
    document_attention: Literal["auto", "within", "across"] = Field(
        default="auto",
        description="Whether tokens of a packed sequence see the documents before theirs; auto: within for prompt and message rows, "
        "across for text. Models that cannot keep documents apart get one document a row.",
    )
    on_bad_row: Literal["fail", "skip"] = Field(default="fail", description="Stop at bad rows, or skip up to max_bad_rows of them.")
    max_bad_rows: int = Field(default=100, ge=0, description="How many bad rows may be skipped with on_bad_row: skip.")

    @field_validator("train", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return as_sources(value, "data.train")

    @field_validator("validation", mode="before")
    @classmethod
    def _each_once(cls, value: Any) -> Any:
        refuse_weights(value, "data.validation")
        return value

    @field_validator("validation")
    @classmethod
    def _fraction(cls, value: float | tuple[str, ...] | None) -> float | tuple[str, ...] | None:
        if isinstance(value, float) and not 0 < value <= 0.5:
            raise ValueError("validation as a fraction must be above 0 and at most 0.5; use null for no validation")
        if value == ():
            raise ValueError("validation is an empty list; use null for no validation")
        return value

    @model_validator(mode="after")
    def _pair(self) -> "DataSection":
        if (self.prompt_field is None) != (self.completion_field is None):
            raise ValueError("prompt_field and completion_field go together; set both or neither")
        if self.context_field is not None and self.prompt_field is None:
            raise ValueError("context_field follows the prompt; set prompt_field too, or leave it out")
        if self.prompt_field is not None and self.messages_field is not None:
            raise ValueError("messages_field excludes prompt_field and completion_field; set one kind")
        return self

    @property
    def is_weighted(self) -> bool:
        """Whether any source is seen more or less than once in an epoch; then each source is packed by itself."""
        return any(isinstance(source, WeightedSource) for source in self.train)

    @property
    def train_paths(self) -> tuple[str, ...]:
        """The sources without their weights."""
        return tuple(source if isinstance(source, str) else source.path for source in self.train)

    @property
    def train_weights(self) -> tuple[float, ...]:
        """The weight of each source."""
        return tuple(1.0 if isinstance(source, str) else source.weight for source in self.train)
