"""Units of text to training and validation rows, many at a time, with every bad row remembered."""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mem_core.domain.errors import DataError, RequestError
from mem_core.domain.request import DataSection
from mem_core.runtime.data.chat.conversation import ChatRefused, Conversation
from mem_core.runtime.data.encoding.encoder import Encoder
from mem_core.runtime.data.encoding.joining import CannotBeCut, Tokens
from mem_core.runtime.data.encoding.lengths import cut_prompt
from mem_core.runtime.data.encoding.marks.place import Place
from mem_core.runtime.data.encoding.marks.tallies import Tallies
from mem_core.runtime.data.encoding.marks.waiting import LongDocument, Target, Waiting
from mem_core.runtime.data.encoding.sequences import RowForm, Rows
from mem_core.runtime.data.reading.rows import BadRow, Document
from mem_core.runtime.data.reading.units import Readable, Unit
from mem_core.runtime.data.serving.shards import BEGINS_DOCUMENT

_BATCH_CHARS = 2**18
_BATCH_UNITS = 512
Mask = NDArray[np.uint8]
Encoded = tuple[list[Tokens], list[tuple[Tokens, int]], Sequence[Conversation | ChatRefused]]


class Tokenizing:
    """Runs files through an encoder into row makers. `is_failing` tells that rows are only checked any more."""

    rules = 4

    def __init__(self, encoder: Encoder, data: DataSection, form: RowForm, vocab_size: int | None) -> None:
        self._encoder = encoder
        self._data = data
        self._form = form
        self._last_rows: Rows | None = None
        self._vocab_size = vocab_size
        self._waiting: list[Waiting] = []
        self._waiting_chars = 0
        self._long: LongDocument | None = None
        self._seen_training_unit = False
        self._specials = tuple({*encoder.prefix, *((encoder.eos_token_id,) if encoder.eos_token_id is not None else ())})
        self._thread = ThreadPoolExecutor(1, "encode")  # starts when it is first used
        self._encoding: tuple[list[Waiting], Future[Encoded] | None] | None = None
        self.seen = Tallies()
        self.place = Place()

    @property
    def is_failing(self) -> bool:
        """Whether the bad rows are already too many for the request."""
        return self.seen.num_bad_rows > (self._data.max_bad_rows if self._data.on_bad_row == "skip" else 0)

    def read(self, file: Readable, target: Target, after: Place | None = None) -> Iterator[int]:
        """Take in a whole file, or what of it comes after a place; yields the bytes gone through, so that the caller can report.

        Wherever it yields, `place` is how far the file was taken in.
        """
        self.place = after or Place(documents_before=self.seen.num_documents, bad_before=self.seen.num_bad_rows)
        for size_bytes, item in self.place.rest(file, self._data, self.rules):
            self.place = self.place.past(size_bytes, item, file)
            if isinstance(item, BadRow):
                self.seen.bad(file.source.path, item)
            elif isinstance(item, Unit):
                self.seen.num_documents += item.first
                self._route(item, file.source.path, target)
            elif file.source.kind != "text":
                self.seen.dropped["blank_lines"] += 1
            yield size_bytes
        if (self.seen.num_documents, self.seen.num_bad_rows) == (self.place.documents_before, self.place.bad_before):
            self.seen.notes.append(f"{file.source.path} is {'blank' if file.source.size_bytes else 'empty'}")

    def state(self, makers: Sequence[Rows]) -> dict[str, Any]:
        """How far this is: nothing waits to be encoded, but for a very long document whose end is not there yet."""
        self.flush()
        long = None if self._long is None else self._long.state(makers)
        last = next((number for number, maker in enumerate(makers) if maker is self._last_rows), None)
        return {"seen": self.seen.state(), "long": long, "last_rows": last, "began": self._seen_training_unit, "place": self.place.state()}

    def restore(self, state: dict[str, Any], makers: Sequence[Rows], keys: Sequence[bytes]) -> Place:
        """Go on from there; the place in the file that was being read."""
        self.seen.restore(state["seen"], keys)
        self._seen_training_unit = bool(state["began"])
        self._last_rows = None if state["last_rows"] is None else makers[int(state["last_rows"])]
        if state["long"] is not None:
            self._long = self._new_long(None)
            self._long.restore(state["long"], makers)
        return Place.of(state["place"])

    def _route(self, unit: Unit, path: str, target: Target) -> None:
        if self.is_failing:
            return
        held_out = target.validation is not None and self._seen_training_unit and _fraction_of(unit.key) < target.held_out
        self._seen_training_unit = True
        if unit.first:
            self.seen.counts.compare(unit.key)
        self._take(Waiting(unit, target.validation if held_out and target.validation is not None else target.rows, path))

    def _take(self, item: Waiting) -> None:
        if item.unit.first and item.unit.last:
            self._enqueue(item)
        else:
            self._take_part(item)

    def _enqueue(self, item: Waiting) -> None:
        unit = item.unit
        self._waiting.append(item)
        self._waiting_chars += len(unit.document.text) + len(unit.document.prompt or "")
        if self._waiting_chars >= _BATCH_CHARS or len(self._waiting) >= _BATCH_UNITS:
            self._hand_over()

    def flush(self) -> None:
        """Encode what waits and hand it to the row makers."""
        self._hand_over()
        self._finish()

    def _hand_over(self) -> None:
        """Begin to encode what waits; the batch before goes to the row makers meanwhile.

        So does the next batch's reading: a tokenizer that uses all cores by itself would wait for both. Nothing else asks the
        tokenizer meanwhile: two threads must not.
        """
        waiting, self._waiting, self._waiting_chars = self._waiting, [], 0
        beside = self._encoder.runs_beside and self._may_run_beside(waiting)
        begun = self._thread.submit(self._encoded, waiting) if beside else None
        self._finish()
        self._encoding = (waiting, begun)
        if begun is None:
            self._finish()

    def _may_run_beside(self, waiting: list[Waiting]) -> bool:
        return bool(waiting)

    def _encoded(self, waiting: list[Waiting]) -> Encoded:
        documents = [item.unit.document for item in waiting]
        plain = self._encoder.encode([row.text for row in documents if row.prompt is None and row.messages is None])
        pairs = self._encoder.encode_pairs([(row.prompt, row.text) for row in documents if row.prompt is not None])
        return plain, pairs, self._chats([row for row in documents if row.messages is not None])

    def _chats(self, documents: Sequence[Document]) -> Sequence[Conversation | ChatRefused]:
        return self._encoder.encode_chats(documents, self._data)

    def _finish(self) -> None:
        if self._encoding is None:
            return
        (waiting, begun), self._encoding = self._encoding, None
        try:
            encoded = self._encoded(waiting) if begun is None else begun.result()
        except CannotBeCut as exc:
            raise self._cannot_be_cut(waiting, exc) from exc
        plain, pairs, chats = iter(encoded[0]), iter(encoded[1]), iter(encoded[2])
        for item in waiting:
            row = item.unit.document
            if row.messages is not None:
                self._take_chat(item, next(chats))
            elif row.prompt is not None:
                self._take_pair(item, *next(pairs))
            else:
                self._take_text(item, next(plain))

    def _take_part(self, item: Waiting) -> None:
        if item.unit.first:
            self.flush()
            self._long = self._new_long(item)
        assert self._long is not None
        try:
            for part, tokens in self._long.take(item):
                self._take_text(part, tokens)
        except CannotBeCut as exc:
            raise self._cannot_be_cut([item], exc) from exc
        if item.unit.last:
            self._long = None

    def _new_long(self, first: Waiting | None) -> LongDocument:
        in_chunks = self._data.long_documents == "chunk"
        return LongDocument(self._encoder.parted(), first, in_chunks=in_chunks, limit=self._data.sequence_length)

    def _take_chat(self, item: Waiting, chat: Conversation | ChatRefused) -> None:
        if isinstance(chat, ChatRefused):
            self.seen.bad(item.path, BadRow(item.unit.line, str(chat), chat.hint))
            return
        self._remark_doubled(chat.tokens)
        self.seen.remarks["answers_without_end"] += not chat.ends_answers
        self._take_answered(item, chat.tokens, chat.mask, chat.answer_start)

    def _remark_doubled(self, tokens: Tokens) -> None:
        twice = tokens[1:][tokens[1:] == tokens[:-1]]
        self.seen.remarks["doubled_special_tokens"] += bool(np.isin(twice, self._specials).any())

    def _take_pair(self, item: Waiting, tokens: Tokens, num_prompt_tokens: int) -> None:
        if num_prompt_tokens >= tokens.size:
            self.seen.bad(
                item.path, BadRow(item.unit.line, "none of its tokens would be trained: the tokenizer leaves nothing of the completion")
            )
            return
        tokens, added = self._with_specials(item.unit, tokens)
        start = num_prompt_tokens + added
        mask = np.ones(tokens.size, np.uint8)
        if self._form.masked:
            mask[:start] = 0
        self._take_answered(item, tokens, mask, start)

    def _take_text(self, item: Waiting, tokens: Tokens) -> None:
        tokens, _ = self._with_specials(item.unit, tokens)
        mask = np.ones(tokens.size, np.uint8)
        if self._fits_or_may_be_cut(item, tokens):
            self._add(item, tokens, mask)

    def _with_specials(self, unit: Unit, tokens: Tokens) -> tuple[Tokens, int]:
        """The document's beginning and end around its tokens, unless its own text has put them there; and how many stand in front."""
        prefix, end = np.array(self._encoder.prefix, np.uint32), self._encoder.eos_token_id
        if any((tokens == special).any() for special in self._specials):
            self.seen.remarks["own_special_tokens"] += 1
        starts = unit.first and not (prefix.size and np.array_equal(tokens[: prefix.size], prefix))
        ends = unit.last and end is not None and not (tokens.size and tokens[-1] == end)
        before = prefix if starts else prefix[:0]
        after = np.array([end], np.uint32) if ends else prefix[:0]
        return np.concatenate([before, tokens, after]), before.size

    def _take_answered(self, item: Waiting, tokens: Tokens, mask: Mask, answer_start: int | None) -> None:
        """A row with an answer: it keeps that, whatever of its prompt has to go."""
        limit = self._data.sequence_length
        if not self._fits_or_may_be_cut(item, tokens):
            return
        if tokens.size <= limit:
            self._add(item, tokens, mask)
            return
        start = answer_start if answer_start is not None else self._encoder.chat_answer_start(item.unit.document, tokens)
        prefix = len(self._encoder.prefix) if tuple(tokens[: len(self._encoder.prefix)]) == self._encoder.prefix else 0
        cut, cut_mask = cut_prompt(tokens, mask, start, prefix, limit)
        self.seen.remarks["prompts_cut"] += cut.size < tokens.size
        self.seen.remarks["answers_cut"] += self._form.masked and int(cut_mask.sum()) < int(mask.sum())
        self._add(item, cut, cut_mask, own_row=cut.size == limit)

    def _fits_or_may_be_cut(self, item: Waiting, tokens: Tokens) -> bool:
        self.seen.counts.see(tokens.size, last=item.unit.last)
        limit = self._data.sequence_length
        if tokens.size <= limit or self._data.long_documents != "refuse":
            return True
        reason = f"longer than data.sequence_length: over {limit} tokens, and data.long_documents is refuse"
        self.seen.bad(item.path, BadRow(item.unit.line, reason))
        return False

    def _add(self, item: Waiting, tokens: Tokens, mask: Mask, *, own_row: bool = False) -> None:
        self._check_vocabulary(tokens)
        if not tokens.size:
            return
        if self._form.apart and (item.unit.first or item.rows is not self._last_rows):
            mask = mask.copy()
            mask[0] = BEGINS_DOCUMENT  # which nothing before it predicts
        self._last_rows = item.rows
        item.rows.add(tokens, mask if self._form.has_mask else None, own_row=own_row)

    def _check_vocabulary(self, tokens: Tokens) -> None:
        highest = int(tokens.max()) if tokens.size else 0
        if self._vocab_size is not None and highest >= self._vocab_size:
            raise RequestError(
                f"the tokenizer gives token {highest}, the model has {self._vocab_size} embeddings",
                field="model.source",
                bound=f"token ids below {self._vocab_size}",
                remedy="Use the tokenizer that belongs to the model",
            )

    def _cannot_be_cut(self, items: list[Waiting], exc: CannotBeCut) -> DataError:
        longest = max(items, key=lambda item: len(item.unit.document.text) + len(item.unit.document.prompt or ""))
        return DataError(
            f"{longest.path}:{longest.unit.line}: {exc}",
            field="data.train",
            remedy="Divide the document into several, at places where words end",
        )


def _fraction_of(key: bytes) -> float:
    """A number in [0, 1) that depends on the content alone: equal documents always land on the same side."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") / 2**64
