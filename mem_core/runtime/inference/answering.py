"""One batch of prompts through the model: padded on the left, answered by transformers' own `generate`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from mem_core.domain.results.generation import FinishReason, Sampling
from mem_core.runtime.data.encoding.joining import Tokens
from mem_core.runtime.deepspeed.objective import pad_token_for
from mem_core.runtime.inference.choosing import processors
from mem_core.runtime.inference.opening import OpenModel


class Beat(LogitsProcessor):
    """Says at each token that the batch goes on."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat = beat

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        del input_ids
        self._beat()
        return scores


class Answering:
    """`beat` is called before each token. Of generation_config.json only the stop tokens count: the rest is the order's."""

    def __init__(self, model: OpenModel, sampling: Sampling, beat: Callable[[], None]) -> None:
        self._module: Any = model.module
        self.shape = model.shape
        self.text = model.encoder.answer
        self._sampling, self._beat = sampling, Beat(beat)
        self._stop = frozenset(model.stop_tokens)
        self._pad = pad_token_for(model.module, model.encoder.pad_token_id)
        self._settings = likeliest(sampling.max_new_tokens, self._pad, model.stop_tokens)
        self._module.generation_config = self._settings  # what a folder's own file says would fill in what is left open here

    def answers(self, rows: Sequence[int], prompts: Sequence[Tokens]) -> list[tuple[list[int], FinishReason, int]]:
        """Of each row the tokens of its answer without the stop token, how it ended, and how many tokens were made for it."""
        ids, mask = padded(prompts, self._pad, self._module.device)
        length = ids.shape[1]
        chosen = LogitsProcessorList([self._beat, *processors(self._sampling, tuple(rows), length)])
        with torch.inference_mode():
            made = self._module.generate(ids, attention_mask=mask, generation_config=self._settings, logits_processor=chosen)
        return [cut_at_stop(tokens, self._stop) for tokens in made[:, length:].tolist()]


def likeliest(max_new_tokens: int, pad_token_id: int, stop_tokens: Sequence[int]) -> GenerationConfig:
    """Settings under which `generate` takes the largest score; whatever draws does so before, by leaving one score alone."""
    return GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, use_cache=True, pad_token_id=pad_token_id, eos_token_id=list(stop_tokens) or None
    )


def padded(prompts: Sequence[Tokens], pad_token_id: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask [prompts, longest], padded on the left."""
    length = max(prompt.size for prompt in prompts)
    ids = torch.full((len(prompts), length), pad_token_id, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for number, prompt in enumerate(prompts):
        ids[number, length - prompt.size :] = torch.from_numpy(prompt.astype("int64"))
        mask[number, length - prompt.size :] = 1
    return ids.to(device), mask.to(device)


def cut_at_stop(tokens: list[int], stop_tokens: frozenset[int]) -> tuple[list[int], FinishReason, int]:
    """(tokens without the stop token, how it ended, tokens made). What follows a row's stop token is padding, which may be the same."""
    at = next((place for place, token in enumerate(tokens) if token in stop_tokens), None)
    return (tokens, "length", len(tokens)) if at is None else (tokens[:at], "stop", at + 1)
