"""Text of a model or a file within Markdown: no part of it is read as Markdown or as HTML. Pure."""

import re

from mem_core.domain.results.samples import Sample


def fenced(text: str) -> str:
    """Any text as a block of program text, behind a fence that is longer than every run of backticks in it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def sample_markdown(sample: Sample) -> str:
    """A prompt with both answers, one below the other."""
    parts = (("prompt", sample.prompt), ("greedy", sample.greedy), ("sampled", sample.sampled))
    return "\n\n".join(f"**{name}**\n\n{fenced(text)}" for name, text in parts)
