"""Faults that can only happen inside a rank: an engine that obeys orders from outside.

Chosen by composition (`WorkerSpec.on_built`); production code knows nothing of it. An order is a file in `<run>/orders/` that the
drill writes; the rank it names unlinks it and fails for real: an exception, a loss that is not a number, an allocation that the
kernel refuses. Whether it happened is read from what the run itself journals, never from here.
"""

import os
from pathlib import Path
from typing import Any

import torch

from mem_core.runtime.chaos.faults.faulty_names import ORDERS

IMPOSSIBLE_ELEMENTS = 1 << 50
IN_FORWARD, IN_BACKWARD, IN_STEP = "error_in_forward", "error_in_backward", "error_in_step"
NAN_BATCH, ALLOCATION = "nan_batch", "failed_allocation"


class InjectedError(RuntimeError):
    """An exception that a drill ordered."""


class OrderBox:
    """The orders for one rank. Looking costs some microseconds a step, and only under a drill."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._suffix = f".rank-{rank}"
        folder.mkdir(exist_ok=True)

    def take(self, *kinds: str) -> str | None:
        """The token of a waiting order of one of these kinds, taken once and for all."""
        for name in os.listdir(self._folder):
            token, _, rest = name.partition(".")
            if rest.endswith(self._suffix) and rest.removesuffix(self._suffix) in kinds:
                (self._folder / name).unlink()
                return token
        return None


class FaultyEngine:
    """Stands in front of the three verbs of one rank's engine: fails when it is told to, passes on otherwise."""

    def __init__(self, engine: Any, orders: OrderBox) -> None:
        self._orders = orders
        self._forward, self._backward, self._step = engine.forward, engine.backward, engine.step
        engine.forward, engine.backward, engine.step = self.forward, self.backward, self.step

    def forward(self, **inputs: torch.Tensor) -> Any:
        """Forward, or a failure in it."""
        if token := self._orders.take(IN_FORWARD):
            raise InjectedError(f"{token} in forward")
        if self._orders.take(ALLOCATION):
            torch.empty(IMPOSSIBLE_ELEMENTS)
        output = self._forward(**inputs)
        if self._orders.take(NAN_BATCH):
            output.logits = output.logits * float("nan")
        return output

    def backward(self, loss: torch.Tensor) -> None:
        """Backward; the failure comes when gradients have been accumulated."""
        self._backward(loss)
        if token := self._orders.take(IN_BACKWARD):
            raise InjectedError(f"{token} in backward")

    def step(self) -> bool:
        """The update; the failure comes after this rank has applied it, which is the worst moment."""
        applied = self._step()
        if token := self._orders.take(IN_STEP):
            raise InjectedError(f"{token} in step")
        return applied


def make_faulty(runner: Any) -> None:
    """Have a built runner's engine obey orders."""
    folder = Path(runner.place.heartbeat_path).parents[3] / ORDERS
    FaultyEngine(runner.engine, OrderBox(folder, runner.place.rank))
