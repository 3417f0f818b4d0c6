"""Which model, in which number format, and what of it trains."""

from typing import Literal

from pydantic import Field

from mem_core.domain.request.section import Section


class LoraSection(Section):
    """Low-rank adapters instead of full fine-tuning."""

    rank: int = Field(default=8, ge=1, le=1024, description="Rank of the adapter matrices.")
    alpha: float = Field(default=16.0, gt=0, description="Scale of the adapters; the update is multiplied by alpha / rank.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout probability inside the adapters.")
    target_modules: tuple[str, ...] = Field(default=("q_proj", "v_proj"), min_length=1, description="Names of the linear layers to adapt.")


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
    compile: Literal["auto", "on", "off"] = Field(default="auto", description="torch.compile through the engine; auto leaves it off.")
    lora: LoraSection | None = Field(
        default=None, title="LoRA", description="Low-rank adapters. Not supported yet: keep null, which trains every weight."
    )
