"""What a request's rows come to, and the first of them as the model will see them."""

from collections.abc import Sequence

from pydantic import Field

from mem_core.domain.run import DataSummary, SourceShare
from mem_core.domain.units import Value


class Segment(Value):
    """Tokens of a row that stand together, as text. `begins`: a document begins here."""

    text: str
    num_tokens: int
    trained: bool = Field(description="Whether the loss counts them.")
    begins: bool = False


class ShownRow(Value):
    """One row of tokens."""

    segments: tuple[Segment, ...]
    num_tokens: int
    trained_tokens: int


class DataReport(Value):
    """The answer of `mem data`. `epochs`: how often the run sees every row; None where its length cannot be known yet."""

    summary: DataSummary
    fingerprint: str
    sequence_length: int
    vocab_size: int = Field(description="Of the tokenizer.")
    num_embeddings: int | None = Field(default=None, description="Of the model; None where it is not known.")
    max_token_id: int = 0
    steps: int | None = None
    epochs: float | None = None
    rows: tuple[ShownRow, ...] = ()


def mix_words(sources: Sequence[SourceShare]) -> tuple[str, ...]:
    """What each weighted source gives to an epoch, a line each; nothing where none has a weight."""
    total = sum(source.epoch_tokens for source in sources)
    return tuple(
        f"{source.epoch_rows:,} rows, {source.epoch_tokens:,} tokens ({source.epoch_tokens / total if total else 0.0:.1%}): "
        f"{source.weight:g} × {source.num_rows:,} rows of {source.path}"
        for source in sources
    )
