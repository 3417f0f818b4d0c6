"""What a user may ask for: `RuntimeRequest`, the frozen surface shared by YAML, Prefect's form and notebooks.

Field names, meanings and defaults never change; optional fields may be added. Bounds live here, so that a value is valid
from birth; checks that need the machine, the data or the model belong to the doctor.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from mem_core.domain.units import parse_bytes

MAX_SEGMENTS = 1_000
STEPS_LIMIT = 1_000_000
OWNED_DEEPSPEED_KEYS = frozenset(
    {
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
        "optimizer", "scheduler", "zero_optimization", "fp16", "bf16", "steps_per_print", "managed_gradient_accumulation",
        "checkpoint", "data_types", "elasticity", "compile", "curriculum_learning", "data_efficiency", "load_universal",
    }
)  # fmt: skip

PositiveInt = Annotated[int, Field(ge=1)]


def _holds_bool(value: Any) -> bool:
    items = cast("Sequence[Any]", value) if isinstance(value, list | tuple) else (value,)
    return any(isinstance(item, bool) for item in items)


class Section(BaseModel):
    """Base of every part of a request: frozen, unknown keys refused, no NaN, no infinity, no bool where a number is due."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, raw: Any) -> Any:
        """Python takes `true` for 1; a request that says `max_steps: true` is a mistake, not a wish for one step."""
        for name, value in cast("dict[str, Any]", raw).items() if isinstance(raw, dict) else ():
            field = cls.model_fields.get(name)
            if field is not None and field.annotation is not bool and _holds_bool(value):
                raise ValueError(f"{name} must not be {str(value).lower()}; this field is no switch")
        return cast("Any", raw)


class LoraSection(Section):
    """Low-rank adapters instead of full fine-tuning."""

    rank: int = Field(default=8, ge=1, le=1024, description="Rank of the adapter matrices.")
    alpha: float = Field(default=16.0, gt=0, description="Scale of the adapters; the update is multiplied by alpha / rank.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout probability inside the adapters.")
    target_modules: tuple[str, ...] = Field(default=("q_proj", "v_proj"), min_length=1, description="Names of the linear layers to adapt.")


class ModelSection(Section):
    """Which model, in which number format."""

    source: str = Field(
        default="preset:llama-nano", min_length=1, description="preset:NAME, or a folder or URL of a Hugging Face causal language model."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Number format of the weights while training; auto follows the device."
    )
    activation_checkpointing: Literal["auto", "on", "off"] = Field(
        default="auto", description="Recompute activations in the backward pass to save memory."
    )
    compile: Literal["auto", "on", "off"] = Field(default="auto", description="torch.compile through the engine; auto leaves it off.")
    lora: LoraSection | None = Field(default=None, title="LoRA", description="Low-rank adapters; null trains every weight.")


class DataSection(Section):
    """What to train on and how rows become token sequences."""

    train: tuple[str, ...] = Field(
        default=("stdlib:",), min_length=1, description="Files, globs or URLs; 'stdlib:' is Python's own library sources."
    )
    validation: float | tuple[str, ...] | None = Field(
        default=0.01, description="A fraction held out, a list like train, or null for none."
    )
    format: Literal["auto", "text", "jsonl", "parquet"] = Field(default="auto", description="File format; auto goes by the file name.")
    text_field: str = Field(default="text", description="JSONL field that holds the text.")
    messages_field: str | None = Field(
        default=None, description="JSONL field with chat messages, rendered by the tokenizer's chat template."
    )
    prompt_field: str | None = Field(default=None, description="JSONL field with the prompt; the loss covers the completion only.")
    completion_field: str | None = Field(default=None, description="JSONL field with the completion.")
    sequence_length: int = Field(default=128, ge=2, le=1_048_576, description="Tokens per training sequence.")
    long_documents: Literal["chunk", "truncate", "refuse"] = Field(
        default="chunk", description="What to do with documents longer than sequence_length."
    )
    packing: bool = Field(default=True, description="Join documents into full sequences; off keeps one document per row, padded.")
    on_bad_row: Literal["fail", "skip"] = Field(default="fail", description="Stop at bad rows, or skip up to max_bad_rows of them.")
    max_bad_rows: int = Field(default=100, ge=0, description="How many bad rows may be skipped with on_bad_row: skip.")

    @field_validator("train", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("validation")
    @classmethod
    def _fraction(cls, value: float | tuple[str, ...] | None) -> float | tuple[str, ...] | None:
        if isinstance(value, float) and not 0 < value <= 0.5:
            raise ValueError("validation as a fraction must be above 0 and at most 0.5; use null for no validation")
        if value == ():
            raise ValueError("validation is an empty list; use null for no validation")
        return value

    @model_validator(mode="after")
    def _pair(self) -> "DataSection":
        if (self.prompt_field is None) != (self.completion_field is None):
            raise ValueError("prompt_field and completion_field go together; set both or neither")
        if self.prompt_field is not None and self.messages_field is not None:
            raise ValueError("messages_field excludes prompt_field and completion_field; set one kind")
        return self


class TrainingSection(Section):
    """How long and with which optimizer."""

    max_steps: int = Field(
        default=STEPS_LIMIT, ge=1, description="Applied optimizer updates to reach; 1 to 1,000,000 unless max_steps_limit is raised."
    )
    max_steps_limit: int = Field(
        default=STEPS_LIMIT, ge=1, description="Guard against typing mistakes in max_steps; raise it on purpose for longer runs."
    )
    segment_steps: int = Field(
        default=1_000, ge=1, description="Steps between checkpoints; raised by itself where a run would need over 1,000 segments."
    )
    global_batch_size: int = Field(default=8, ge=1, le=1_048_576, description="Sequences per optimizer update, over all ranks.")
    optimizer: Literal["adamw"] = Field(default="adamw", description="Optimizer.")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95), description="AdamW's moment decay rates."
    )
    eps: float = Field(default=1e-8, gt=0, le=1e-2, description="AdamW's denominator offset.")
    learning_rate: float = Field(default=3.0e-4, gt=0, le=10, description="Peak learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field(default="cosine", description="Decay after warm-up.")
    schedule_steps: int | None = Field(
        default=None, ge=1, description="Horizon of the schedule in steps; default max_steps when the run is born, then frozen."
    )
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1, description="Final learning rate as a fraction of the peak.")
    warmup_steps: int = Field(default=100, ge=0, description="Linear warm-up in steps.")
    weight_decay: float = Field(default=0.1, ge=0, le=10, description="Decoupled weight decay, on matrices only.")
    gradient_clip_norm: float = Field(
        default=1.0, gt=0, le=1_000, description="Global gradient norm above which gradients are scaled down."
    )
    loss_scale_initial_power: int = Field(default=10, ge=0, le=32, description="log2 of the first loss scale; float16 only.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of weights, data order and dropout.")

    @model_validator(mode="after")
    def _within_limit(self) -> "TrainingSection":
        if self.max_steps > self.max_steps_limit:
            raise ValueError(
                f"max_steps {self.max_steps} is above max_steps_limit {self.max_steps_limit}; "
                "lower max_steps, or raise training.max_steps_limit if you mean it"
            )
        return self


class ParallelSection(Section):
    """How the work is spread over processes."""

    num_ranks: int = Field(default=1, ge=1, le=4_096, description="Rank processes.")
    zero_stage: Literal[0, 1, 2, 3] = Field(default=1, description="DeepSpeed ZeRO stage.")
    offload_optimizer: Literal["none", "cpu"] = Field(default="none", description="Keep the optimizer state in host memory.")


class MemorySection(Section):
    """How memory is watched and used."""

    mode: Literal["adaptive", "fixed"] = Field(
        default="adaptive", description="adaptive shrinks before the limit; fixed fails at the first OOM."
    )
    micro_batch_size: PositiveInt | Literal["auto"] = Field(default="auto", description="Sequences per forward pass and rank.")
    budget: int | str | None = Field(default=None, description="Own memory budget: bytes, or text such as 6GiB; null measures the machine.")
    high_watermark: float = Field(default=0.9, gt=0, le=1, description="Fraction of the budget above which the micro-batch shrinks.")
    low_watermark: float = Field(default=0.7, gt=0, lt=1, description="Fraction of the budget below which it may grow again.")

    @field_validator("budget")
    @classmethod
    def _bytes(cls, value: int | str | None) -> int | None:
        return None if value is None else parse_bytes(value)

    @model_validator(mode="after")
    def _ordered(self) -> "MemorySection":
        if self.low_watermark >= self.high_watermark:
            raise ValueError(f"low_watermark {self.low_watermark} must be below high_watermark {self.high_watermark}")
        return self


class CheckpointSection(Section):
    """When to save, how to prove it, what to keep."""

    keep_last: int = Field(default=3, ge=1, le=1_000, description="Validated checkpoints to keep.")
    keep_every_steps: PositiveInt | None = Field(default=None, description="Also keep each checkpoint whose step is a multiple of this.")
    every_s: Annotated[float, Field(ge=1)] | Literal["auto"] | None = Field(
        default=None, description="End a segment after this many seconds; auto chooses by measured save cost and fault rate."
    )
    validation: Literal["integrity", "replay"] = Field(default="integrity", description="How a checkpoint is proven.")
    mirror: str | None = Field(default=None, description="fsspec URL that gets a copy of every validated checkpoint.")


class PlannerSection(Section):
    """Who may propose hyper-parameters."""

    kind: Literal["none", "rules", "openai"] = Field(default="none", description="none, built-in rules, or an OpenAI-compatible endpoint.")
    base_url: str | None = Field(default=None, description="Base URL of the endpoint; default from the environment.")
    model: str | None = Field(default=None, description="Model name at the endpoint.")
    api_key_env: str | None = Field(
        default=None, description="Environment variable (or Prefect Secret block) that holds the key; never the key itself."
    )
    time_limit_s: float = Field(default=10.0, gt=0, le=600, description="Longest that advice may delay a segment.")
    every_segments: int = Field(default=1, ge=1, description="Ask again after this many segments.")


class ApprovalSection(Section):
    """A person confirms changed hyper-parameters."""

    required: bool = Field(default=False, description="Ask a person before applied values change.")
    time_limit_s: float = Field(default=3_600, gt=0, le=604_800, description="No answer within this time is a refusal.")


class PolicySection(Section):
    """Bounds on advice."""

    file: str | None = Field(default=None, description="YAML file with bounds; null uses the built-in lanes.")
    planner: PlannerSection = Field(default=PlannerSection(), title="Planner", description="Who may propose hyper-parameters.")
    approval: ApprovalSection = Field(default=ApprovalSection(), title="Approval", description="Whether a person confirms changes.")


class ResilienceSection(Section):
    """How failures are bounded."""

    max_failures_without_progress: int = Field(
        default=3, ge=1, le=100, description="Restarts allowed while the validated step does not advance."
    )
    segment_deadline_s: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        default="auto", description="Longest a segment may take; auto learns it."
    )
    hang_factor: float = Field(default=5, ge=2, le=1_000, description="A step this many times slower than usual counts as hung.")
    on_poisoned_batch: Literal["fail", "skip"] = Field(
        default="fail", description="A batch that fails again and again: report it and stop, or leave it out and go on."
    )
    on_non_finite: Literal["retry", "skip", "lower_lr", "fail"] = Field(
        default="retry", description="A loss or gradient that is not finite: roll back and then try again, skip, lower the rate, or stop."
    )
    max_skipped_batches: int = Field(default=100, ge=1, le=1_000_000, description="How many batches may be left out in one run.")
    loss_spike_factor: Annotated[float, Field(ge=5)] | None = Field(
        default=None, description="A loss this many robust deviations above the recent median counts as not finite; null never."
    )
    preemption_file: str | None = Field(
        default=None, min_length=1, description="When this file appears, commit and stop with exit code 75, as at SIGTERM."
    )


class ChaosSection(Section):
    """Real faults on purpose, for drills."""

    seed: int = Field(default=0, ge=0, description="Seed of the fault plan.")
    every_s: float | None = Field(default=None, gt=0, description="Mean seconds between faults.")
    at_steps: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(default=None, description="Steps at which to inject.")
    kinds: tuple[str, ...] | None = Field(default=None, description="Kinds of fault; null means all that this machine allows.")


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
    memory: MemorySection = Field(default=MemorySection(), title="Memory", description="How memory is used.")
    checkpoint: CheckpointSection = Field(default=CheckpointSection(), title="Checkpoints", description="When to save, what to keep.")
    deepspeed: dict[str, Any] = Field(default={}, description="Raw DeepSpeed keys, merged into the engine's configuration.")
    policy: PolicySection = Field(default=PolicySection(), title="Policy", description="Bounds on advice.")
    resilience: ResilienceSection = Field(default=ResilienceSection(), title="Resilience", description="How failures are bounded.")
    chaos: ChaosSection | None = Field(default=None, title="Chaos", description="Real faults on purpose, for drills.")

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

    @property
    def effective_segment_steps(self) -> int:
        """Steps of a segment after the cap on the number of segments, so that Prefect's database stays light."""
        return max(self.training.segment_steps, -(-self.training.max_steps // MAX_SEGMENTS))
