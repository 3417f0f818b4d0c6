"""The one resolved DeepSpeed configuration of an engine. Pure: values in, a JSON-able dict out."""

from pathlib import Path
from typing import Any, Literal

from mem_core.domain.plan import Hyperparams, MemoryPlan
from mem_core.domain.request import RuntimeRequest

NEVER = 1_000_000_000
DEFAULT_BUCKET_ELEMENTS = 500_000_000
UNIVERSAL_PART = "zero"


def engine_config(
    request: RuntimeRequest,
    dtype: Literal["float32", "bfloat16", "float16"],
    plan: MemoryPlan,
    hyperparams: Hyperparams,
    num_trained: int,
    load_universal: bool = False,
) -> dict[str, Any]:
    """Configuration for `deepspeed.initialize`.

    Accumulation is unmanaged: the runner owns the boundary, so micro-batches may differ from step to step. The batch sizes
    that DeepSpeed wants are therefore nominal (one micro-batch of the rank's whole share); `gradient_clipping` is always
    written, since DeepSpeed clips at 1.0 when the key is absent. Buckets are never larger than what trains: the default maps 2 GiB of
    address space for the smallest one. `load_universal`: the engine will take a checkpoint that was converted from another shape.
    """
    rows_per_rank = request.training.global_batch_size // request.parallel.num_ranks
    bucket = min(DEFAULT_BUCKET_ELEMENTS, max(1, num_trained))
    zero: dict[str, Any] = {"stage": request.parallel.zero_stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if request.parallel.zero_stage >= 1 and plan.offload_optimizer == "cpu":
        zero["offload_optimizer"] = {"device": "cpu"}
    if request.parallel.zero_stage == 3:
        # Small parameters stay whole: partitioning them costs more in gathers than it saves.
        zero["stage3_param_persistence_threshold"] = 10_000
    config: dict[str, Any] = {
        **request.deepspeed,
        "train_micro_batch_size_per_gpu": rows_per_rank,
        "gradient_accumulation_steps": 1,
        "train_batch_size": request.training.global_batch_size,
        "managed_gradient_accumulation": False,
        "gradient_clipping": hyperparams.gradient_clip_norm,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": NEVER,
        "wall_clock_breakdown": False,
    }
    if load_universal:
        config["checkpoint"] = {**request.deepspeed.get("checkpoint", {}), "load_universal": True}
    match dtype:
        case "float16":
            config["fp16"] = {"enabled": True, "initial_scale_power": hyperparams.loss_scale_initial_power}
        case "bfloat16":
            config["bf16"] = {"enabled": True}
        case "float32":
            pass
    return config


def is_universal(folder: str | Path | None) -> bool:
    """Whether this is a converted checkpoint; none that MEM commits has such a folder."""
    return folder is not None and (Path(folder) / UNIVERSAL_PART).is_dir()
