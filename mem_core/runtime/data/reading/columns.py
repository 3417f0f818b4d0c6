"""Which fields of a row a request means that names none: chats, prompts with completions, instructions, questions. Pure.

The first row that can be read decides, for all files of the request. A field called `text` is always the text; of two readings
neither is chosen.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mem_core.domain.errors import RequestError
from mem_core.domain.request import DataSection
from mem_core.runtime.data.reading.kinds import DEFAULT_TEXT_FIELD, row_fields
from mem_core.runtime.data.reading.messages import standard_messages

CHATS = ("messages", "conversations", "conversation", "chat", "dialog", "dialogue")
PROMPTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("instruction", ("output", "response", "answer", "completion")),
    ("prompt", ("completion", "response", "answer", "output")),
    ("question", ("answer", "response", "output")),
    ("query", ("answer", "response", "output")),
)
CONTEXTS = ("input", "context")


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to read a row: the fields to set, and what the rows then are."""

    what: str
    fields: tuple[tuple[str, str], ...]

    @property
    def settings(self) -> str:
        """As a person would write them."""
        return ", ".join(f"data.{name}: {value}" for name, value in self.fields)


def names_no_field(data: DataSection) -> bool:
    """Whether a request leaves it to the rows which of their fields count."""
    return not row_fields(data) and data.text_field == DEFAULT_TEXT_FIELD and data.format != "text"


def recognised(row: dict[str, Any]) -> Reading | None:
    """How a row is read whose request names no field; None where its text is where it always is, or nothing is recognised.

    Raises:
        RequestError: it can be read in several ways.
    """
    if isinstance(row.get(DEFAULT_TEXT_FIELD), str) or {"chosen", "rejected"} <= row.keys():
        return None
    found = [*_chats(row), *_pairs(row)]
    if len(found) > 1:
        raise RequestError(
            "the rows can be read in several ways",
            field="data",
            value="fields " + ", ".join(f"'{name[:40]}'" for name in list(row)[:8]),
            bound="; or ".join(f"{each.settings} ({each.what})" for each in found),
            remedy="Set the fields that you mean",
        )
    return found[0] if found else None


def with_fields(data: DataSection, reading: Reading) -> DataSection:
    """The data section with the fields set that were recognised."""
    return data.model_copy(update=dict(reading.fields))


def _chats(row: dict[str, Any]) -> Iterable[Reading]:
    for name in CHATS:
        if _is_chat(row.get(name)):
            yield Reading("chats", (("messages_field", name),))


def _is_chat(value: Any) -> bool:
    turns = standard_messages(value)
    return isinstance(turns, list) and bool(turns) and all(isinstance(turn, dict) and isinstance(turn.get("role"), str) for turn in turns)


def _pairs(row: dict[str, Any]) -> Iterable[Reading]:
    for prompt, completions in PROMPTS:
        for completion in completions:
            pair = (row.get(prompt), row.get(completion))
            if all(isinstance(side, str) for side in pair) or all(_is_chat(side) for side in pair):
                fields = [("prompt_field", prompt), ("completion_field", completion)]
                fields += [("context_field", name) for name in CONTEXTS if isinstance(row.get(name), str)][:1]
                yield Reading(f"{prompt}s with {completion}s", tuple(fields))
