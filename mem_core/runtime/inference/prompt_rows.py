"""Rows of a file of prompts: read, recognised, and checked before the first is answered."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mem_core.domain.errors import DataError, RequestError
from mem_core.domain.results.generation import ADDED_FIELDS
from mem_core.infrastructure.storage.reading import open_regular
from mem_core.runtime.data.reading.columns import CHATS, CONTEXTS, PROMPTS
from mem_core.runtime.data.reading.kinds import DEFAULT_TEXT_FIELD
from mem_core.runtime.data.reading.messages import Message, read_messages, read_tools, standard_messages
from mem_core.runtime.data.reading.packing import DAMAGED, packing_of, unpacked
from mem_core.runtime.data.reading.refused import FileRefused, RowRefused, kind_name
from mem_core.runtime.data.reading.rows import with_context

TEXTS = (DEFAULT_TEXT_FIELD, *(name for name, _ in PROMPTS))
MOST_BAD_SHOWN = 10
_HEAD_BYTES = 16
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one row asks: text, or a chat whose next answer is due."""

    text: str = ""
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptRows:
    """A file of prompts. `field` names the prompt of a row where it is not to be recognised; `prefix` goes before added names, where
    answers are added to the rows (`adds`)."""

    path: Path
    field: str | None = None
    prefix: str = ""
    adds: bool = True

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(line, fields) of each row; blank lines are none.

        Raises:
            DataError: the file cannot be read, or a line is no object.
        """
        try:
            with open_regular(self.path) as stream:
                packing = packing_of(stream.peek(_HEAD_BYTES)[:_HEAD_BYTES])
                yield from self._objects(unpacked(stream, packing))
        except DAMAGED as exc:
            words = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
            raise DataError(
                f"the prompts cannot be read: {words}", field="--prompts", value=self.path, remedy="Give a file of JSONL."
            ) from exc

    def _objects(self, stream: BinaryIO) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in enumerate(stream, start=1):
            body = line.removeprefix(_BOM) if number == 1 else line
            if not body.strip():
                continue
            try:
                row = json.loads(body.decode("utf-8"))
            except (ValueError, RecursionError) as exc:
                raise self._bad(f"line {number} is no JSON in UTF-8: {exc}") from exc
            if not isinstance(row, dict):
                raise self._bad(f"line {number}: {kind_name(row)} where an object is due")
            yield number, row

    def prompts(self) -> Iterator[Prompt]:
        """What each row asks, in order.

        Raises:
            DataError: rows that ask nothing, the first ten by line and reason. RequestError: their field is not clear.
        """
        field, bad, count = self.field, list[str](), 0
        for number, row in self.rows():
            field = field or _recognised(row)
            try:
                found = self._prompt(row, field, number)
            except (RowRefused, FileRefused) as exc:
                count += 1
                bad += [f"line {number}: {exc}"] if len(bad) < MOST_BAD_SHOWN else []
                continue
            yield found
        if bad:
            raise self._bad(f"{count:,} rows cannot be answered: {'; '.join(bad)}{'; and more' if count > len(bad) else ''}")

    def _prompt(self, row: dict[str, Any], field: str, number: int) -> Prompt:
        taken = [name for name in self.added if name in row]
        if taken:
            raise RowRefused(f"it has a field '{taken[0]}' already, which the answer would replace; give --prefix")
        if field not in row:
            raise RowRefused(f"field '{field}' is missing")
        value = standard_messages(row[field])
        if isinstance(value, list):
            return chat_prompt(value, row, field, number)
        if not isinstance(value, str):
            raise RowRefused(f"field '{field}' is {kind_name(value)}, neither text nor messages")
        if self.field is not None or field == DEFAULT_TEXT_FIELD:
            return Prompt(value)  # what was named is the whole prompt, as it is where a request names its fields
        return Prompt(with_context(value, next((row[name] for name in CONTEXTS if isinstance(row.get(name), str)), "")))

    @property
    def added(self) -> tuple[str, ...]:
        """Names of the fields that an answer adds."""
        return tuple(f"{self.prefix}{name}" for name in ADDED_FIELDS) if self.adds else ()

    def _bad(self, problem: str) -> DataError:
        return DataError(problem, field="--prompts", value=self.path, bound="one JSON object a line", remedy="Mend the lines.")


def chat_prompt(value: list[Any], row: dict[str, Any], field: str, number: int) -> Prompt:
    """A chat whose next answer is due. Raises RowRefused, FileRefused: it is none."""
    messages = read_messages(value, field, number)
    if messages[-1]["role"] == "assistant":
        raise RowRefused(f"the last message of '{field}' is the assistant's: leave it out, so that an answer is due")
    return Prompt(messages=tuple(messages), tools=tuple(read_tools(row, number) or ()))


def _recognised(row: dict[str, Any]) -> str:
    """The field that asks, by the first row's names: `text` where it is text, else the one that is known."""
    if isinstance(row.get(DEFAULT_TEXT_FIELD), str):
        return DEFAULT_TEXT_FIELD
    texts = [name for name in TEXTS if isinstance(row.get(name), str | list)]
    found = [*texts, *(name for name in CHATS if isinstance(row.get(name), str | list))]
    if len(found) == 1:
        return found[0]
    raise RequestError(
        "the rows have several fields that could be the prompt" if found else "no field of the rows is known to be a prompt",
        field="--prompt-field",
        value=", ".join(f"'{name[:40]}'" for name in list(row)[:8]) or "no fields",
        bound=", ".join(found or (*TEXTS, *CHATS)),
        remedy="Name the field with --prompt-field.",
    )
