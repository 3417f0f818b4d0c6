"""Which model, in which number format, and what of it trains."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mem_core.domain.request.section import Section

Patterns = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]


class LoraSection(Section):
    """Low-rank adapters instead of full fine-tuning."""

    rank: int = Field(default=8, ge=1, le=1024, description="Rank of the adapter matrices.")
    alpha: float = Field(default=16.0, gt=0, description="Scale of the adapters; the update is multiplied by alpha / rank.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout probability inside the adapters.")
    target_modules: Literal["auto"] | Patterns = Field(
        default="auto",
        description="Linear layers to adapt: auto for every one but the output head, or a list of their names or name endings.",
    )


class ModelSection(Section):
    """Which model, in which number format."""

    source: str = Field(
        default="preset:llama-nano",
        min_length=1,
        description="preset:NAME, or a folder or URL of a Hugging Face causal language model; "
        "of losses that a model adds by itself only a router's is supported.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Number format of the weights while training; auto follows the device."
    )
    activation_checkpointing: Literal["auto", "on", "off"] = Field(
        default="auto", description="Recompute activations in the backward pass to save memory."
    )
    compile: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Compile forward pass and loss before the first step, which takes a minute or more once; auto does so on a CPU where "
        "the run is long enough to win it back. Chosen at the run's birth. Not at ZeRO stage 3.",
    )
    lora: LoraSection | None = Field(
        default=None, title="LoRA", description="Low-rank adapters: the model's own weights stay as they are. null trains the weights."
    )
    freeze: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="Glob patterns over parameter names, such as model.embed_tokens.*: what they match is not trained."
    )

    @model_validator(mode="after")
    def _one_way_to_train_a_part(self) -> "ModelSection":
        if self.lora is not None and self.freeze:
            raise ValueError(
                "model.freeze has no meaning beside model.lora, which freezes every weight of the model; "
                "remove model.freeze, and say in model.lora.target_modules which layers to adapt"
            )
        return self
