"""The closed set of passes that a model is compiled for, before any rank exists.

torch keeps a list of compiled versions of a function and takes the first whose conditions hold. Left to itself it makes them from the
shapes that come along, so that the kernels for a shape depend on which shapes came before it, and a run that goes on from a
checkpoint may differ in its last bits from one that never stopped. Here each version is made once, in this order, from these sizes, with
every dimension left open that can be; whatever comes later makes no new one. The versions exclude each other (one row, or more; with a
mask, or without; with places of documents, or without), so which of them takes a pass follows from the pass alone.
"""

from dataclasses import dataclass

import torch

LENGTH = 48
ROWS = 3


@dataclass(frozen=True, slots=True)
class CanonicalPass:
    """Sizes of a pass to compile for. `rows` and `length` differ, since torch takes equal sizes to be equal for good."""

    rows: int
    length: int
    padded: bool = False
    apart: bool = False

    @property
    def words(self) -> str:
        """For a progress line: `one row, padded`."""
        kind = "documents apart" if self.apart else "padded" if self.padded else "full"
        return f"{'one row' if self.rows == 1 else 'several rows'}, {kind}"

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, dict[str, torch.Tensor | bool]]:
        """(labels, inputs of the model), of small token ids that every vocabulary has."""
        tokens = torch.zeros((self.rows, self.length), dtype=torch.int64, device=device)
        inputs: dict[str, torch.Tensor | bool] = {"input_ids": tokens}
        if self.padded:
            mask = torch.ones_like(tokens)
            mask[-1, -1] = 0
            inputs["attention_mask"] = mask
        if self.apart:
            places = torch.arange(self.length, device=device) % max(1, self.length // 2)
            inputs |= {"position_ids": places.expand(self.rows, -1).contiguous(), "use_cache": False}
        return tokens.clone(), inputs


def canonical_passes(most_rows: int, sequence_length: int, *, apart: bool) -> tuple[CanonicalPass, ...]:
    """What a rank of a run can meet: `most_rows` rows in a pass at most, of at most `sequence_length` tokens each."""
    length = min(LENGTH, sequence_length)
    several = ROWS if length != ROWS else ROWS + 2
    rows = (several, 1) if most_rows > 1 else (1,)
    kinds = ((False, True),) if apart else ((False, False), (True, False))
    return tuple(CanonicalPass(each, length, padded, documents) for padded, documents in kinds for each in rows)
