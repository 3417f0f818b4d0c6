"""Which engine files a checkpoint must hold, by rank and ZeRO stage (names of DeepSpeed 0.19, `_get_ckpt_name` and its kin)."""

import re
from collections.abc import Collection, Iterable

from mem_core.domain.capabilities import is_convertible
from mem_core.domain.checkpoint import CheckpointExpectation, CheckpointManifest
from mem_core.domain.errors import RequestError

_OPTIMIZER_PREFIXES = ("", "bf16_")
_ENGINE_FILE = re.compile(r"^(?:bf16_)?(?:zero_pp_rank_\d+_)?mp_rank_\d+_(?:model|optim)_states\.pt$")


def required_shards(num_ranks: int, zero_stage: int) -> tuple[tuple[str, ...], ...]:
    """For each engine file that must be there, the names it may have (the optimizer's carry `bf16_` under bfloat16)."""
    if zero_stage == 0:
        return (("mp_rank_00_model_states.pt",),)
    optimizers = tuple(
        tuple(f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for prefix in _OPTIMIZER_PREFIXES) for rank in range(num_ranks)
    )
    if zero_stage < 3:
        return (("mp_rank_00_model_states.pt",), *optimizers)
    return (*((f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",) for rank in range(num_ranks)), *optimizers)


def missing_shards(names: Collection[str], num_ranks: int, zero_stage: int) -> tuple[str, ...]:
    """Engine files that are not among `names`; for one with several possible names the first is given."""
    present = set(names)
    return tuple(options[0] for options in required_shards(num_ranks, zero_stage) if present.isdisjoint(options))


def surplus_shards(names: Iterable[str], num_ranks: int, zero_stage: int) -> tuple[str, ...]:
    """Engine files that do not belong: DeepSpeed finds its files by pattern, so one too many changes what it loads."""
    allowed = {name for options in required_shards(num_ranks, zero_stage) for name in options}
    return tuple(sorted(name for name in names if _ENGINE_FILE.match(name) and name not in allowed))


def refuse_other_shape(manifest: CheckpointManifest, expected: CheckpointExpectation) -> None:
    """Refuse to resume under other ranks, another stage or another model. Such a checkpoint is sound: it is never quarantined.

    Raises:
        RequestError: naming what differs and the choices.
    """
    if manifest.num_ranks != expected.num_ranks:
        raise RequestError(
            f"the checkpoint of step {manifest.step} was saved on {manifest.num_ranks} ranks",
            field="parallel.num_ranks",
            value=expected.num_ranks,
            bound=str(manifest.num_ranks),
            remedy=f"Resume with {manifest.num_ranks} ranks, convert it with --allow-reshard, or start another run_id.",
        )
    if manifest.zero_stage != expected.zero_stage:
        convert = " convert it with --allow-reshard," if is_convertible(manifest.zero_stage, expected.zero_stage) else ""
        raise RequestError(
            f"the checkpoint of step {manifest.step} was saved at ZeRO stage {manifest.zero_stage}",
            field="parallel.zero_stage",
            value=expected.zero_stage,
            bound=str(manifest.zero_stage),
            remedy=f"Resume at stage {manifest.zero_stage},{convert} or start another run_id.",
        )
    difference = _parameter_difference(manifest.parameters, expected.parameters) if expected.parameters else ""
    if difference:
        raise RequestError(
            f"the checkpoint of step {manifest.step} holds another model: {difference}",
            field="model",
            remedy="Resume with the model of the run, or start another run_id.",
        )


def _parameter_difference(saved: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> str:
    for name in sorted(saved.keys() | wanted.keys()):
        if name not in wanted:
            return f"parameter {name} is only in the checkpoint"
        if name not in saved:
            return f"parameter {name} is only in the model"
        if saved[name] != wanted[name]:
            return f"parameter {name} has shape {list(saved[name])} in the checkpoint and {list(wanted[name])} in the model"
    return ""
