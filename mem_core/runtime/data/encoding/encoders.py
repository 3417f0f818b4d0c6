"""Text to token ids. Long text is cut into pieces first: some tokenizers need memory far beyond the text for one huge word."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mem_core.domain.errors import RequestError
from mem_core.runtime.data.reading.rows import Document
from mem_core.runtime.models.folders import is_preset
from mem_core.runtime.models.presets import BYTE_EOS_TOKEN_ID, BYTE_OFFSET, BYTE_PAD_TOKEN_ID, BYTE_VOCAB_SIZE

PIECE_CHARS = 8_192
_GAP = re.compile(r"(?<=\S)(?=\s)")
Tokens = NDArray[np.uint32]


class ChatRefused(ValueError):
    """The chat template does not take these messages."""


class Encoder(Protocol):
    """A tokenizer as preparation needs it. `prefix` starts each document; `eos_token_id` ends it."""

    vocab_size: int
    pad_token_id: int
    eos_token_id: int | None
    prefix: tuple[int, ...]
    chat_has_assistant_mask: bool

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Ids of each text, nothing added."""
        ...

    def encode_chat(self, document: Document) -> tuple[Tokens, NDArray[np.uint8]]:
        """Ids and loss mask of rendered messages."""
        ...


def pieces(text: str, limit_chars: int = PIECE_CHARS) -> Iterator[str]:
    """Cut text into pieces of at most `limit_chars`, before white space where the last quarter of a piece has some.

    There the usual tokenizers cut as well, so that the tokens are those of the whole text. Linear in the text.
    """
    if len(text) <= limit_chars:  # the usual case, kept quick
        if text:
            yield text
        return
    start = 0
    while len(text) - start > limit_chars:
        stop = start + limit_chars
        gaps = [gap.start() for gap in _GAP.finditer(text, stop - limit_chars // 4, stop)]
        stop = gaps[-1] if gaps and gaps[-1] > start else stop
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]


class ByteEncoder:
    """Token = byte + 3, as `transformers.ByT5Tokenizer` does; text that looks like a special token stays text."""

    vocab_size = BYTE_VOCAB_SIZE
    pad_token_id = BYTE_PAD_TOKEN_ID
    eos_token_id: int | None = BYTE_EOS_TOKEN_ID
    prefix: tuple[int, ...] = ()
    chat_has_assistant_mask = False

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Ids of each text's UTF-8 bytes."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) + np.uint32(BYTE_OFFSET) for text in texts]

    def encode_chat(self, document: Document) -> tuple[Tokens, NDArray[np.uint8]]:
        """Raises RequestError: bytes have no chat template."""
        raise RequestError(
            "the byte tokenizer of presets has no chat template",
            field="data.messages_field",
            remedy="Use a model folder with a chat template, or prompt_field and completion_field",
        )


class HuggingFaceEncoder:
    """A Hugging Face tokenizer. A missing pad token is no obstacle, since padding is masked by position: the end token pads."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocab_size: int = len(tokenizer)
        self.eos_token_id: int | None = tokenizer.eos_token_id
        pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, 0)
        self.pad_token_id: int = next(int(pad) for pad in pads if pad is not None)
        first = tokenizer("a").input_ids[:1]
        self.prefix: tuple[int, ...] = tuple(first) if first and first[0] == tokenizer.bos_token_id else ()
        template = tokenizer.chat_template
        self.chat_has_assistant_mask = isinstance(template, str) and re.search(r"\{%-?\s*generation\b", template) is not None

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Ids of each text, many at a time so that the tokenizer may use its threads."""
        if not texts:
            return []
        encoded = self._tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [np.asarray(ids, np.uint32) for ids in encoded["input_ids"]]

    def encode_chat(self, document: Document) -> tuple[Tokens, NDArray[np.uint8]]:
        """Rendered by the chat template; the mask covers the assistant's words where the template marks them, else everything.

        Raises:
            RequestError: the tokenizer has no chat template.
            ChatRefused: the template refuses the messages.
        """
        from jinja2 import TemplateError

        if not self._tokenizer.chat_template:
            raise RequestError(
                "the model's tokenizer has no chat template",
                field="data.messages_field",
                remedy="Add chat_template.jinja to the model folder, or use prompt_field and completion_field",
            )
        try:
            encoded = self._tokenizer.apply_chat_template(
                document.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=self.chat_has_assistant_mask
            )
        except (TemplateError, TypeError, KeyError, ValueError) as exc:
            raise ChatRefused(f"the chat template refuses the messages: {exc}") from exc
        ids = np.asarray(encoded["input_ids"], np.uint32)
        mask = np.asarray(encoded["assistant_masks"], np.uint8) if self.chat_has_assistant_mask else np.ones(ids.size, np.uint8)
        return ids, mask


def make_encoder(tokenizer_source: str) -> Encoder:
    """The encoder of a model source; nothing heavy is imported for presets.

    Raises:
        RequestError: no such preset or folder, or no usable tokenizer in it.
    """
    if is_preset(tokenizer_source):
        return ByteEncoder()
    from mem_core.runtime.models.build import load_tokenizer

    return HuggingFaceEncoder(load_tokenizer(tokenizer_source))
