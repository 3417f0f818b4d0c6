"""Growth from segment to segment, judged without any limit: a leak is said with its numbers, a plateau is not one."""

import random

import pytest

from mem_core.core.memory.control import MemoryControl, Watermarks
from mem_core.core.memory.diagnosis import StepReading, growth_per_step
from mem_core.core.memory.fit import leak_remedy
from mem_core.core.memory.growth import Growth
from mem_core.core.memory.ladder import MicroBatch, PlanBounds
from mem_core.domain.plan import MemoryPlan
from mem_core.domain.segment import Evidence

MIB = 2**20


def watch(levels: list[float]) -> list[str]:
    """What is said over the levels, in MiB."""
    growth, said = Growth(), []
    for level in levels:
        growth = growth.add(int(level * MIB))
        if found := growth.found():
            said.append(found)
            growth = growth.said()
    return said


def test_thirty_mib_a_save_is_said_early_and_seldom() -> None:
    """335 to 1,178 MiB over 28 saves."""
    said = watch([335 + 30 * index for index in range(29)])
    assert "a leak of about 30.0 MiB a segment" in said[0]
    assert len(said) <= 3


@pytest.mark.parametrize("seed", range(20))
def test_noise_a_plateau_and_a_warm_up_are_no_leak(seed: int) -> None:
    """Whatever the level: steady growth in both halves is asked for."""
    rng = random.Random(seed)
    jump = rng.randrange(60)
    assert watch([400 + 30 * rng.random() for _ in range(60)]) == []
    assert watch([400 + (200 if index >= jump else 0) + 5 * rng.random() for index in range(60)]) == []
    assert watch([400 + 200 * (1 - 0.5**index) + 5 * rng.random() for index in range(60)]) == []


def test_the_slope_is_in_steps_however_far_apart_readings_are() -> None:
    """Every sixteenth step far from the limit, every step near it."""
    batches = [*range(0, 64, 16), *range(64, 100)]
    history = [StepReading(batch, MicroBatch(1, 64), 10 * MIB * batch, 10 * MIB * batch, 2**40) for batch in batches]
    assert growth_per_step(history) == 10 * MIB


def test_a_pass_that_worked_before_fails_for_growth_and_not_for_size() -> None:
    """Only where the process really has grown, and only up to the size that worked."""
    control = MemoryControl(Watermarks(0.9, 0.7), PlanBounds(8, 128), MemoryPlan(micro_batch_rows=8))
    control.decide(StepReading(0, MicroBatch(8, 128), 400 * MIB, 450 * MIB, 1_000 * MIB, "cgroup"))
    assert control.grown(1_024, "cgroup", 900 * MIB, 1_000 * MIB)
    assert not control.grown(1_024, "cgroup", 450 * MIB, 1_000 * MIB)
    assert not control.grown(1_024, "RLIMIT_AS", 900 * MIB, 1_000 * MIB), "another kind of bytes"
    assert not control.grown(2_048, "cgroup", 900 * MIB, 1_000 * MIB)


def test_the_last_word_on_a_leak_names_it_and_the_limit_that_binds() -> None:
    """No smaller model is advised."""
    text = leak_remedy(Evidence(limit_name="RLIMIT_AS", limit_bytes=1_434 * MIB, worked_tokens=1_024))
    assert "RLIMIT_AS of 1.4 GiB" in text
    assert "passes of 1024 tokens worked before" in text
    assert "LoRA" not in text
