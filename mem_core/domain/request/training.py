"""How long and with which optimizer."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mem_core.domain.request.section import Section

STEPS_LIMIT = 1_000_000


class TrainingSection(Section):
    """How long and with which optimizer."""

    max_steps: int = Field(
        default=STEPS_LIMIT, ge=1, description="Applied optimizer updates to reach; 1 to 1,000,000 unless max_steps_limit is raised."
    )
    epochs: float | None = Field(
        default=None,
        gt=0,
        le=100_000,
        description="How often every training row is seen, instead of max_steps; whole batches, so it is rounded up. Steps follow once "
        "the data are prepared.",
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
    warmup_ratio: float | None = Field(
        default=None, ge=0, le=1, description="Linear warm-up as a share of the schedule, instead of warmup_steps; frozen at birth."
    )
    weight_decay: float = Field(default=0.1, ge=0, le=10, description="Decoupled weight decay, on matrices only.")
    gradient_clip_norm: float = Field(
        default=1.0, gt=0, le=1_000, description="Global gradient norm above which gradients are scaled down."
    )
    loss_scale_initial_power: int = Field(default=10, ge=0, le=32, description="log2 of the first loss scale; float16 only.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of weights, data order and dropout.")

    @model_validator(mode="after")
    def _one_of_two(self) -> "TrainingSection":
        """Which of the two was set decides. A stored request has every field, so that a default counts as not set."""
        for one, other in (("epochs", "max_steps"), ("warmup_ratio", "warmup_steps")):
            value, default = getattr(self, other), type(self).model_fields[other].default
            if getattr(self, one) is not None and value != default:
                raise ValueError(f"both {one} {getattr(self, one):g} and {other} {value} are set; leave one of them out")
        return self

    @model_validator(mode="after")
    def _within_limit(self) -> "TrainingSection":
        if self.epochs is None and self.max_steps > self.max_steps_limit:
            raise ValueError(
                f"max_steps {self.max_steps} is above max_steps_limit {self.max_steps_limit}; "
                "lower max_steps, or raise training.max_steps_limit if you mean it"
            )
        return self
