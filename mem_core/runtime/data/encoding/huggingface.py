"""Hugging Face tokenizers: ids of whole texts in bounded memory, chats by their template."""

import contextlib
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mem_core.domain.environment import DataRemark
from mem_core.domain.errors import MemError, RequestError
from mem_core.domain.request import DataSection
from mem_core.runtime.data.chat.conversation import ChatRefused, Conversation
from mem_core.runtime.data.chat.encode import Chats
from mem_core.runtime.data.chat.rendering import marks_words
from mem_core.runtime.data.chat.turns import common
from mem_core.runtime.data.encoding.joining import CannotBeCut, Cutting, JoinedText, Spans, Tokens
from mem_core.runtime.data.encoding.parts import CutByOffsets, CutWhereSeamsHold, PartedText
from mem_core.runtime.data.reading.rows import Document
from mem_core.runtime.models.encoding import CURRENT_RULES
from mem_core.runtime.models.folders import local_model_folder

# Some templates write today's date into the text: rows would have other tokens tomorrow, and a run could not go on with them. This is
# the day that Llama 3's own template falls back on. Functions cannot be handed to a template, macros of its own can be.
_TEMPLATE_DAY = datetime(2024, 7, 26)
_DATE_PARTS = "aAbBdHIjmMpSUwWxXyYz"


class HuggingFaceEncoder:
    """A Hugging Face tokenizer. A missing pad token is no obstacle, since padding is masked by position: the end token pads."""

    def __init__(
        self,
        tokenizer: Any,
        notes: tuple[DataRemark, ...] = (),
        rules: int = CURRENT_RULES,
        cutting: Cutting = Cutting(),  # noqa: B008 - frozen
    ) -> None:
        self._tokenizer = tokenizer
        self._cutting = cutting
        self._has_offsets = bool(getattr(tokenizer, "is_fast", False))
        self.runs_beside = self._has_offsets
        self._backend = _plain_backend(tokenizer)
        self.identity = {"class": type(tokenizer).__name__}
        self.vocab_size: int = len(tokenizer)
        self.eos_token_id: int | None = tokenizer.eos_token_id
        pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, 0)
        self.pad_token_id: int = next(int(pad) for pad in pads if pad is not None)
        first = tokenizer("a").input_ids[:1]
        self.prefix: tuple[int, ...] = tuple(first) if first and first[0] == tokenizer.bos_token_id else ()
        template = _template_of(tokenizer, rules)
        self.chat_has_assistant_mask = marks_words(template)
        fixed_day = rules > 1 and "strftime_now" in template
        self._template: dict[str, str] = {"chat_template": _with_fixed_day(template)} if fixed_day else {}
        self._chats = Chats(tokenizer, template, self._template)
        text = f"the chat template writes the day; each row says {_TEMPLATE_DAY:%d %b %Y}, so that its tokens stay the same"
        self.notes = (*notes, *((DataRemark(check="data.chat_day", severity="notice", text=text),) if fixed_day else ()))

    @classmethod
    def of_folder(cls, source: str, rules: int) -> "HuggingFaceEncoder":
        """The tokenizer of a model folder, with a note where its class and its own tokenizer.json disagree.

        Raises:
            RequestError: no such folder, or no usable tokenizer in it.
        """
        from mem_core.runtime.models.build import load_tokenizer
        from mem_core.runtime.models.own_tokenizer import disagreement

        tokenizer = load_tokenizer(source)
        with usable():
            found = disagreement(tokenizer, local_model_folder(source))
        remedy = "Set the tokenizer_class of the folder's tokenizer_config.json to the one that the file was made for."
        told = DataRemark(check="tokenizer.class", severity="warning", text=found, remedy=remedy)
        with usable():
            return cls(tokenizer, (told,) if found else (), rules)

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Ids of each text, many at a time so that the tokenizer may use its threads. Raises CannotBeCut."""
        short = iter(self._ids([text for text in texts if self._is_short(text)]))
        return [next(short) if self._is_short(text) else self._long(text) for text in texts]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[Tokens, int]]:
        """A token that holds the end of a prompt and the beginning of its completion counts as completion. Raises CannotBeCut."""
        texts = [prompt + completion for prompt, completion in pairs]
        if not self._has_offsets:
            prompts = self.encode([prompt for prompt, _ in pairs])
            return [(whole, common(whole, prompt)) for whole, prompt in zip(self.encode(texts), prompts, strict=True)]
        short = iter(self._spans([text for text in texts if self._is_short(text)]))
        found = [next(short) if self._is_short(text) else JoinedText(self._spans, self._cutting).add(text, last=True) for text in texts]
        return [
            (spans.ids, int(np.searchsorted(spans.ends, len(prompt), side="right")))
            for spans, (prompt, _) in zip(found, pairs, strict=True)
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        """As the tokenizer decodes, nothing left out and nothing tidied."""
        with usable():
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def parted(self) -> PartedText:
        """Joined by offsets where the tokenizer has them."""
        return CutByOffsets(self._spans, self._cutting) if self._has_offsets else CutWhereSeamsHold(self._ids, self._cutting)

    def _is_short(self, text: str) -> bool:
        return len(text) <= self._cutting.window_chars

    def _long(self, text: str) -> Tokens:
        if self._has_offsets:
            return JoinedText(self._spans, self._cutting).add(text, last=True).ids
        if len(text) > self._cutting.most_whole_chars:
            raise CannotBeCut(f"{len(text)} characters, which this tokenizer does not let be cut")
        return self._ids([text])[0]

    def _ids(self, texts: Sequence[str]) -> list[Tokens]:
        if not texts:
            return []
        if self._backend is None:
            return [np.asarray(ids, np.uint32) for ids in self._encoded(texts)["input_ids"]]
        with usable():
            # What the tokenizer's own call sets before it asks the same of its backend, less everything but ids.
            self._backend.no_truncation()
            self._backend.no_padding()
            self._backend.encode_special_tokens = bool(getattr(self._tokenizer, "split_special_tokens", False))
            return [np.asarray(found.ids, np.uint32) for found in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _spans(self, texts: Sequence[str]) -> list[Spans]:
        if not texts:
            return []
        encoded = self._encoded(texts, return_offsets_mapping=True)
        bounds = [np.asarray(offsets, np.int64).reshape(-1, 2) for offsets in encoded["offset_mapping"]]
        return [
            Spans(np.asarray(ids, np.uint32), offsets[:, 0], offsets[:, 1])
            for ids, offsets in zip(encoded["input_ids"], bounds, strict=True)
        ]

    def _encoded(self, texts: Sequence[str], **options: Any) -> Any:
        with usable():
            return self._tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False, **options)

    def encode_chat(self, document: Document) -> tuple[Tokens, NDArray[np.uint8]]:
        """Rendered by the chat template; the mask covers the assistant's words where the template marks them, else everything.

        Raises:
            RequestError: the tokenizer has no chat template.
            ChatRefused: the template refuses the messages.
        """
        if not self._tokenizer.chat_template:
            raise RequestError(
                "the model's tokenizer has no chat template",
                field="data.messages_field",
                remedy="Add chat_template.jinja to the model folder, or use prompt_field and completion_field",
            )
        encoded = self._render(document.messages, return_assistant_tokens_mask=self.chat_has_assistant_mask)
        ids = np.asarray(encoded["input_ids"], np.uint32)
        mask = np.asarray(encoded["assistant_masks"], np.uint8) if self.chat_has_assistant_mask else np.ones(ids.size, np.uint8)
        return ids, mask

    def encode_turns(self, document: Document, data: DataSection) -> Conversation:
        """The whole rendering and what of it is trained. Raises RequestError: no chat template. ChatRefused."""
        return self._chats.encode(document, data)

    def encode_chats(self, documents: Sequence[Document], data: DataSection) -> list[Conversation | ChatRefused]:
        """The same of many rows. Raises RequestError: no chat template."""
        return self._chats.encode_many(documents, data)

    def chat_answer_start(self, document: Document, tokens: Tokens) -> int:
        """The tokens that the conversation shares with itself rendered up to where its last answer is due; 0 where that is no chat."""
        messages = document.messages or []
        before = messages[:-1]
        if not before:
            return 0
        try:
            rendered = self._render(before, add_generation_prompt=True)
        except ChatRefused:
            return 0
        return common(tokens, np.asarray(rendered["input_ids"], np.uint32))

    def _render(self, messages: list[dict[str, Any]] | None, **options: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **self._template, **options)
        except (TemplateError, TypeError, KeyError, ValueError) as exc:
            raise ChatRefused(f"the chat template refuses the messages: {exc}") from exc


def _plain_backend(tokenizer: Any) -> Any:
    """The Rust tokenizer behind one of transformers', where its class adds nothing on the way there; None where it may."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    through = ("__call__", "_encode_plus", "_batch_encode_plus", "prepare_for_tokenization")
    same = all(getattr(kind, name, None) is getattr(PreTrainedTokenizerFast, name, None) for name in through)
    return tokenizer.backend_tokenizer if isinstance(tokenizer, PreTrainedTokenizerFast) and same else None


@contextlib.contextmanager
def usable() -> Iterator[None]:
    """A tokenizer that loads may still not encode, as one without its unknown token; its library's errors have no class of their own.

    Raises:
        RequestError: instead of whatever the library raised.
    """
    try:
        yield
    except (MemError, MemoryError):
        raise
    except Exception as exc:
        raise RequestError(
            f"the tokenizer cannot encode text: {type(exc).__name__}: {' '.join(str(exc).split())[:300]}",
            field="model.source",
            remedy="Mend the tokenizer's files: a token that its configuration names may be missing from its vocabulary",
        ) from exc


def _template_of(tokenizer: Any, rules: int) -> str:
    """The text of the template that chats are rendered by; a tokenizer may hold several under names."""
    template = tokenizer.chat_template
    if isinstance(template, dict) and rules > 1:
        template = template.get("default")
    return template if isinstance(template, str) else ""


def _with_fixed_day(template: str) -> str:
    parts = "".join(f"|replace('%{part}', '{_TEMPLATE_DAY.strftime(f'%{part}')}')" for part in _DATE_PARTS)
    return f"{{% macro strftime_now(format) %}}{{{{ format{parts} }}}}{{% endmacro %}}{template}"
