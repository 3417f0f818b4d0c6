"""The port of what takes a run's figures."""

from collections.abc import Sequence
from typing import Protocol

from mem_core.domain.events import Evaluated
from mem_core.domain.results.samples import StepSamples
from mem_core.domain.run import RunStatus
from mem_core.infrastructure.telemetry.metrics import Columns


class ResultLogger(Protocol):
    """Takes figures in the order in which they are committed. Methods come from one thread at a time and return at once: what takes long
    goes on in a thread of the adapter's own.

    Every method but `end` may raise OSError, where a file cannot be written: it is said and training goes on.
    """

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    def rewind(self, step: int) -> None:
        """Work goes on from `step`: what was logged beyond it is done again and must not stand there twice. Called before any work."""
        ...

    def segment(self, to_step: int, columns: Columns, memory_limit_bytes: int) -> None:
        """The columns of a segment that was committed (`write_segment_metrics` says which)."""
        ...

    def evaluations(self, evaluations: Sequence[Evaluated]) -> None:
        """Every evaluation that counts, ascending by step; the last of them is new."""
        ...

    def samples(self, samples: Sequence[StepSamples]) -> None:
        """Answers to the run's prompts at every step that counts, ascending; the last of them are new. A model wrote them: no text of
        them is to be read as anything else."""
        ...

    def end(self, status: RunStatus, texts: dict[str, str]) -> str:
        """The attempt is over. `texts`: what else is known of it, by name. Returns what was not taken, in words; empty: everything was."""
        ...
