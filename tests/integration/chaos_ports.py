"""What goes wrong inside a rank at a batch of its own choosing: callables for `WorkerSpec.on_built`, made so that they pickle."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mem_core.testing.ports import wait_for_save


@dataclass(frozen=True)
class Poison:
    """Batch `batch_index` fails each time it is done, or `times` times: "nan", "error", "kill" (SIGKILL) or "spike" (loss x 50).

    `counter` is a file that counts the failures over processes. `delay_s` passes before each, for what goes on beside the rank.
    """

    batch_index: int
    how: str
    counter: str
    times: int = 1_000
    delay_s: float = 0.0

    def __call__(self, runner: Any) -> None:
        """Stand in front of the engine's forward."""
        forward = runner.engine.forward

        def poisoned(**inputs: Any) -> Any:
            output = forward(**inputs)
            if runner.position.batch_index != self.batch_index or self.failed() >= self.times:
                return output
            if not self.delay_s:
                wait_for_save(runner, self.batch_index)
            time.sleep(self.delay_s)
            with Path(self.counter).open("a") as file:
                file.write("x")
            if self.how == "error":
                raise ValueError("a row that nobody can read")
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            output.logits = output.logits * (float("nan") if self.how == "nan" else 50.0)
            return output

        runner.engine.forward = poisoned

    def failed(self) -> int:
        """How often it has failed so far."""
        path = Path(self.counter)
        return path.stat().st_size if path.exists() else 0


@dataclass(frozen=True)
class Slow:
    """One rank computes longer in each forward."""

    rank: int
    delay_s: float

    def __call__(self, runner: Any) -> None:
        """Stand in front of that rank's forward."""
        forward = runner.engine.forward

        def slow(**inputs: Any) -> Any:
            time.sleep(self.delay_s)
            return forward(**inputs)

        if runner.place.rank == self.rank:
            runner.engine.forward = slow


@dataclass(frozen=True)
class Refuse:
    """A rank finds, once its engine is built, that it cannot train here. `counter` counts the processes that found it."""

    counter: str

    def __call__(self, runner: Any) -> None:
        """Refuse as any part of MEM does."""
        from mem_core.domain.errors import EnvironmentUnfit

        with Path(self.counter).open("a") as file:
            file.write("x")
        raise EnvironmentUnfit("no such kernel", field="model.dtype", value="float16", bound="float32", remedy="Set model.dtype: float32.")
