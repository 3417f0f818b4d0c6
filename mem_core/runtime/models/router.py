"""What mixtures of experts add to their loss so that no expert is left idle, row by row.

The library computes it over all tokens of one forward pass, padding included where nothing says what that is: a loss that is not a sum
over rows, and another one for every split of a batch. Here it is the library's own formula over the real tokens of one row; a batch
weights its rows by their trained tokens, as it does for the rest of the loss. A batch of one whole row gives what the library gives.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mem_core.domain.errors import InternalError

if TYPE_CHECKING:
    import torch

_FORMULA = "load_balancing_loss_func"
_COEFFICIENT = "router_aux_loss_coef"
_NUMBERS = ("num_experts", "num_experts_per_tok")


def is_computable(model_type: str) -> bool:
    """Whether the library's model of this type adds a loss that can be computed row by row. Read from its source: importing takes
    seconds."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None or not model_type.isidentifier():
        return False
    path = Path(spec.origin).parent / "models" / model_type / f"modeling_{model_type}.py"
    try:
        source = path.read_text(encoding="utf-8")
    except OSError:
        return False
    return all(f"self.{name}" in source for name in (_COEFFICIENT, *_NUMBERS)) and f"def {_FORMULA}(" in source


@dataclass(frozen=True)
class RouterLoss:
    """`formula(gate logits a layer, experts, chosen experts a token)` is the architecture's own."""

    formula: Callable[..., Any]
    coefficient: float
    num_experts: int
    num_chosen: int

    @classmethod
    def of(cls, module: Any) -> "RouterLoss":
        """What this model adds to its own loss. Call it where `is_computable`, of a model whose configuration asks for it.

        Raises:
            InternalError: the model has no such loss.
        """
        formula = getattr(sys.modules[type(module).__module__], _FORMULA, None)
        numbers = [getattr(module, name, None) for name in (_COEFFICIENT, *_NUMBERS)]
        if formula is None or None in numbers or not getattr(module.config, "output_router_logits", False):
            raise InternalError(f"{type(module).__name__} gives no router loss", field="model.source", remedy="Report this as a bug.")
        coefficient, num_experts, num_chosen = numbers
        return cls(formula, float(coefficient), int(num_experts), int(num_chosen))

    def summed(self, logits: "Sequence[torch.Tensor]", lengths: Sequence[int], weights: "torch.Tensor") -> "torch.Tensor":
        """The sum over rows of weight × loss, a scalar. `logits`: a layer [rows × length, experts]; `lengths`: real tokens of each row;
        `weights`: [rows]."""
        rows = len(lengths)
        layers = [layer.reshape(rows, -1, layer.shape[-1]) for layer in logits]
        each = [
            self.formula(tuple(layer[row, :length] for layer in layers), self.num_experts, self.num_chosen)
            for row, length in enumerate(lengths)
        ]
        return self.coefficient * sum(loss * weight for loss, weight in zip(each, weights, strict=True))  # type: ignore[return-value]
