"""A Hugging Face tokenizer's chat template, as `turns` asks for it: rendered texts, their ids, and what the template marks by itself."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mem_core.runtime.data.chat.conversation import ChatRefused
from mem_core.runtime.data.chat.turns import Message, Rendered, Turn

_MARKED = re.compile(r"\{%-?\s*generation\b")


def marks_words(template: str) -> bool:
    """Whether a chat template says by itself what the assistant's words are."""
    return _MARKED.search(template) is not None


@dataclass(frozen=True)
class Rendering:
    """The template with the options and tools of one row. Every call raises ChatRefused where it does not take the messages."""

    tokenizer: Any
    options: dict[str, Any]
    marks: frozenset[int]
    has_prompt: bool
    has_offsets: bool
    spaces: dict[int, bool] = field(default_factory=dict[int, bool])  # as far as they were asked for

    @classmethod
    def of(cls, tokenizer: Any, template: str, options: dict[str, Any]) -> "Rendering":
        """`template` is the text of the one that is rendered, `options` what it is always called with."""
        known = getattr(tokenizer, "added_tokens_decoder", {})
        added = {number for number, token in known.items() if not str(token).isspace()}
        fast = bool(getattr(tokenizer, "is_fast", False))
        return cls(tokenizer, options, frozenset(added | set(tokenizer.all_special_ids)), "add_generation_prompt" in template, fast)

    def with_tools(self, tools: list[dict[str, Any]] | None) -> "Rendering":
        """The same template for a row that brings tools."""
        return replace(self, options={**self.options, "tools": tools}) if tools else self

    def text(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """The rendering; `prompt`: up to where the next answer begins."""
        return self._applied(messages, tokenize=False, add_generation_prompt=prompt)

    def rendered(self, text: str) -> Rendered:
        """Ids of a rendering, exactly those that the template's own call gives."""
        (found,) = self.rendered_all([text])
        return found

    def rendered_all(self, texts: Sequence[str]) -> list[Rendered]:
        """The same of many at a time, so that the tokenizer may use its threads."""
        if not texts:
            return []
        encoded = self.tokenizer(
            list(texts), add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=self.has_offsets, verbose=False
        )
        ids = [np.asarray(found, np.uint32) for found in encoded["input_ids"]]
        if not self.has_offsets:
            return [Rendered(*pair) for pair in zip(texts, ids, strict=True)]
        bounds = [np.asarray(offsets, np.int64).reshape(-1, 2) for offsets in encoded["offset_mapping"]]
        return [Rendered(text, found, (both[:, 0], both[:, 1])) for text, found, both in zip(texts, ids, bounds, strict=True)]

    def is_mark(self, token: int) -> bool:
        """Whether a token is none of text."""
        return token in self.marks

    def is_space(self, token: int) -> bool:
        """Whether a token is nothing but white space."""
        known = self.spaces.get(token)
        if known is None:
            known = self.spaces[token] = not self.tokenizer.decode([token]).strip()
        return known

    def marked(self, messages: Sequence[Message], trained: Sequence[int]) -> list[Turn]:
        """What the template marks, of the answers that are to be trained."""
        encoded = self._applied(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = encoded["input_ids"], np.asarray(encoded["assistant_masks"], np.int8)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]))).reshape(-1, 2)
        turns = [Turn(int(start), int(stop), self.is_mark(int(ids[stop - 1]))) for start, stop in edges]
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if len(trained) == len(answers):
            return turns
        if len(turns) != len(answers):
            raise ChatRefused(f"the template marks {len(turns)} answers of {len(answers)}, so that one cannot be left untrained")
        return [turn for turn, number in zip(turns, answers, strict=True) if number in trained]

    def _applied(self, messages: Sequence[Message], **options: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(list(messages), **self.options, **options)
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError, IndexError) as exc:
            raise ChatRefused(f"the chat template refuses the messages: {exc}") from exc
