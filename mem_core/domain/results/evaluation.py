"""What an evaluation found, which was the best, and why a run may end before its last step."""

import math

from pydantic import Field

from mem_core.domain.units import Value

LARGEST_EXPONENT = 700.0  # of a finite float64


class SetFigures(Value):
    """Figures of one set of held-out rows. `loss` is the mean per token that counts, in nats."""

    loss: float
    perplexity: float = Field(description="e to the loss.")
    token_accuracy: float | None = Field(default=None, description="Share of the tokens that count which the model puts first.")
    tokens: int = Field(default=0, description="Tokens that count.")
    rows: int = 0
    rows_total: int = 0

    @classmethod
    def of(cls, loss: float, token_accuracy: float | None, tokens: int, rows: int, rows_total: int) -> "SetFigures":
        """Figures from the mean loss; rows that were looked at, of all that there are."""
        perplexity = math.exp(min(loss, LARGEST_EXPONENT))
        return cls(loss=loss, perplexity=perplexity, token_accuracy=token_accuracy, tokens=tokens, rows=rows, rows_total=rows_total)

    def words(self) -> str:
        """For people: `loss 1.2345, perplexity 3.437, 61.2 % of tokens right, over 1,107 rows`."""
        right = f", {self.token_accuracy:.1%} of tokens right" if self.token_accuracy is not None else ""
        return f"loss {self.loss:.4f}, perplexity {self.perplexity:.4g}{right}, over {rows_words(self.rows, self.rows_total)}"


class BestStep(Value):
    """The evaluated step with the lowest loss of the first set."""

    step: int
    metric: str = Field(description="SET/loss.")
    value: float


class StoppedEarly(Value):
    """A run that ended before its last step, since the metric no longer fell."""

    step: int
    metric: str


def rows_words(rows: int | None, rows_total: int | None) -> str:
    """What a validation loss is the loss of: "1,107 rows", "2,048 of 90,000 rows, evenly spread"; empty where it was not written down."""
    if rows is None or rows_total is None:
        return ""
    return f"{rows:,} rows" if rows >= rows_total else f"{rows:,} of {rows_total:,} rows, evenly spread"
