"""Conversations to ids and loss masks, by a tokenizer's chat template. The ids are always those of the whole rendering."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import numpy as np

from mem_core.domain.errors import RequestError
from mem_core.domain.request import DataSection
from mem_core.runtime.data.chat.conversation import ChatRefused, Conversation
from mem_core.runtime.data.chat.rendering import Rendering, marks_words
from mem_core.runtime.data.chat.turns import Message, Rendered, assistant_turns, token_at
from mem_core.runtime.data.reading.messages import is_trained, plain_message
from mem_core.runtime.data.reading.rows import Document


class Chats:
    """One tokenizer's template. `template` is its text, `options` what every rendering is called with."""

    def __init__(self, tokenizer: Any, template: str, options: dict[str, str]) -> None:
        self._rendering = Rendering.of(tokenizer, template, options)
        self._marks_words = marks_words(template)
        self._has_template = bool(tokenizer.chat_template)

    def encode(self, document: Document, data: DataSection) -> Conversation:
        """Ids and mask of one row.

        Raises:
            RequestError: the tokenizer has no chat template. ChatRefused: these messages cannot be used.
        """
        (found,) = self.encode_many([document], data)
        if isinstance(found, ChatRefused):
            raise found
        return found

    def encode_many(self, documents: Sequence[Document], data: DataSection) -> list[Conversation | ChatRefused]:
        """Ids and mask of each row, or why it cannot be used. All renderings are encoded in one call, which uses all cores.

        Raises:
            RequestError: the tokenizer has no chat template.
        """
        if documents and not self._has_template:
            raise RequestError(
                "the model's tokenizer has no chat template",
                field="data.messages_field" if data.messages_field else "data.prompt_field",
                remedy="Add chat_template.jinja to the model folder, or give prompts and completions as text",
            )
        begun = [_or_refused(self._begun, document) for document in documents]
        wholes = iter(self._rendering.rendered_all([one.text for one in begun if not isinstance(one, ChatRefused)]))
        return [one if isinstance(one, ChatRefused) else _or_refused(self._ended, one, next(wholes), data) for one in begun]

    def _begun(self, document: Document) -> "_Begun":
        rendering = self._rendering.with_tools(document.tools)
        messages, text = _taken(rendering, [plain_message(message) for message in document.messages or ()])
        if document.tools and text == self._rendering.text(messages):
            raise ChatRefused("the chat template leaves out the tools of the row")
        return _Begun(document, rendering, messages, text)

    def _ended(self, begun: "_Begun", whole: Rendered, data: DataSection) -> Conversation:
        document, rendering, messages = begun.document, begun.rendering, begun.messages
        if data.assistant_only:
            return self._answers(rendering, whole, messages, _trained(document, data))
        if not all(is_trained(message) for message in document.messages or () if message["role"] == "assistant"):
            raise ChatRefused("an answer is not to be trained, which needs data.assistant_only", "Set data.assistant_only to true")
        return _everything(rendering, whole, messages, document.num_prompt_messages if data.completion_only else 0)

    def _answers(self, rendering: Rendering, whole: Rendered, messages: Sequence[Message], trained: Sequence[int]) -> Conversation:
        if not trained:
            raise ChatRefused("none of its tokens would be trained: it holds no words of the assistant that are to be")
        turns = rendering.marked(messages, trained) if self._marks_words else assistant_turns(rendering, whole, messages, trained)
        mask = np.zeros(whole.ids.size, np.uint8)
        for turn in turns:
            mask[turn.start : turn.stop] = 1
        if not mask[1:].any():
            raise ChatRefused("none of its tokens would be trained: the template renders no words of the assistant")
        return Conversation(whole.ids, mask, turns[-1].start, all(turn.ends for turn in turns))


@dataclass(frozen=True, slots=True)
class _Begun:
    """A row whose messages are rendered."""

    document: Document
    rendering: Rendering
    messages: list[Message]
    text: str


P = ParamSpec("P")
T = TypeVar("T")


def _or_refused(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | ChatRefused:
    """One row that cannot be used must not take the others of its batch along."""
    try:
        return work(*args, **kwargs)
    except ChatRefused as refused:
        return refused


def _trained(document: Document, data: DataSection) -> list[int]:
    first = document.num_prompt_messages if data.completion_only else 0
    messages = enumerate(document.messages or ())
    return [number for number, message in messages if number >= first and message["role"] == "assistant" and is_trained(message)]


def _everything(rendering: Rendering, whole: Rendered, messages: Sequence[Message], num_prompt: int) -> Conversation:
    """All tokens; of a prompt and its completion those from where the completion begins."""
    before = messages[: num_prompt or len(messages) - 1]
    start = 0
    if before:
        prompt = rendering.text(before, prompt=messages[len(before)]["role"] == "assistant")
        if whole.text.startswith(prompt):
            start = token_at(whole, len(prompt), rendering)
        elif num_prompt:
            reason = "the chat template renders the prompt otherwise once the completion follows"
            raise ChatRefused(reason, "Set data.completion_only to false")
    mask = np.ones(whole.ids.size, np.uint8)
    if num_prompt:
        mask[:start] = 0
    return Conversation(whole.ids, mask, start)


def _taken(rendering: Rendering, messages: list[Message]) -> tuple[list[Message], str]:
    """The messages as the template takes them, and the whole rendering: calls without words, and arguments, come in two forms each."""
    try:
        text = rendering.text(messages)
    except ChatRefused:
        silent = [message for message in messages if message.get("content") is None]
        if not silent:
            raise
        messages = [{**message, "content": message.get("content") or ""} for message in messages]
        text = rendering.text(messages)
    if not _escapes_twice(text, messages):
        return messages, text
    messages = [_with_parsed_arguments(message) for message in messages]
    return messages, rendering.text(messages)


def _escapes_twice(text: str, messages: Sequence[Message]) -> bool:
    """Whether a template that expects objects has put the text of one into quotes."""
    written = [arguments for message in messages for arguments in _arguments(message) if isinstance(arguments, str) and '"' in arguments]
    return any(json.dumps(arguments)[1:-1] in text and arguments not in text for arguments in written)


def _arguments(message: Message) -> list[Any]:
    functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return [function.get("arguments") for function in functions if isinstance(function, dict)]


def _with_parsed_arguments(message: Message) -> Message:
    calls = [_parsed(call) for call in message.get("tool_calls") or ()]
    return {**message, "tool_calls": calls} if calls else message


def _parsed(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _parsed(call["function"])}
    try:
        arguments = json.loads(call["arguments"])
    except (KeyError, TypeError, ValueError):
        return call
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call
