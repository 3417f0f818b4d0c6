"""How rows became tokens for runs that were born under earlier rules: kept to the letter, so that they go on. Not used for a new run.

First rules (before a run's record named its encoding): pieces of a long text are encoded apart, prompt and completion too, the
document's beginning and end are always added, and a row with an answer is cut like any other. Second rules: the loss of a chat covers
what its template marks, else all of it, and an end is added to one that has none.
"""

from collections.abc import Sequence

import numpy as np

from mem_core.runtime.data.chat.conversation import ChatRefused, Conversation
from mem_core.runtime.data.encoding.joining import Tokens
from mem_core.runtime.data.encoding.lengths import last_answer_start
from mem_core.runtime.data.encoding.marks.waiting import Waiting
from mem_core.runtime.data.encoding.tokenizing import Mask, Tokenizing
from mem_core.runtime.data.reading.pieces import pieces
from mem_core.runtime.data.reading.rows import BadRow, Document

_ONE_BY_ONE = ChatRefused("chats were encoded one by one")


class ThirdRules(Tokenizing):
    """Tokenizing with what were files of rows then."""

    rules = 3


class SecondRules(Tokenizing):
    """Tokenizing as it was then."""

    rules = 2

    def _may_run_beside(self, waiting: list[Waiting]) -> bool:
        return not any(item.unit.document.messages is not None for item in waiting)

    def _chats(self, documents: Sequence[Document]) -> Sequence[Conversation | ChatRefused]:
        return [_ONE_BY_ONE] * len(documents)

    def _take_chat(self, item: Waiting, chat: Conversation | ChatRefused = _ONE_BY_ONE) -> None:
        del chat
        try:
            tokens, mask = self._encoder.encode_chat(item.unit.document)
        except ChatRefused as refused:
            self.seen.bad(item.path, BadRow(item.unit.line, str(refused)))
            return
        if self._form.masked and not mask[1:].any():
            self.seen.bad(item.path, BadRow(item.unit.line, "none of its tokens would be trained: it holds no words of the assistant"))
            return
        start = last_answer_start(mask) if self._form.masked else None  # before an end is added, which would be a stretch of its own
        end = self._encoder.eos_token_id
        if end is not None and end not in tokens[-2:]:
            tokens, mask = np.append(tokens, np.uint32(end)), np.append(mask, np.uint8(1))
        self._remark_doubled(tokens)
        self._take_answered(item, tokens, mask, start)


class FirstRules(Tokenizing):
    """Tokenizing as it was."""

    rules = 1

    def _take(self, item: Waiting) -> None:
        self._enqueue(item)

    def flush(self) -> None:
        """Encode what waits and hand it to the row makers."""
        self._hand_over()

    def _hand_over(self) -> None:
        waiting, self._waiting, self._waiting_chars = self._waiting, [], 0
        plain = [(item.unit, [*pieces(item.unit.document.prompt or "")], [*pieces(item.unit.document.text)]) for item in waiting]
        encoded = iter(
            self._encoder.encode([text for unit, *sides in plain if unit.document.messages is None for side in sides for text in side])
        )
        for item, (unit, prompt, text) in zip(waiting, plain, strict=True):
            if unit.document.messages is not None:
                self._take_chat(item)
            else:
                self._take_pieces(item, [next(encoded) for _ in prompt], [next(encoded) for _ in text])

    def _take_pieces(self, item: Waiting, prompt: list[Tokens], text: list[Tokens]) -> None:
        unit, end = item.unit, self._encoder.eos_token_id
        prefix = [np.array(self._encoder.prefix, np.uint32)] if unit.first else []
        suffix = [np.array([end], np.uint32)] if unit.last and end is not None else []
        tokens = np.concatenate([*prefix, *prompt, *text, *suffix])
        mask = np.ones(tokens.size, np.uint8)
        if unit.document.prompt is not None:
            mask[: sum(part.size for part in (*prefix, *prompt))] = 0
        self._take_cut(item, tokens, mask)

    def _take_chat(self, item: Waiting, chat: Conversation | ChatRefused = _ONE_BY_ONE) -> None:
        del chat
        try:
            tokens, mask = self._encoder.encode_chat(item.unit.document)
        except ChatRefused as refused:
            self.seen.bad(item.path, BadRow(item.unit.line, str(refused)))
            return
        end = self._encoder.eos_token_id
        if end is not None and end not in tokens[-2:]:
            tokens, mask = np.append(tokens, np.uint32(end)), np.append(mask, np.uint8(1))
        self._take_cut(item, tokens, mask)

    def _take_cut(self, item: Waiting, tokens: Tokens, mask: Mask) -> None:
        if self._fits_or_may_be_cut(item, tokens):
            self._add(item, tokens, mask)
