"""Answers to a run's fixed prompts from the model that is being trained, inside its ranks: plain torch, nothing of training is touched.

Both answers to a prompt come from one batch: its first half takes the likeliest token, its second half a draw from seed, row and position
(`choosing.py`), so that neither depends on what was drawn before or elsewhere.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from mem_core.domain.results.generation import Sampling
from mem_core.domain.results.samples import Sample, SampleOrder
from mem_core.runtime.deepspeed.objective import pad_token_for
from mem_core.runtime.inference.answering import Beat, cut_at_stop, likeliest, padded
from mem_core.runtime.inference.choosing import processors
from mem_core.runtime.inference.opening import Source, stop_tokens
from mem_core.runtime.inference.prompt_encoder import PromptEncoder
from mem_core.runtime.models.build import load_tokenizer
from mem_core.runtime.ranks.worker.classify import memory_kind
from mem_core.runtime.ranks.worker.device import LocalDevice

PROMPTS_AT_ONCE = 8
Alike = Callable[[torch.Tensor], torch.Tensor]
"""Makes the chosen tokens [rows] of this rank those of every rank."""


def chosen_by_rank_0(chosen: torch.Tensor) -> torch.Tensor:
    """Where ranks hold parts of one model, a token that one of them chose otherwise would leave the others waiting for ever."""
    torch.distributed.broadcast(chosen, 0)
    return chosen


class _Halves(LogitsProcessor):
    """Leaves one token of each row possible: of the first half the likeliest, of the second half the one that is drawn."""

    def __init__(self, drawing: LogitsProcessorList, alike: Alike) -> None:
        self._drawing, self._alike = drawing, alike

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        half = scores.shape[0] // 2
        drawn = scores[half:]
        for processor in self._drawing:
            drawn = processor(input_ids[half:], drawn)
        chosen = self._alike(torch.cat((scores[:half], drawn)).argmax(dim=-1))
        return torch.full_like(scores, -torch.inf).scatter(1, chosen[:, None], 0.0)


class PromptSampling:
    """The prompts of one run in one rank. `in_step`: every rank makes the same passes, and a failure is not retried here."""

    def __init__(self, order: SampleOrder, module: Any, device: LocalDevice, *, in_step: bool = False) -> None:
        self._order, self._module, self._device, self._in_step = order, module, device, in_step
        self._encoder = PromptEncoder(load_tokenizer(order.source))
        self._stop = frozenset(stop_tokens(Source.of(order.source), module, self._encoder))
        self._pad = pad_token_for(module, self._encoder.pad_token_id)
        self._prompts = [np.asarray(prompt.tokens, np.uint32) for prompt in order.prompts]

    def run(self, most_tokens: int, beat: Callable[[], None]) -> tuple[Sample, ...]:
        """Both answers to every prompt, in their order. A pass has at most `most_tokens` padded tokens, one prompt is always allowed;
        what does not fit makes these passes smaller. `beat` is called before each token.

        The model is in evaluation mode already. The random state of training is left as it was, and so are the model's own settings.
        """
        found: dict[int, Sample] = {}
        waiting = sorted(range(len(self._prompts)), key=lambda row: (-self._prompts[row].size, row))
        most_prompts = PROMPTS_AT_ONCE
        with _settings_kept(self._module), self._random_state_kept(), torch.no_grad():
            while waiting:
                length = self._prompts[waiting[0]].size + self._order.max_new_tokens
                rows = waiting[: max(1, min(most_prompts, most_tokens // (2 * length)))]
                try:
                    found |= self._answered(rows, beat)
                    waiting = waiting[len(rows) :]
                except Exception as exc:
                    if self._in_step or memory_kind(exc) is None or len(rows) == 1:
                        raise
                    traceback.clear_frames(exc.__traceback__)  # they hold keys, values and activations
                    most_prompts = len(rows) // 2
                    self._device.release_free_memory()
        return tuple(found[row] for row in sorted(found))

    def _answered(self, rows: Sequence[int], beat: Callable[[], None]) -> dict[int, Sample]:
        ids, mask = padded([self._prompts[row] for row in (*rows, *rows)], self._pad, self._device.torch_device)
        length, order = ids.shape[1], self._order
        sampling = Sampling(max_new_tokens=order.max_new_tokens, temperature=order.temperature, seed=order.seed)
        halves = _Halves(processors(sampling, tuple(rows), length), chosen_by_rank_0 if self._in_step else lambda chosen: chosen)
        settings = likeliest(order.max_new_tokens, self._pad, sorted(self._stop))
        self._module.generation_config = settings  # what a folder's own file says would fill in what is left open here
        made = self._module.generate(
            ids, attention_mask=mask, generation_config=settings, logits_processor=LogitsProcessorList([Beat(beat), halves])
        )
        answers = [cut_at_stop(tokens, self._stop) for tokens in made[:, length:].tolist()]
        pairs = zip(rows, answers[: len(rows)], answers[len(rows) :], strict=True)
        return {
            row: Sample(
                prompt=order.prompts[row].shown, greedy=self._encoder.answer(greedy[0]), sampled=self._encoder.answer(sampled[0]),
                greedy_finish=greedy[1], sampled_finish=sampled[1],
            )
            for row, greedy, sampled in pairs
        }  # fmt: skip

    @contextmanager
    def _random_state_kept(self) -> Iterator[None]:
        device = self._device.torch_device
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
            yield


@contextmanager
def _settings_kept(module: Any) -> Iterator[None]:
    kept = module.generation_config
    try:
        yield
    finally:
        module.generation_config = kept
