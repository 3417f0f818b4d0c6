"""Draws for `generate` that depend on seed, row and position alone, in the form that transformers takes.

Transformers draws for a whole batch from one generator, so that an answer would depend on what stands beside it and on what was answered
before. Its own warpers scale and cut the scores; what is left here is the choice: one token of each row is left possible.
"""

import torch
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from mem_core.core.inference.draws import draw
from mem_core.domain.results.generation import Sampling


class SeededChoice(LogitsProcessor):
    """Leaves of each row's scores [rows, vocabulary] the one that was drawn, by the inverse of their cumulated shares in float64."""

    def __init__(self, seed: int, rows: tuple[int, ...], prompt_length: int) -> None:
        self._seed, self._rows, self._prompt_length = seed, rows, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """As transformers calls it for each new token. `input_ids` [rows, tokens so far]."""
        position = input_ids.shape[1] - self._prompt_length
        sums = scores.double().softmax(dim=-1).cumsum(dim=-1)
        draws = [[draw(self._seed, row, position)] for row in self._rows]
        at = torch.tensor(draws, dtype=torch.float64, device=scores.device) * sums[:, -1:]
        chosen = torch.searchsorted(sums, at, right=True).clamp(max=scores.shape[1] - 1)
        left = torch.full_like(scores, -torch.inf)
        return left.scatter(1, chosen, 0.0)


def processors(sampling: Sampling, rows: tuple[int, ...], prompt_length: int) -> LogitsProcessorList:
    """What stands between a model's scores and the largest of them, which is taken. Nothing at temperature 0."""
    if sampling.temperature == 0:
        return LogitsProcessorList()
    found: list[LogitsProcessor] = []
    if sampling.temperature != 1:
        found.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_p < 1:
        found.append(TopPLogitsWarper(sampling.top_p))
    return LogitsProcessorList([*found, SeededChoice(sampling.seed, rows, prompt_length)])
