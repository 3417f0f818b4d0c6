"""The loggers that write files of the run's own: compressed columns, which MEM reads back, and TensorBoard."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mem_core.domain.events import Evaluated
from mem_core.domain.results.samples import StepSamples
from mem_core.domain.run import RunStatus
from mem_core.infrastructure.telemetry.markdown import sample_markdown
from mem_core.infrastructure.telemetry.metrics import (
    Columns,
    discard_metrics_after,
    figures_of,
    write_evaluation_metrics,
    write_segment_metrics,
)
from mem_core.infrastructure.telemetry.tensorboard import TensorBoardWriter


@dataclass(frozen=True)
class NpzLogger:
    """`metrics/step-N.npz`, a file a segment: what report, comparison and other loggers are made from."""

    folder: Path
    name: str = "npz"

    def rewind(self, step: int) -> None:
        """Files of segments that end beyond `step` go."""
        discard_metrics_after(self.folder, step)

    def segment(self, to_step: int, columns: Columns, memory_limit_bytes: int) -> None:
        """One file."""
        write_segment_metrics(self.folder, to_step, columns)

    def evaluations(self, evaluations: Sequence[Evaluated]) -> None:
        """One file for all of them."""
        write_evaluation_metrics(self.folder, evaluations)

    def samples(self, samples: Sequence[StepSamples]) -> None:
        """Texts are no figures."""

    def end(self, status: RunStatus, texts: dict[str, str]) -> str:
        """Nothing is kept back."""
        return ""


@dataclass(frozen=True)
class TensorBoardLogger:
    """Its own record tells TensorBoard to drop steps that are done again."""

    writer: TensorBoardWriter
    name: str = "tensorboard"

    def rewind(self, step: int) -> None:
        """What TensorBoard has beyond it goes with whatever is written next."""
        self.writer.rewind(step)

    def segment(self, to_step: int, columns: Columns, memory_limit_bytes: int) -> None:
        """Thinned."""
        self.writer.add_segment(columns, memory_limit_bytes)

    def evaluations(self, evaluations: Sequence[Evaluated]) -> None:
        """The new one."""
        self.writer.add_evaluation(evaluations[-1].step, figures_of(evaluations[-1]))

    def samples(self, samples: Sequence[StepSamples]) -> None:
        """The new ones, a text for each prompt."""
        newest = samples[-1]
        texts = {f"samples/{number}": sample_markdown(sample) for number, sample in enumerate(newest.samples, start=1)}
        self.writer.add_texts(texts, newest.step)

    def end(self, status: RunStatus, texts: dict[str, str]) -> str:
        """Nothing is kept back."""
        return ""
