"""Where the assistant's words stand in a rendered conversation whose template does not mark them. Pure but for the rendering itself.

A turn is what a template adds between "the assistant is asked to speak" and "it has spoken": the conversation is rendered up to either
place, and both renderings have to be found in the whole one, so that what is trained is what the model will be asked to say. Where a
template renders a turn otherwise once more turns follow (it leaves out old thinking, moves the system prompt), there is no such
place: the row is refused and nothing is guessed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mem_core.runtime.data.chat.conversation import ChatRefused

Message = dict[str, Any]
AMBIGUOUS_HINT = (
    "Set data.assistant_only to false to train on whole conversations, put train: false on the messages before the last answer, or mark "
    "the assistant's words in the template with {% generation %}"
)
_SENTINEL = "qzwords"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A text with its ids, shape [tokens], and the first and the last + 1 character of each; none where a tokenizer does not tell them."""

    text: str
    ids: NDArray[np.uint32]
    bounds: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None


class Template(Protocol):
    """A chat template with the tokenizer behind it. Its calls raise ChatRefused where it does not take the messages."""

    @property
    def has_prompt(self) -> bool:
        """Whether it writes something of its own where an answer is due."""
        ...

    def text(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """The rendering; `prompt`: up to where the next answer begins."""
        ...

    def rendered(self, text: str) -> Rendered:
        """Ids of a rendering."""
        ...

    def is_mark(self, token: int) -> bool:
        """Whether a token is none of text: it ends a turn, begins one, pads."""
        ...

    def is_space(self, token: int) -> bool:
        """Whether a token is nothing but white space."""
        ...


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens [start, stop) of the whole rendering that the assistant says; `ends`: the last of them is the end of its turn."""

    start: int
    stop: int
    ends: bool


def assistant_turns(template: Template, whole: Rendered, messages: Sequence[Message], trained: Sequence[int]) -> list[Turn]:
    """The turns of `trained` messages, ascending, each exactly the words and the end-of-turn token.

    Raises:
        ChatRefused: the template renders a turn otherwise within the whole, or leaves out some of its words.
    """
    turns = [_turn(template, whole, messages, number) for number in trained]
    for before, after in pairwise(turns):
        if before.stop > after.start:
            raise _ambiguous(trained[turns.index(after)], "its beginning cannot be told from the turn before it")
    return turns


def _turn(template: Template, whole: Rendered, messages: Sequence[Message], number: int) -> Turn:
    limit = _end_of(template, whole, messages, number)
    start = _start_of(template, whole, messages, number, limit)
    if start > limit:
        raise _ambiguous(number, "it is rendered otherwise within the whole conversation")
    _refuse_lost_words(whole.text[start:limit], messages[number], number)
    stop = start + len(whole.text[start:limit].rstrip())
    first, beyond = token_at(whole, start, template), token_before(whole, stop, template)
    first = min(first, beyond)
    return Turn(first, beyond, ends=beyond > first and template.is_mark(int(whole.ids[beyond - 1])))


def _end_of(template: Template, whole: Rendered, messages: Sequence[Message], number: int) -> int:
    """The character of the whole at which the rendering of the turn ends; what only closes a conversation is not the turn's."""
    if number == len(messages) - 1:
        return _before_closing(template, whole, messages)
    upto = template.text(messages[: number + 1])
    if whole.text.startswith(upto):
        return len(upto)
    alone = template.rendered(upto)
    same = common(alone.ids, whole.ids)
    closing = all(template.is_mark(int(token)) or template.is_space(int(token)) for token in alone.ids[same:])
    if not same or not closing:
        raise _ambiguous(number, "once more messages follow, it is rendered otherwise")
    return end_char(whole, same, template)


def _before_closing(template: Template, whole: Rendered, messages: Sequence[Message]) -> int:
    """Some templates close a conversation with a mark of its own, behind the end of the last turn: it is gone once a turn follows."""
    marks = 0
    for token in whole.ids[::-1]:
        if template.is_mark(int(token)):
            marks += 1
        elif not template.is_space(int(token)):
            break
    if marks < 2:
        return len(whole.text)
    try:
        longer = template.text([*messages, {"role": "user", "content": _SENTINEL}])
    except ChatRefused:
        return len(whole.text)
    if longer.startswith(whole.text):
        return len(whole.text)
    return end_char(whole, common(template.rendered(longer).ids, whole.ids), template)


def _start_of(template: Template, whole: Rendered, messages: Sequence[Message], number: int, limit: int) -> int:
    """The character of the whole at which the model would begin to speak."""
    before = messages[:number]
    if not before or not template.has_prompt:
        return _after_header(template, whole, before, number)
    prompt = template.text(before, prompt=True)
    if whole.text.startswith(prompt):
        return len(prompt)
    # A prompt may hold more than the turn does in the whole, such as an opened thought: then the words must follow at once.
    same = common(template.rendered(prompt).ids, whole.ids)
    marks = [place for place in range(same) if template.is_mark(int(whole.ids[place]))]
    _refuse_lost_words(whole.text[:limit], messages[number], number)
    words = _squeezed(_words_of(messages[number]))
    for tokens in (same, marks[-1] + 1 if marks else 0):  # words may begin like what the prompt holds more
        start = end_char(whole, tokens, template)
        follows = _squeezed(whole.text[start:limit]).startswith(words) if words else template.is_mark(int(whole.ids[tokens]))
        if follows:
            return start
    raise _ambiguous(number, "up to where it begins, the conversation is rendered otherwise")


def _after_header(template: Template, whole: Rendered, before: Sequence[Message], number: int) -> int:
    """For a template that has no prompt: what stands between the turns before and a word that is said in this one is its header."""
    opened = template.text(before) if before else ""
    probe = template.text([*before, {"role": "assistant", "content": _SENTINEL}])
    if not whole.text.startswith(opened) or not probe.startswith(opened) or _SENTINEL not in probe[len(opened) :]:
        raise _ambiguous(number, "up to where it begins, the conversation is rendered otherwise")
    header = probe[len(opened) : probe.index(_SENTINEL, len(opened))]
    if not header.strip():
        return len(opened)
    found = whole.text.startswith(opened + header) or whole.text.startswith(opened + header.rstrip())
    if not found:
        raise _ambiguous(number, "its header differs from answer to answer")
    return len(opened) + len(header if whole.text.startswith(opened + header) else header.rstrip())


def _refuse_lost_words(said: str, message: Message, number: int) -> None:
    squeezed = _squeezed(said)
    if _squeezed(_words_of(message)) not in squeezed:
        raise _ambiguous(number, "the template leaves out or changes some of its words, such as its thinking")
    for name in _called(message):
        if _squeezed(name) not in squeezed:
            raise ChatRefused(f"the chat template leaves out the call of {name!r} in message {number}")


def _words_of(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _called(message: Message) -> list[str]:
    calls = message.get("tool_calls") or ()
    functions = [call.get("function", call) for call in calls if isinstance(call, dict)]
    return [str(function["name"]) for function in functions if isinstance(function, dict) and "name" in function]


def _ambiguous(number: int, why: str) -> ChatRefused:
    return ChatRefused(f"the assistant's words cannot be told apart in message {number}: {why}", AMBIGUOUS_HINT)


def _squeezed(text: str) -> str:
    """Templates strip and add white space."""
    return "".join(text.split())


def common(one: NDArray[np.uint32], other: NDArray[np.uint32]) -> int:
    """How many tokens two sequences begin with alike."""
    shorter = min(one.size, other.size)
    different = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(different[0]) if different.size else shorter


def token_at(whole: Rendered, char: int, template: Template) -> int:
    """The first token that holds something from `char` on."""
    if whole.bounds is None:
        return common(template.rendered(whole.text[:char]).ids, whole.ids)
    return int(np.searchsorted(whole.bounds[1], char, side="right"))


def token_before(whole: Rendered, char: int, template: Template) -> int:
    """One more than the last token that begins before `char`."""
    if whole.bounds is None:
        return common(template.rendered(whole.text[:char]).ids, whole.ids)
    return int(np.searchsorted(whole.bounds[0], char, side="left"))


def end_char(whole: Rendered, tokens: int, template: Template) -> int:
    """Where the first `tokens` tokens of the whole end in its text."""
    if not tokens:
        return 0
    if whole.bounds is not None:
        return int(whole.bounds[1][tokens - 1])
    low, high = 0, len(whole.text)
    while low < high:
        middle = (low + high) // 2
        if common(template.rendered(whole.text[:middle]).ids, whole.ids) < tokens:
            low = middle + 1
        else:
            high = middle
    return low
