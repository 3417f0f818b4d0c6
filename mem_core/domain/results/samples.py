"""What a model answers to fixed prompts while it is trained: asked for, prepared, and found out."""

from typing import Annotated

from pydantic import AfterValidator, Field

from mem_core.domain.printable import printable
from mem_core.domain.results.generation import FinishReason
from mem_core.domain.units import Value

MOST_PROMPTS = 32
MOST_SAMPLE_TOKENS = 1_024
LONGEST_PROMPT_CHARACTERS = 500  # of what is shown again; the model gets all of it
LONGEST_ANSWER_CHARACTERS = 2_000
_CUT = " ..."


def bounded(text: str, most_characters: int) -> str:
    """At most so many characters, and that there were more; half a surrogate pair, which no file can hold, becomes a question mark."""
    whole = text.encode("utf-8", "replace").decode("utf-8")
    return whole if len(whole) <= most_characters else whole[: most_characters - len(_CUT)] + _CUT


# A model or a file wrote it: no control character reaches a terminal or a page.
Shown = Annotated[str, AfterValidator(lambda text: bounded(printable(text), LONGEST_PROMPT_CHARACTERS))]
Answered = Annotated[str, AfterValidator(lambda text: bounded(printable(text), LONGEST_ANSWER_CHARACTERS))]


class Sample(Value):
    """One prompt and both answers to it. A `finish` of "length" was cut at evaluation.sample_tokens."""

    prompt: Shown
    greedy: Answered = Field(description="The likeliest token each time.")
    sampled: Answered = Field(description="A draw each time, which seed, row and position decide.")
    greedy_finish: FinishReason = "length"
    sampled_finish: FinishReason = "length"


class StepSamples(Value):
    """Answers to every prompt, in their order, with the weights as they were after a step; 0 is before training."""

    step: int
    samples: tuple[Sample, ...]
    temperature: float = 1.0

    def words(self) -> str:
        """For people, on one line, with the first answer as a sign of life: `3 prompts answered after step 20: 'the' -> 'quick fox'`."""
        count, when = len(self.samples), f"after step {self.step:,}" if self.step else "before training"
        first = f": {_line(self.samples[0].prompt, 40)} -> {_line(self.samples[0].greedy, 80)}" if self.samples else ""
        return f"{count:,} prompt{'' if count == 1 else 's'} answered {when}{first}"


def _line(text: str, most_characters: int) -> str:
    words = " ".join(text.split())
    return repr(words if len(words) <= most_characters else f"{words[:most_characters]}...")


class EncodedPrompt(Value):
    """A prompt as the model gets it, and as people see it."""

    shown: Shown
    tokens: tuple[int, ...]


class SampleOrder(Value):
    """What is answered again and again, the same for a whole attempt. `source`, a preset or a local folder, has the tokenizer."""

    source: str
    prompts: tuple[EncodedPrompt, ...]
    max_new_tokens: int
    temperature: float = 1.0
    seed: int = 0
