"""The memory prediction against what was measured, how it scales, and what the doctor says when it does not fit."""

from typing import Any

import pytest

from mem_core.core.doctor.environment_doctor import EnvironmentDoctor, error_of, smallest_limit
from mem_core.core.doctor.memory import choose_micro_batch_rows, estimate_memory, memory_findings
from mem_core.core.doctor.sizes import trained_parameters
from mem_core.domain.environment import (
    AcceleratorObservation,
    BuildObservation,
    EnvironmentReport,
    MachineObservations,
    MemoryBudget,
    ModelNumbers,
    StoreObservation,
)
from mem_core.domain.request import RuntimeRequest

MIB = 2**20
GIB = 2**30
SMOLLM2 = ModelNumbers(
    num_parameters=134_515_008, num_layers=30, hidden_size=576, intermediate_size=1536, vocab_size=49_152, num_heads=9, num_kv_heads=3,
    max_positions=8192, tied=True,
)  # fmt: skip


def request(**values: Any) -> RuntimeRequest:
    return RuntimeRequest(**{"run_id": "demo", **values})


def host(size: int, name: str = "MemAvailable") -> MemoryBudget:
    return MemoryBudget(kind="host", budget_bytes=size, binding_limit=name)


@pytest.mark.parametrize(
    ("zero_stage", "rows", "measured_mib"),
    [(0, 1, 3281), (0, 4, 3622), (1, 1, 4443), (1, 4, 4554), (1, 16, 7141), (2, 1, 3952), (2, 4, 4629), (3, 1, 5204), (3, 4, 6049)],
)
def test_prediction_is_within_a_quarter_of_the_measured_peak(zero_stage: int, rows: int, measured_mib: int) -> None:
    """VmHWM of SmolLM2-135M, float32, DeepSpeed 0.19.8 on a CPU, fused AdamW, rows of 128 tokens, second step of each shape."""
    asked = request(training={"global_batch_size": rows}, parallel={"zero_stage": zero_stage})
    predicted = estimate_memory(SMOLLM2, asked, "float32", micro_batch_rows=rows)["training_peak_per_rank"]
    assert abs(predicted / (measured_mib * MIB) - 1) < 0.10


EIGHT = {"rank": 8}


@pytest.mark.parametrize(
    ("zero_stage", "rows", "length", "lora", "measured_mib"),
    [
        (0, 1, 128, EIGHT, 1233),
        (0, 4, 128, EIGHT, 2307),
        (1, 1, 128, EIGHT, 1257),
        (1, 4, 128, EIGHT, 2338),
        (2, 4, 128, EIGHT, 2315),
        (3, 4, 128, EIGHT, 2525),
        (1, 4, 256, EIGHT, 3728),
        (1, 4, 128, EIGHT | {"target_modules": ["q_proj", "v_proj"]}, 1876),
        (1, 4, 128, {"rank": 64, "dropout": 0.1}, 2987),
    ],
)
def test_prediction_for_adapters_is_within_a_quarter_of_the_measured_peak(
    zero_stage: int, rows: int, length: int, lora: dict[str, Any], measured_mib: int
) -> None:
    """Adapters on a model of the same sizes (`tests/benchmarks/adapter_memory.py`): steps 3 and 4 of each shape."""
    asked = request(
        model={"lora": lora}, data={"sequence_length": length}, training={"global_batch_size": rows}, parallel={"zero_stage": zero_stage}
    )
    predicted = estimate_memory(SMOLLM2, asked, "float32", micro_batch_rows=rows)["training_peak_per_rank"]
    assert abs(predicted / (measured_mib * MIB) - 1) < 0.15


def test_checkpoint_and_resume_sizes_match_what_was_written_and_read() -> None:
    """2,053 MiB on disk at stage 1, 1,540 at stage 0; loading in a fresh process peaked at 3,092 MiB."""
    stage1 = estimate_memory(SMOLLM2, request(parallel={"zero_stage": 1}), "float32")
    stage0 = estimate_memory(SMOLLM2, request(parallel={"zero_stage": 0}), "float32")
    assert abs(stage1["checkpoint"] / (2053 * MIB) - 1) < 0.01
    assert abs(stage0["checkpoint"] / (1540 * MIB) - 1) < 0.01
    assert abs(stage1["resume_peak_total"] / (3092 * MIB) - 1) < 0.05


@pytest.mark.parametrize(("zero_stage", "measured_mib"), [(1, 3360), (3, 4766)])
def test_two_ranks_share_what_their_stage_shards(zero_stage: int, measured_mib: int) -> None:
    """Larger of two gloo ranks, 2 rows of 128 tokens each."""
    asked = request(training={"global_batch_size": 4}, parallel={"zero_stage": zero_stage, "num_ranks": 2})
    sizes = estimate_memory(SMOLLM2, asked, "float32", micro_batch_rows=2)
    assert abs(sizes["training_peak_per_rank"] / (measured_mib * MIB) - 1) < 0.10
    assert sizes["training_peak_total"] == 2 * sizes["training_peak_per_rank"]


@pytest.mark.parametrize(("zero_stage", "measured_mib"), [(1, 2065), (3, 2340)])
def test_resume_of_two_ranks_is_what_was_measured(zero_stage: int, measured_mib: int) -> None:
    """Peak of each of two ranks in a fresh process, while it read its files; the checkpoint is as large as with one rank."""
    one = estimate_memory(SMOLLM2, request(parallel={"num_ranks": 1, "zero_stage": zero_stage}), "float32")
    two = estimate_memory(SMOLLM2, request(parallel={"num_ranks": 2, "zero_stage": zero_stage}), "float32")
    assert abs(two["resume_peak_total"] / (2 * measured_mib * MIB) - 1) < 0.05
    assert two["checkpoint"] == pytest.approx(one["checkpoint"], rel=1e-6)


def test_a_save_behind_training_keeps_the_old_state_and_warns_where_both_do_not_fit() -> None:
    """The kernel kills right after a save, when the writer's copy and the next step's peak meet."""
    sizes = estimate_memory(SMOLLM2, request(), "float32")
    assert sizes["save_copy_total"] == SMOLLM2.num_parameters * (4 + 12 + 4)
    between = sizes["training_peak_total"] + sizes["save_copy_total"] // 2
    findings = {finding.check: finding for finding in memory_findings(SMOLLM2, request(), "float32", "cpu", (host(between),), 1)}
    assert findings["memory.training"].severity == "ok"
    assert findings["memory.save"].severity == "warning"


def test_a_stage_3_checkpoint_holds_no_separate_weights() -> None:
    """1,540 MiB on disk with two ranks."""
    sizes = estimate_memory(SMOLLM2, request(parallel={"num_ranks": 2, "zero_stage": 3}), "float32")
    assert abs(sizes["checkpoint"] / (1540 * MIB) - 1) < 0.01


def test_logits_dominate_where_the_vocabulary_is_large() -> None:
    sizes = estimate_memory(SMOLLM2, request(), "float32", micro_batch_rows=8)
    assert sizes["logits"] == 8 * 128 * 49_152 * 4 * 3


def test_activation_checkpointing_lora_and_bfloat16_each_need_less() -> None:
    plain = estimate_memory(SMOLLM2, request(), "float32", micro_batch_rows=8)["training_peak_per_rank"]
    recomputed = estimate_memory(SMOLLM2, request(model={"activation_checkpointing": "on"}), "float32", micro_batch_rows=8)
    adapters = estimate_memory(SMOLLM2, request(model={"lora": {"rank": 8}}), "float32", micro_batch_rows=8)
    half = estimate_memory(SMOLLM2, request(), "bfloat16", micro_batch_rows=8)
    assert max(sizes["training_peak_per_rank"] for sizes in (recomputed, adapters, half)) < plain
    assert trained_parameters(SMOLLM2, request(model={"lora": {"rank": 8}})) == 2_442_240, "as peft counts them"
    named = request(model={"lora": {"rank": 8, "target_modules": ["q_proj", "o_proj"]}})
    assert trained_parameters(SMOLLM2, named) == 30 * 2 * 2 * 576 * 8


def test_offload_moves_the_optimizer_from_device_to_host() -> None:
    here = estimate_memory(SMOLLM2, request(), "bfloat16", device="cuda")
    offloaded = estimate_memory(SMOLLM2, request(parallel={"offload_optimizer": "cpu"}), "bfloat16", device="cuda")
    assert here["training_peak_per_rank"] - offloaded["training_peak_per_rank"] == here["optimizer"]
    assert offloaded["host_peak_total"] - here["host_peak_total"] == here["optimizer"]


def test_at_stage_0_nothing_is_moved_to_the_host_and_no_estimate_says_so() -> None:
    """The engine has no shards to move there; a budget between both numbers was called enough and ended in an OOM."""
    asked = request(parallel={"zero_stage": 0, "offload_optimizer": "cpu"})
    dropped = estimate_memory(SMOLLM2, asked, "bfloat16", device="cuda")
    plain = estimate_memory(SMOLLM2, request(parallel={"zero_stage": 0}), "bfloat16", device="cuda")
    assert dropped == plain
    budget = MemoryBudget(kind="device", budget_bytes=int(plain["training_peak_per_rank"] * 0.5), binding_limit="H200 #0 free")
    findings = memory_findings(SMOLLM2, request(parallel={"zero_stage": 0}), "bfloat16", "cuda", (budget, host(900 * GIB)), 1)
    assert next(finding for finding in findings if finding.check == "memory.training").severity == "failure"


def test_rows_are_the_most_that_fit_and_divide_the_share() -> None:
    asked = request(training={"global_batch_size": 12})
    sizes = {rows: estimate_memory(SMOLLM2, asked, "float32", micro_batch_rows=rows)["training_peak_total"] for rows in (1, 4, 6)}
    budget = int((sizes[4] + sizes[6]) / 2 / 0.9)
    assert choose_micro_batch_rows(SMOLLM2, asked, "float32", device="cpu", budget_bytes=budget) == 4
    assert choose_micro_batch_rows(SMOLLM2, asked, "float32", device="cpu", budget_bytes=10**15) == 12
    assert choose_micro_batch_rows(SMOLLM2, asked, "float32", device="cpu", budget_bytes=1) == 1
    assert choose_micro_batch_rows(SMOLLM2, request(memory={"micro_batch_size": 2}), "float32", device="cpu", budget_bytes=10**15) == 2


def training_finding(asked: RuntimeRequest, size: int, rows: int) -> Any:
    findings = memory_findings(SMOLLM2, asked, "float32", "cpu", (host(size),), rows)
    return next(finding for finding in findings if finding.check == "memory.training")


def test_what_cannot_fit_even_with_the_estimates_error_is_exit_69_and_says_what_would() -> None:
    asked = request(memory={"mode": "fixed", "micro_batch_size": 8})
    finding = training_finding(asked, 4_600 * MIB, 8)
    assert finding.severity == "warning"
    failed = training_finding(asked, 3_000 * MIB, 8)
    assert (failed.severity, failed.exit_code) == ("failure", 69)
    assert failed.remedy == "What would fit: model.lora: {rank: 8}."
    assert "use a smaller model or a machine with more memory" in training_finding(asked, 900 * MIB, 8).remedy
    assert "MemAvailable" in failed.observed


def test_adaptive_memory_may_still_climb_down_so_only_the_lowest_rung_decides() -> None:
    """Long rows: without activation checkpointing 1 x 4,096 tokens cannot fit, with it they can."""
    asked = request(data={"sequence_length": 4096})
    plain = estimate_memory(SMOLLM2, asked, "float32")["training_peak_total"]
    lowest = estimate_memory(SMOLLM2, asked, "float32", activation_checkpointing=True)["training_peak_total"]
    assert lowest < plain * 0.7
    assert training_finding(asked, lowest, 1).severity == "warning"
    assert training_finding(asked, lowest // 2, 1).severity == "failure"
    fixed = request(data={"sequence_length": 4096}, memory={"mode": "fixed", "micro_batch_size": 1})
    assert training_finding(fixed, lowest, 1).severity == "failure"


def test_the_smallest_limit_binds_and_own_budget_counts() -> None:
    assert smallest_limit("host", {"MemAvailable": 10, "cgroup": 5}).binding_limit == "cgroup"
    assert smallest_limit("host", {"MemAvailable": 10}, 3).binding_limit == "memory.budget"
    assert smallest_limit("host", {}).budget_bytes == 0


def examine(asked: RuntimeRequest, **limits: Any) -> EnvironmentReport:
    seen = MachineObservations(
        num_cores=2,
        versions={"torch": "2.13.0", "deepspeed": "0.19.8"},
        accelerator=AcceleratorObservation(available=False),
        store=StoreObservation(location="/runs"),
        build=BuildObservation(folder="/ext", compiler="g++", ninja="1"),
        **limits,
    )
    return EnvironmentDoctor().examine(asked, seen, SMOLLM2)


def test_a_containers_limit_below_free_ram_binds() -> None:
    """2 GiB of a container on a machine with 900 GiB free: the run must be refused, by the container's name."""
    report = examine(request(), host_limits={"MemAvailable": 900 * GIB, "cgroup v2 /sys/fs/cgroup": 2 * GIB})
    assert report.memory[0].binding_limit == "cgroup v2 /sys/fs/cgroup"
    error = error_of(report)
    assert error is not None
    assert error.exit_code == 69
    assert "2.0 GiB under cgroup v2" in str(error)


def test_an_address_space_limit_is_compared_with_address_space() -> None:
    """The part that a rank maps and never touches is taken off, and each rank has the limit for itself."""
    limits = {"host_limits": {"MemAvailable": 900 * GIB}, "address_space_limits": {"RLIMIT_AS": 8 * GIB}}
    one, two = examine(request(), **limits), examine(request(parallel={"num_ranks": 2}), **limits)
    assert "RLIMIT_AS" in one.memory[0].binding_limit
    assert one.memory[0].budget_bytes < 8 * GIB
    assert two.memory[0].budget_bytes == 2 * one.memory[0].budget_bytes
