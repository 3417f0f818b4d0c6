"""Prompts to token ids as training makes them, up to where the answer begins; and answers back to text."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from mem_core.domain.errors import DataError, RequestError
from mem_core.runtime.data.chat.conversation import ChatRefused
from mem_core.runtime.data.encoding.huggingface import HuggingFaceEncoder, usable
from mem_core.runtime.data.encoding.joining import CannotBeCut, Tokens
from mem_core.runtime.data.reading.messages import plain_message
from mem_core.runtime.inference.prompt_rows import Prompt

ROWS_AT_ONCE = 512


class PromptEncoder(HuggingFaceEncoder):
    """A tokenizer, presets' bytes included, as answering needs it."""

    def prompts(self, prompts: Iterable[Prompt]) -> Iterator[Tokens]:
        """Ids of each prompt, in order: text after the token that begins documents, chats by the template up to the answer.

        Raises:
            RequestError: a chat, and the tokenizer has no template. DataError: the template refuses a chat.
        """
        waiting, number = iter(prompts), 0
        while block := list(islice(waiting, ROWS_AT_ONCE)):
            texts = iter(self._texts([prompt.text for prompt in block if not prompt.messages]))
            for prompt in block:
                yield self._chat(prompt, number) if prompt.messages else next(texts)
                number += 1

    def answer(self, tokens: Sequence[int]) -> str:
        """The text of an answer, without special tokens."""
        with usable():
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _texts(self, texts: list[str]) -> list[Tokens]:
        try:
            return [np.concatenate([np.asarray(self.prefix, np.uint32), ids]) for ids in self.encode(texts)]
        except CannotBeCut as exc:
            raise DataError(f"a prompt is too long for this tokenizer: {exc}", field="--prompts", remedy="Shorten it.") from exc

    def _chat(self, prompt: Prompt, row: int) -> Tokens:
        if not self._tokenizer.chat_template:
            raise RequestError(
                "the model's tokenizer has no chat template, and rows hold messages",
                field="MODEL_OR_RUN",
                remedy="Add chat_template.jinja to the model folder, or give prompts as text.",
            )
        options: dict[str, Any] = {"tools": list(prompt.tools)} if prompt.tools else {}
        messages = [plain_message(message) for message in prompt.messages]
        try:
            return np.asarray(self._render(messages, add_generation_prompt=True, **options)["input_ids"], np.uint32)
        except ChatRefused as exc:
            raise DataError(f"row {row + 1:,}: {exc}", field="--prompts", remedy="Mend the row, or give its prompt as text.") from exc


def checked(prompts: Sequence[Tokens], new_tokens: int, max_positions: int | None, vocab_size: int) -> None:
    """Raises DataError: rows that no answer can be made for, the first ten with their reasons."""
    bad: list[str] = []
    for row, prompt in enumerate(prompts, start=1):
        if not prompt.size:
            bad.append(f"row {row} has no tokens")
        elif max_positions is not None and prompt.size + new_tokens > max_positions:
            bad.append(f"row {row} has {prompt.size:,} tokens, which with {new_tokens:,} new ones are more than {max_positions:,}")
        elif int(prompt.max()) >= vocab_size:
            bad.append(f"row {row} has token {int(prompt.max()):,}, for which the model has no embedding")
    if bad:
        more = f" and {len(bad) - 10:,} more" if len(bad) > 10 else ""
        raise DataError(
            f"{'; '.join(bad[:10])}{more}", field="--prompts", bound=f"1 to {max_positions or 'any number of'} tokens with the new ones",
            remedy="Shorten these rows or leave them out, or lower --max-new-tokens.",
        )  # fmt: skip
