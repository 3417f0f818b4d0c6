"""What a request's rows come to, and the first of them as the model will see them."""

from pydantic import Field

from mem_core.domain.run import DataSummary
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
