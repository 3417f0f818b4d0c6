"""What supervisor and rank say to each other over the control connection: small plain values, both sides ours."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.events import MemoryPlanChanged, Noted, OomAbsorbed
from mem_core.domain.plan import Hyperparams, MemoryPlan
from mem_core.domain.request import VALIDATION, RuntimeRequest
from mem_core.domain.results.evaluation import SetFigures
from mem_core.domain.results.samples import Sample, SampleOrder
from mem_core.domain.segment import SegmentFailure


@dataclass(frozen=True)
class WorkerSpec:
    """What a run is, the same for each of its ranks; where one of them stands is its `RankPlace`. A rank is sent both, once, first.

    `on_built`, a function or its "module:function", is called in the rank with the runner after each build: the port for
    measurements and for faults from outside.
    """

    request: RuntimeRequest
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16", "float16"]
    num_threads: int
    data_folder: str
    validation_folder: str | None
    pad_token_id: int
    default_plan: MemoryPlan
    evaluation_folders: dict[str, str] = field(default_factory=dict[str, str])
    """Rows of the sets that the request names, in its order."""
    deadline_s: float = 600.0
    on_built: str | Callable[[Any], None] = ""
    allocator_setting: str = ""
    """For a device's caching allocator, in torch's words; empty: as the environment says. Set after fragmentation."""
    router_loss: bool = False
    """Whether what the model adds to its own loss is trained on: runs that were born without it go on without it."""
    compiled: bool = False
    """Whether passes are computed by the compiled loss that ranks are born with."""
    samples: SampleOrder | None = None
    """The prompts that are answered between segments; None where there are none."""
    most_steps: int | None = None
    """A process that has done so many steps ends its segment and is replaced. Set after one that grew until it was ended."""

    @property
    def evaluation_sets(self) -> dict[str, str]:
        """Name -> folder of rows of every set to evaluate; the first one decides what is best."""
        held_out = {VALIDATION: self.validation_folder} if self.validation_folder is not None else {}
        return held_out | self.evaluation_folders

    def built(self, runner: Any) -> None:
        """Hand a runner that was just built to `on_built`, where there is one."""
        port = self.on_built
        if isinstance(port, str) and port:
            module, _, function = port.partition(":")
            port = getattr(importlib.import_module(module), function)
        if callable(port):
            port(runner)

    @property
    def num_ranks(self) -> int:
        """Ranks that train together."""
        return self.request.parallel.num_ranks


@dataclass(frozen=True)
class Restore:
    """Build the engine and take the state of a checkpoint folder, or start at step 0 when `folder` is None."""

    folder: str | None
    position: TrainingPosition
    replay_until: int = 0
    """Batches below it were done before under recorded plans: memory does not change the plan there of its own accord."""


@dataclass(frozen=True)
class Recorded:
    """What rank 0 asked to record is in the journal, durably."""


@dataclass(frozen=True)
class Train:
    """Train until `until_step` applied updates, then snapshot the state into `staging` (None: no save)."""

    until_step: int
    hyperparams: Hyperparams
    staging: str | None
    every_s: float | None = None
    skip_batches: tuple[int, ...] = ()
    replay_of: int | None = None
    """Report the first steps early: they are what a replay of the checkpoint of this step must come to again."""


@dataclass(frozen=True)
class Evaluate:
    """Figures of every set of held-out rows, of at most `max_rows` of each, in passes of at most `most_tokens` padded tokens."""

    max_rows: int | None = None
    most_tokens: int | None = None


@dataclass(frozen=True)
class AnswerPrompts:
    """Both answers to every prompt of `WorkerSpec.samples`, in passes of at most `most_tokens` padded tokens."""

    most_tokens: int | None = None


@dataclass(frozen=True)
class Stop:
    """End the process in good order."""


@dataclass(frozen=True)
class Ready:
    """The engine is built and stands at a position."""

    applied_steps: int
    parameters: dict[str, tuple[int, ...]]
    build_s: float
    restore_s: float


@dataclass(frozen=True)
class SegmentDone:
    """Steps were applied and the snapshot was taken; files follow with `Saved`. `columns` only from rank 0."""

    position: TrainingPosition
    interrupted: bool
    duration_s: float
    save_stall_s: float
    columns: dict[str, Any] = field(default_factory=dict)
    uncompiled_passes: int = 0
    """Of a run that is compiled: how many passes were not, since no compiled version fitted them."""
    replace_reason: str = ""
    """Why the workers should be replaced before the next segment (a leak); empty: they go on."""


@dataclass(frozen=True)
class Saved:
    """This rank's files are on disk (not yet synced or hashed), or why not."""

    step: int
    error: str = ""
    errno: int | None = None
    weights_digest: str = ""
    duration_s: float = 0.0


@dataclass(frozen=True)
class ReplayEvidence:
    """The first steps after the checkpoint of `step`: what they ran with and what came out, summed over ranks."""

    step: int
    hyperparams: Hyperparams
    losses: tuple[float, ...]
    grad_norms: tuple[float | None, ...]


@dataclass(frozen=True)
class Evaluated:
    """Figures by set, over all ranks. `not_finite` names the sets whose loss is no number; `most_tokens` is what a pass came down to."""

    figures: dict[str, SetFigures]
    not_finite: tuple[str, ...] = ()
    most_tokens: int = 0


@dataclass(frozen=True)
class Answered:
    """Both answers to every prompt, in their order; empty from the other ranks."""

    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Record:
    """Journal these before anything is done under them; answered with `Recorded`. Sent in the middle of a command."""

    events: tuple[MemoryPlanChanged | OomAbsorbed | Noted, ...]


@dataclass(frozen=True)
class Failed:
    """The segment is over for this rank; the process is not to be used again."""

    failure: SegmentFailure


Command = Restore | Train | Evaluate | AnswerPrompts | Stop
Reply = Ready | SegmentDone | Saved | ReplayEvidence | Evaluated | Answered | Record | Failed
