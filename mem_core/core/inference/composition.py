"""Which rows form the next batch: the longest that wait, as many as the room for them allows. Pure.

The longest come first. Rows of like length stand together, so little is padded; what does not fit shows at the start and not after
hours; and what is left gets quicker and not slower, so that the time left is not promised too short.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from mem_core.core.memory.ladder import NO_BOUND, MicroBatch
from mem_core.core.memory.model import PeakLine, PeakSample, fit_line
from mem_core.core.memory.start import COULD_BIND

MOST_SAMPLES = 32
CAREFUL = 1.25  # one measured size tells nothing of its slope: all of it is taken to grow with the tokens, and a quarter more
GROWTH = 2  # a batch has at most so many times the tokens of the largest that was measured


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides how much memory answering takes; `itemsize` in bytes a number."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    itemsize: int

    def estimate(self, new_tokens: int) -> PeakLine:
        """Bytes of a batch beside the weights by a formula that errs upwards: keys and values of every token, the activations of one
        layer, and a row's logits in float32 with two copies, spread over the tokens that a row has at least."""
        cached = 2 * self.num_layers * self.hidden_size
        layer = 8 * self.hidden_size + 3 * self.intermediate_size
        logits = 3 * 4 * self.vocab_size / max(1, new_tokens)
        return PeakLine(0.0, float(self.itemsize * (cached + layer)) + logits)


@dataclass(frozen=True, slots=True)
class Sizing:
    """How large a batch may be. `failed_tokens`: the smallest that did not fit, in padded tokens, those to come included."""

    most_rows: int
    new_tokens: int
    estimate: PeakLine
    samples: tuple[PeakSample, ...] = field(default=())
    failed_tokens: int = NO_BOUND

    def could_bind(self, longest: int, room_bytes: float) -> bool:
        """Whether the largest batch comes anywhere near the room, so that batches are to be measured."""
        largest = MicroBatch(self.most_rows, longest + self.new_tokens)
        return self.failed_tokens < NO_BOUND or self.estimate.predict(largest) > COULD_BIND * room_bytes

    def rows_that_fit(self, longest: int, room_bytes: float) -> int:
        """Rows of a batch whose longest prompt has so many tokens; one is always tried. Independent of `room_bytes` where that is far
        from binding, so that a batch is composed alike on every try."""
        if not self.could_bind(longest, room_bytes):
            return self.most_rows
        length = longest + self.new_tokens
        tokens = self._line().tokens_that_fit(room_bytes, length)
        if self.samples:
            tokens = min(tokens, GROWTH * max(sample.micro_batch.tokens for sample in self.samples))
        tokens = min(tokens, self.failed_tokens // 2)
        return max(1, min(self.most_rows, tokens // length))

    def measured(self, rows: int, longest: int, peak_bytes: int) -> "Sizing":
        """With what a batch took beside the weights."""
        sample = PeakSample(MicroBatch(rows, longest + self.new_tokens), peak_bytes)
        return replace(self, samples=(*self.samples, sample)[-MOST_SAMPLES:])

    def failed(self, rows: int, longest: int) -> "Sizing":
        """With a batch that did not fit."""
        return replace(self, failed_tokens=min(self.failed_tokens, rows * (longest + self.new_tokens)))

    def _line(self) -> PeakLine:
        line = fit_line(self.samples)
        if line is not None:
            return line
        if not self.samples:
            return self.estimate
        return PeakLine(0.0, max(CAREFUL * sample.peak_bytes / sample.micro_batch.tokens for sample in self.samples))


def longest_first(lengths: Sequence[int], answered: Iterable[int] = ()) -> list[int]:
    """Rows that wait, by falling number of tokens, then as they stand in the file."""
    done = set(answered)
    return sorted((row for row in range(len(lengths)) if row not in done), key=lambda row: (-lengths[row], row))
