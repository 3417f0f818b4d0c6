"""Rank 0 decides for all: it judges the highest peak beside the pass that it belongs to, whichever rank did that pass."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from mem_core.core.memory.ladder import MicroBatch, PlanBounds
from mem_core.core.memory.start import Limit
from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.plan import MemoryPlan
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.segment import Evidence, OutOfMemory
from mem_core.runtime.memory.adaptive_memory import AdaptiveMemory
from mem_core.runtime.ranks.agreement import RankReading
from mem_core.runtime.ranks.worker.protocol import WorkerSpec

MIB = 2**20


class Reader:
    """Rank 0's own bytes under one limit."""

    def __init__(self) -> None:
        self.mine = RankReading(100 * MIB, 120 * MIB, 120 * MIB)

    def read(self) -> RankReading:
        return self.mine

    def limits(self, ranks: Sequence[RankReading]) -> list[Limit]:
        return [Limit("shared", max(rank.used_bytes for rank in ranks), max(rank.peak_bytes for rank in ranks), 1_000 * MIB)]


class OtherRank:
    """An agreement in which the other rank has told `theirs`."""

    def __init__(self, theirs: RankReading) -> None:
        self.theirs = theirs
        self.notice_steps = 1

    def share(self, reading: RankReading) -> list[RankReading]:
        return [reading, self.theirs]


def memory_beside(theirs: RankReading, most_steps: int | None = None) -> AdaptiveMemory:
    request = RuntimeRequest.model_validate({"run_id": "a", "store": "/tmp", "device": "cpu", "parallel": {"num_ranks": 2}})
    spec = WorkerSpec(
        request=request, device="cpu", dtype="float32", num_threads=1, data_folder="", validation_folder=None,
        pad_token_id=0, default_plan=MemoryPlan(micro_batch_rows=4), most_steps=most_steps,
    )  # fmt: skip
    device: Any = SimpleNamespace(kind="cpu", memory_reader=lambda budget: Reader(), memory_summary=lambda: "")
    place: Any = SimpleNamespace(rank=0)
    bounds = PlanBounds(most_rows=4, longest_tokens=128)
    memory = AdaptiveMemory(spec, place, device, cast(Any, OtherRank(theirs)), bounds, lambda events: None)
    memory.begin(TrainingPosition(applied_steps=0, batch_index=0), 0, None)
    return memory


def test_the_pass_of_the_rank_that_peaked_is_the_one_that_counts() -> None:
    memory = memory_beside(RankReading(100 * MIB, 600 * MIB, 600 * MIB, rows=4, length=128))
    memory.observe(0, MicroBatch(4, 16))
    failure = OutOfMemory(memory="host", evidence=Evidence(batch_index=1))
    evidence = memory.with_evidence(failure).evidence
    assert (evidence.worked_tokens, evidence.process_steps) == (512, 1)


def test_a_process_that_may_do_so_many_steps_asks_to_be_replaced_then() -> None:
    memory = memory_beside(RankReading(100 * MIB, 100 * MIB, 100 * MIB), most_steps=2)
    memory.observe(0, MicroBatch(4, 16))
    assert memory.replace_reason == ""
    memory.observe(1, MicroBatch(4, 16))
    assert "2 steps done" in memory.replace_reason


class Allocator:
    """A process whose freed memory stays resident until it is released; its peak counts from the last reading."""

    def __init__(self) -> None:
        self.resident = self.peak = 100 * MIB

    def passes(self, peak_bytes: int, left_bytes: int) -> None:
        self.resident, self.peak = left_bytes, max(self.peak, peak_bytes)

    def release(self) -> None:
        self.resident = 100 * MIB

    def read(self) -> RankReading:
        peak, self.peak = self.peak, self.resident
        return RankReading(self.resident, peak, self.resident)

    def limits(self, ranks: Sequence[RankReading]) -> list[Limit]:
        return [Limit("shared", ranks[0].used_bytes, ranks[0].peak_bytes, 1_000 * MIB)]


def test_what_the_old_plan_left_free_does_not_shrink_the_plan_again() -> None:
    """After passes of 512 tokens at 96 % of the limit come passes of half the size, whose peak is their own."""
    allocator = Allocator()
    memory = memory_beside(RankReading(0, 0, 0))
    memory.reader = cast(Any, allocator)
    memory._device = cast(Any, SimpleNamespace(kind="cpu", memory_summary=lambda: "", release_free_memory=allocator.release))
    memory._agreement = cast(Any, SimpleNamespace(notice_steps=0, announce=lambda *_: None, share=lambda reading: [reading]))
    position = TrainingPosition(applied_steps=0, batch_index=0)
    allocator.passes(960 * MIB, left_bytes=700 * MIB)
    memory.observe(0, MicroBatch(4, 128))
    position = memory.follow(position.model_copy(update={"batch_index": 1}))
    assert len(position.memory_plan_changes) == 1
    allocator.passes(530 * MIB, left_bytes=300 * MIB)
    assert memory.observe(1, MicroBatch(2, 128)).peak_bytes == 530 * MIB
    assert memory.follow(position.model_copy(update={"batch_index": 2})).memory_plan_changes == position.memory_plan_changes
