"""Text to token ids, as preparation asks for them. Ids are always those of the whole text: no cut of ours shows in them."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mem_core.domain.environment import DataRemark
from mem_core.domain.request import DataSection
from mem_core.runtime.data.chat.conversation import ChatRefused, Conversation
from mem_core.runtime.data.encoding.joining import Tokens
from mem_core.runtime.data.encoding.parts import PartedText
from mem_core.runtime.data.reading.rows import Document


class Encoder(Protocol):
    """A tokenizer as preparation needs it. `prefix` starts each document; `eos_token_id` ends it."""

    vocab_size: int
    pad_token_id: int
    eos_token_id: int | None
    prefix: tuple[int, ...]
    chat_has_assistant_mask: bool
    identity: dict[str, str]
    notes: tuple[DataRemark, ...]
    runs_beside: bool  # `encode` and `encode_pairs` leave the interpreter to other threads for most of their time

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Ids of each text, nothing added."""
        ...

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[Tokens, int]]:
        """Of each (prompt, completion) the ids of both as one text, and how many stand before the first that holds of the completion."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones by their names."""
        ...

    def parted(self) -> PartedText:
        """For one document that comes in parts."""
        ...

    def encode_chat(self, document: Document) -> tuple[Tokens, NDArray[np.uint8]]:
        """Ids and loss mask of rendered messages, for runs of the first two rules."""
        ...

    def encode_chats(self, documents: Sequence[Document], data: DataSection) -> list[Conversation | ChatRefused]:
        """The same of many rows at a time, each with its own refusal. Raises RequestError: no chat template."""
        ...

    def encode_turns(self, document: Document, data: DataSection) -> Conversation:
        """Ids of the whole rendering, and what of it the request trains. Raises ChatRefused."""
        ...

    def chat_answer_start(self, document: Document, tokens: Tokens) -> int:
        """Where in these rendered messages the last answer begins, for templates that do not mark it."""
        ...
