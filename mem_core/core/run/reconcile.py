"""What may change when a run goes on: nothing that decides the weights, beside more steps and, where allowed, the shape. Pure."""

from collections.abc import Collection, Iterator
from typing import Any, cast

from mem_core.domain.capabilities import is_convertible
from mem_core.domain.errors import RequestError
from mem_core.domain.request import RuntimeRequest, shown_request

ALLOWED_CHANGES = (
    "store", "training.max_steps", "training.max_steps_limit", "training.segment_steps", "checkpoint", "policy", "resilience", "chaos",
    "evaluation", "telemetry",
    "memory.mode", "memory.budget", "memory.high_watermark", "memory.low_watermark",
)  # fmt: skip
RESHARD_CHANGES = ("parallel.num_ranks", "parallel.zero_stage")
# At ZeRO stage 0 older versions took the wish and left it out; it is refused now, and a run born with it goes on without it.
NEVER_DONE = ("parallel.offload_optimizer",)


def reconcile(
    stored: RuntimeRequest, asked: RuntimeRequest, *, allow_reshard: bool = False, as_born: Collection[str] = ()
) -> RuntimeRequest:
    """The request that a resumed run goes on with: what was asked, on the frozen values of birth.

    A signed URL counts as the file behind it: the signature of a resumed run is another one.
    `allow_reshard`: ranks and ZeRO stage may change too; the checkpoint is then converted (core/reshard.py). `as_born`: dotted
    names of values that nobody asked for, since a front derived them from others: they stay as they were at birth.

    Raises:
        RequestError: a value that decides the weights differs from the one the run was born with.
    """
    old, new = shown_request(stored).model_dump(mode="json"), shown_request(asked).model_dump(mode="json")
    horizon = _frozen_horizon(old, asked)
    new["training"]["schedule_steps"] = horizon
    for path in as_born:
        _copy(old, new, path.split("."))
    stages = stored.parallel.zero_stage, asked.parallel.zero_stage
    allowed_changes = ALLOWED_CHANGES + (RESHARD_CHANGES if allow_reshard else ()) + (NEVER_DONE if stages == (0, 0) else ())
    for path, before, after in differences(old, new):
        if not any(path == allowed or path.startswith(allowed + ".") for allowed in allowed_changes):
            convert = "convert its checkpoint with --allow-reshard, " if path in RESHARD_CHANGES and is_convertible(*stages) else ""
            raise RequestError(
                f"run {stored.run_id} was born with {before!r} and cannot change it on resume",
                field=path,
                value=repr(after),
                bound="only more steps, what is kept, limits, policy and resilience may change",
                remedy=f"Set {path} back to {before!r}, {convert}or use a new run_id.",
            )
    going_on = asked.model_dump(mode="json")  # with the signatures that were asked with: those of birth have expired
    going_on["training"]["schedule_steps"] = horizon
    for path in as_born:
        _copy(old, going_on, path.split("."))
    return RuntimeRequest.model_validate(going_on)


def _frozen_horizon(old: dict[str, Any], asked: RuntimeRequest) -> int:
    """The schedule's horizon is frozen at birth; leaving it out of a later request means "as it was"."""
    return asked.training.schedule_steps or old["training"]["schedule_steps"]


def _copy(source: dict[str, Any], target: dict[str, Any], path: list[str]) -> None:
    for section in path[:-1]:
        source, target = source[section], target[section]
    target[path[-1]] = source[path[-1]]


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, value of `old`, value of `new`) wherever two requests as plain values differ."""
    for key in old.keys() | new.keys():
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from differences(cast("dict[str, Any]", before), cast("dict[str, Any]", after), f"{prefix}{key}.")
        elif before != after:
            yield f"{prefix}{key}", before, after
