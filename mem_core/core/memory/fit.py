"""What would fit where the ladder has ended: the doctor's formula asked about every way out, with numbers. Pure."""

from dataclasses import dataclass

from mem_core.core.doctor.changes import Change, adapters, offload, with_values
from mem_core.core.doctor.memory import Device, Dtype, estimate_memory, needed_bytes
from mem_core.domain.environment import ModelNumbers
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.segment import Evidence
from mem_core.domain.units import format_bytes

SHORTEST_LENGTH = 16


@dataclass(frozen=True, slots=True)
class WayOut:
    """One change of the request, in the request's own words, and the peak that it leads to by the formula."""

    change: str
    needed_bytes: int


def ways_out(model: ModelNumbers, request: RuntimeRequest, dtype: Dtype, device: Device) -> tuple[WayOut, ...]:
    """Every kind of change that needs less than the bottom of the ladder and that this build can do. Mildest first."""

    def needed(changed: RuntimeRequest) -> int:
        return needed_bytes(estimate_memory(model, changed, dtype, device=device, activation_checkpointing=True), device)

    bottom = needed(request)
    candidates: list[Change] = [
        (f"data.sequence_length: {length}", with_values(request, "data", sequence_length=length)) for length in _lengths(request)
    ]
    if request.parallel.zero_stage < 3 and request.parallel.num_ranks > 1:
        candidates.append(("parallel.zero_stage: 3", with_values(request, "parallel", zero_stage=3)))
    candidates += [*offload(request, model, device), *adapters(request, model)]
    found = [WayOut(change, needed(changed)) for change, changed in candidates]
    return tuple(way for way in found if way.needed_bytes < bottom)


def leak_remedy(seen: Evidence) -> str:
    """The remedy where a process has grown: size is not the cause, and no smaller pass or model is the cure."""
    limit = f"{seen.limit_name or 'the limit'} of {format_bytes(seen.limit_bytes or 0)}"
    worked = f"passes of {seen.worked_tokens} tokens" if seen.worked_tokens else f"{seen.process_steps or 'some'} steps"
    return (
        f"Memory grew until nothing fitted under {limit}, which looks like a leak: {worked} worked before in "
        "the same process, and workers that were replaced ever sooner met it too. Find what keeps memory from step to step (the journal's "
        "notes on memory name python objects and mapped bytes), or give more memory."
    )


def exhausted_remedy(
    model: ModelNumbers, request: RuntimeRequest, dtype: Dtype, device: Device, budget_bytes: int, limit_name: str = ""
) -> str:
    """The remedy of exit 78: the need at micro-batch 1, and each way out with what it needs; those that fit come first."""
    estimate = estimate_memory(model, request, dtype, device=device, activation_checkpointing=True)
    limit = f"{limit_name or 'the limit'} is {format_bytes(budget_bytes) if budget_bytes else 'unknown'}"
    bottom = (
        f"One row of {request.data.sequence_length} tokens with activation checkpointing needs about "
        f"{format_bytes(needed_bytes(estimate, device))}; {limit}"
    )
    ways = ways_out(model, request, dtype, device)
    fitting = [way for way in ways if not budget_bytes or way.needed_bytes <= budget_bytes]
    shown = fitting or sorted(ways, key=lambda way: way.needed_bytes)[:2]
    words = "; ".join(f"{way.change} ({format_bytes(way.needed_bytes)})" for way in shown)
    if fitting:
        return f"{bottom}. What would fit: {words}; or more memory."
    return f"{bottom}. Nothing smaller is predicted to fit{f', the nearest: {words}' if words else ''}: use a smaller model or more memory."


def _lengths(request: RuntimeRequest) -> list[int]:
    """Half, a quarter, an eighth."""
    lengths = [request.data.sequence_length // part for part in (2, 4, 8)]
    return [length for length in lengths if length >= SHORTEST_LENGTH]
