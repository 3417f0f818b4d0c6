"""How the work is spread over processes."""

from typing import Literal

from pydantic import Field

from mem_core.domain.request.section import Section


class ParallelSection(Section):
    """How the work is spread over processes."""

    num_ranks: int = Field(default=1, ge=1, le=4_096, description="Rank processes.")
    zero_stage: Literal[0, 1, 2, 3] = Field(default=1, description="DeepSpeed ZeRO stage.")
    offload_optimizer: Literal["none", "cpu"] = Field(
        default="none", description="cpu keeps the optimizer state in host memory; not possible at ZeRO stage 0."
    )
