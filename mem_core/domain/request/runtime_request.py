"""The whole request, and the checks that span its sections."""

import json
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from mem_core.domain.request.checkpoint import CheckpointSection
from mem_core.domain.request.data import DataSection
from mem_core.domain.request.evaluation import EvaluationSection
from mem_core.domain.request.memory import MemorySection
from mem_core.domain.request.model import ModelSection
from mem_core.domain.request.parallel import ParallelSection
from mem_core.domain.request.policy import PolicySection
from mem_core.domain.request.resilience import ChaosSection, ResilienceSection
from mem_core.domain.request.section import Section
from mem_core.domain.request.telemetry import TelemetrySection
from mem_core.domain.request.training import TrainingSection

MAX_SEGMENTS = 1_000
OWNED_DEEPSPEED_KEYS = frozenset(
    {
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
        "optimizer", "scheduler", "zero_optimization", "fp16", "bf16", "steps_per_print", "managed_gradient_accumulation",
        "checkpoint", "data_types", "elasticity", "compile", "curriculum_learning", "data_efficiency", "load_universal",
    }
)  # fmt: skip


class RuntimeRequest(Section):
    """Everything about one run. The same run_id again means resume."""

    run_id: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$", description="Name of the run; the same name again resumes it.")
    schema_version: Literal[1] = Field(default=1, description="Version of this schema.")
    store: str = Field(default="./runs", min_length=1, description="Local folder or fsspec URL that holds run folders.")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Where to train.")
    model: ModelSection = Field(default=ModelSection(), title="Model", description="Which model.")
    data: DataSection = Field(default=DataSection(), title="Data", description="What to train on.")
    training: TrainingSection = Field(default=TrainingSection(), title="Training", description="How long and how.")
    parallel: ParallelSection = Field(default=ParallelSection(), title="Parallel", description="How the work is spread.")
    evaluation: EvaluationSection = Field(
        default=EvaluationSection(), title="Evaluation", description="Held-out rows during training, and what follows from them."
    )
    memory: MemorySection = Field(default=MemorySection(), title="Memory", description="How memory is used.")
    checkpoint: CheckpointSection = Field(default=CheckpointSection(), title="Checkpoints", description="When to save, what to keep.")
    deepspeed: dict[str, Any] = Field(default={}, description="Raw DeepSpeed keys, merged into the engine's configuration.")
    policy: PolicySection = Field(default=PolicySection(), title="Policy", description="Bounds on advice.")
    resilience: ResilienceSection = Field(default=ResilienceSection(), title="Resilience", description="How failures are bounded.")
    telemetry: TelemetrySection = Field(default=TelemetrySection(), title="Telemetry", description="Who takes the run's figures.")
    chaos: ChaosSection | None = Field(
        default=None, title="Chaos", description="Real faults on purpose, for drills; training leaves it out."
    )

    @field_validator("deepspeed")
    @classmethod
    def _not_owned(cls, value: dict[str, Any]) -> dict[str, Any]:
        owned = sorted(OWNED_DEEPSPEED_KEYS & value.keys())
        if owned:
            raise ValueError(f"{', '.join(owned)} belong to MEM; set them through the request's own fields")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as exc:
            raise ValueError(f"not plain JSON ({exc}); use text, finite numbers, lists and mappings") from exc
        return value

    @model_validator(mode="after")
    def _batch_arithmetic(self) -> "RuntimeRequest":
        batch, ranks, micro = self.training.global_batch_size, self.parallel.num_ranks, self.memory.micro_batch_size
        if batch % ranks:
            raise ValueError(
                f"training.global_batch_size {batch} cannot be divided by parallel.num_ranks {ranks}; "
                f"use {batch // ranks * ranks or ranks} or {(batch // ranks + 1) * ranks} sequences, or other ranks"
            )
        if micro != "auto" and (batch // ranks) % micro:
            fits = [size for size in range(1, batch // ranks + 1) if (batch // ranks) % size == 0]
            raise ValueError(
                f"memory.micro_batch_size {micro} does not divide the {batch // ranks} sequences of a rank "
                f"(training.global_batch_size {batch} / parallel.num_ranks {ranks}); use one of {fits} or auto"
            )
        return self

    @model_validator(mode="after")
    def _has_rows_to_evaluate(self) -> "RuntimeRequest":
        section, no_rows = self.evaluation, self.data.validation is None and not self.evaluation.sets
        if section.every_steps is not None and no_rows and section.prompts is None:
            raise ValueError("evaluation.every_steps needs rows or prompts; set data.validation or evaluation.sets, or evaluation.prompts")
        for name in ("keep_best", "patience"):
            if getattr(section, name) and no_rows:
                raise ValueError(f"evaluation.{name} follows the loss of held-out rows; set data.validation or evaluation.sets")
        return self

    @property
    def effective_evaluation_steps(self) -> int | None:
        """Steps between evaluations after the same cap; None where only the end is evaluated."""
        every_steps = self.evaluation.every_steps
        return None if every_steps is None else max(every_steps, -(-self.training.max_steps // MAX_SEGMENTS))

    @property
    def effective_segment_steps(self) -> int:
        """Steps of a segment after the cap on the number of segments, so that Prefect's database stays light. Where epochs are asked
        for, the cap follows once their steps are known."""
        if self.training.epochs is not None:
            return self.training.segment_steps
        return max(self.training.segment_steps, -(-self.training.max_steps // MAX_SEGMENTS))
