"""What mixtures of experts add to their loss so that no expert is left idle, row by row.

The library computes it over all tokens of one forward pass, padding included where nothing says what that is: a loss that is not a sum
over rows, and another one for every split of a batch. Here it is the library's formula over the real tokens of one row; a batch
weights its rows by their trained tokens, as it does for the rest of the loss. A batch of one whole row gives what the library gives.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mem_core.domain.errors import InternalError
from mem_core.infrastructure.storage.reading import read_regular_text
from mem_core.runtime.models.configuration import LIMIT_BYTES

if TYPE_CHECKING:
    import torch

_FORMULA = "load_balancing_loss_func"
_COEFFICIENT = "router_aux_loss_coef"
_ARGUMENTS = ("gate_logits", "num_experts", "top_k", "attention_mask")  # some compute another thing under the same name
_NUMBERS = ("num_experts", "num_experts_per_tok")


def is_computable(model_type: str) -> bool:
    """Whether the library's model of this type adds a loss that can be computed row by row. Read from its source: importing takes
    seconds."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None or not model_type.isidentifier():
        return False
    path = Path(spec.origin).parent / "models" / model_type / f"modeling_{model_type}.py"
    try:
        source = read_regular_text(path, LIMIT_BYTES)
    except OSError:
        return False
    if not all(f"self.{name}" in source for name in (_COEFFICIENT, *_NUMBERS)) or f"def {_FORMULA}(" not in source:
        return False
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == _FORMULA]
    return [tuple(argument.arg for argument in function.args.args) for function in functions] == [_ARGUMENTS]


@dataclass(frozen=True)
class RouterLoss:
    """Load balancing over `num_experts`, of which each token is sent to `num_chosen` (Fedus et al., "Switch transformers", equations 4
    to 6), in the precision of the model or better."""

    coefficient: float
    num_experts: int
    num_chosen: int

    @classmethod
    def of(cls, module: Any) -> "RouterLoss":
        """What this model adds to its own loss. Call it where `is_computable`, of a model whose configuration asks for it.

        Raises:
            InternalError: the model has no such loss.
        """
        numbers: list[Any] = [getattr(module, name, None) for name in (_COEFFICIENT, *_NUMBERS)]
        if None in numbers or not getattr(module.config, "output_router_logits", False):
            raise InternalError(f"{type(module).__name__} gives no router loss", field="model.source", remedy="Report this as a bug.")
        coefficient, num_experts, num_chosen = numbers
        return cls(float(coefficient), int(num_experts), int(num_chosen))

    def summed(self, logits: "Sequence[torch.Tensor]", lengths: Sequence[int], weights: "torch.Tensor") -> "torch.Tensor":
        """The sum over rows of weight × coefficient × loss, a scalar. `logits`: a layer [rows × length, experts]; `lengths`: real tokens of
        each row; `weights`: [rows]."""
        return self.coefficient * (self.of_rows(logits, lengths) * weights).sum()

    def of_rows(self, logits: "Sequence[torch.Tensor]", lengths: Sequence[int]) -> "torch.Tensor":
        """The loss of each row without the coefficient, shape [rows]: experts × the sum over them of the share of tokens that are sent to
        one × the mean probability that it was given, both over all layers."""
        import torch

        device, rows = logits[0].device, len(lengths)
        sizes = torch.tensor(lengths, device=device)
        sent: Any = 0
        given: Any = 0
        for layer in logits:
            by_row = layer.reshape(rows, -1, self.num_experts)
            probabilities = (by_row if by_row.dtype == torch.float64 else by_row.float()).softmax(dim=-1)
            real = (torch.arange(by_row.shape[1], device=device) < sizes[:, None])[..., None].to(probabilities.dtype)
            chosen = probabilities.topk(self.num_chosen, dim=-1).indices
            places = torch.zeros_like(probabilities).scatter_(-1, chosen, 1.0)
            sent = sent + (places * real).sum(dim=1)
            given = given + (probabilities * real).sum(dim=1)
        tokens = (sizes * len(logits))[:, None]
        return self.num_experts * (sent / tokens * (given / tokens)).sum(dim=-1)
