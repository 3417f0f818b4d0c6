"""Which encoder a model source has, and the one for bytes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mem_core.domain.environment import DataRemark
from mem_core.domain.errors import RequestError
from mem_core.domain.request import DataSection
from mem_core.runtime.data.chat.conversation import ChatRefused, Conversation
from mem_core.runtime.data.encoding.encoder import Encoder
from mem_core.runtime.data.encoding.joining import Tokens
from mem_core.runtime.data.encoding.parts import CutAnywhere, PartedText
from mem_core.runtime.data.reading.rows import Document
from mem_core.runtime.models.encoding import CURRENT_RULES
from mem_core.runtime.models.folders import is_preset
from mem_core.runtime.models.presets import BYTE_EOS_TOKEN_ID, BYTE_OFFSET, BYTE_PAD_TOKEN_ID, BYTE_VOCAB_SIZE


class ByteEncoder:
    """Token = byte + 3, as `transformers.ByT5Tokenizer` does; text that looks like a special token stays text."""

    vocab_size = BYTE_VOCAB_SIZE
    pad_token_id = BYTE_PAD_TOKEN_ID
    eos_token_id: int | None = BYTE_EOS_TOKEN_ID
    prefix: tuple[int, ...] = ()
    chat_has_assistant_mask = False
    identity: dict[str, str] = {}
    notes: tuple[DataRemark, ...] = ()
    runs_beside = False

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Ids of each text's UTF-8 bytes."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) + np.uint32(BYTE_OFFSET) for text in texts]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[Tokens, int]]:
        """Bytes know no neighbours: the two end to end."""
        prompts, completions = self.encode([prompt for prompt, _ in pairs]), self.encode([completion for _, completion in pairs])
        return [(np.concatenate(both), both[0].size) for both in zip(prompts, completions, strict=True)]

    def decode(self, tokens: Sequence[int]) -> str:
        """The bytes as text, what is none replaced; special tokens by the names that ByT5 gives them."""
        names = {BYTE_PAD_TOKEN_ID: b"<pad>", BYTE_EOS_TOKEN_ID: b"</s>"}
        raw = b"".join(bytes([token - BYTE_OFFSET]) if 0 <= token - BYTE_OFFSET < 256 else names.get(token, b"<unk>") for token in tokens)
        return raw.decode("utf-8", "replace")

    def parted(self) -> PartedText:
        """Each part by itself."""
        return CutAnywhere(self.encode)

    def encode_chat(self, document: Document) -> tuple[Tokens, NDArray[np.uint8]]:
        """Raises RequestError: bytes have no chat template."""
        raise RequestError(
            "the byte tokenizer of presets has no chat template",
            field="data.messages_field",
            remedy="Use a model folder with a chat template, or prompt_field and completion_field",
        )

    def encode_turns(self, document: Document, data: DataSection) -> Conversation:
        """Raises RequestError: bytes have no chat template."""
        raise RequestError(
            "the byte tokenizer of presets has no chat template",
            field="data.messages_field" if data.messages_field else "data.prompt_field",
            remedy="Use a model folder with a chat template, or give prompts and completions as text",
        )

    def encode_chats(self, documents: Sequence[Document], data: DataSection) -> list[Conversation | ChatRefused]:
        """Raises RequestError: bytes have no chat template."""
        return [self.encode_turns(document, data) for document in documents]

    def chat_answer_start(self, document: Document, tokens: Tokens) -> int:
        """Bytes have no chats."""
        return 0


def make_encoder(tokenizer_source: str, rules: int = CURRENT_RULES) -> Encoder:
    """The encoder of a model source; nothing heavy is imported for presets.

    Raises:
        RequestError: no such preset or folder, or no usable tokenizer in it.
    """
    if is_preset(tokenizer_source):
        return ByteEncoder()
    from mem_core.runtime.data.encoding.huggingface import HuggingFaceEncoder

    return HuggingFaceEncoder.of_folder(tokenizer_source, rules)
