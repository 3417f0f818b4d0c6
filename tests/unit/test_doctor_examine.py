"""EnvironmentDoctor.examine: every check in its good and its bad case, with the exit code that it leads to."""

from typing import Any

import pytest

from mem_core.core.doctor.environment_doctor import EnvironmentDoctor, error_of
from mem_core.core.doctor.render import render_report
from mem_core.domain.environment import (
    AcceleratorObservation,
    BuildObservation,
    DataFile,
    DataNumbers,
    DeviceReading,
    EnvironmentReport,
    Finding,
    FolderObservation,
    HolderObservation,
    LockObservation,
    MachineObservations,
    ModelNumbers,
    SavedRun,
    StoreObservation,
)
from mem_core.domain.request import RuntimeRequest

GIB = 2**30
NANO = ModelNumbers(num_parameters=100_000, num_layers=1, hidden_size=64, vocab_size=384, num_heads=4, max_positions=2048)
GPU = AcceleratorObservation(
    available=True, devices=(DeviceReading(name="H200", total_bytes=140 * GIB, free_bytes=139 * GIB, bfloat16=True),), nccl=True
)


def request(**values: Any) -> RuntimeRequest:
    return RuntimeRequest(**{"run_id": "demo", "store": "/runs", **values})


def machine(**changes: Any) -> MachineObservations:
    """A healthy two-core machine without a GPU, and what differs from it."""
    healthy: dict[str, Any] = {
        "num_cores": 2,
        "versions": {"torch": "2.13.0", "deepspeed": "0.19.8"},
        "accelerator": AcceleratorObservation(available=False, reason="Torch not compiled with CUDA enabled"),
        "host_limits": {"MemAvailable": 16 * GIB},
        "store": StoreObservation(location="/runs"),
        "store_folder": FolderObservation(path="/runs", total_bytes=100 * GIB, free_bytes=50 * GIB, free_inodes=10**6),
        "shared_memory": FolderObservation(path="/dev/shm", total_bytes=8 * GIB, free_bytes=8 * GIB),
        "build": BuildObservation(folder="/ext", compiler="g++ 12", ninja="1.13"),
    }
    return MachineObservations(**(healthy | changes))


def examine(asked: RuntimeRequest | None = None, seen: MachineObservations | None = None, **numbers: Any) -> EnvironmentReport:
    return EnvironmentDoctor().examine(asked or request(), seen or machine(), numbers.get("model", NANO), numbers.get("data"))


def found(report: EnvironmentReport, check: str) -> Finding:
    return next(finding for finding in report.findings if finding.check == check)


def code(report: EnvironmentReport) -> int:
    error = error_of(report)
    return 0 if error is None else error.exit_code


def test_a_healthy_machine_has_no_failure_and_no_error() -> None:
    report = examine(request(device="cpu"))
    assert report.failures == ()
    assert error_of(report) is None
    assert (report.device, report.dtype) == ("cpu", "float32")


def test_auto_on_a_cpu_is_one_clear_notice_with_torchs_reason() -> None:
    report = examine()
    notices = [finding for finding in report.findings if finding.check == "accelerator"]
    assert len(notices) == 1
    assert notices[0].severity == "notice"
    assert "TRAINING ON CPU" in notices[0].observed
    assert "not compiled with CUDA" in notices[0].observed


def test_cuda_without_cuda_fails_with_torchs_reason_and_exit_80() -> None:
    report = examine(request(device="cuda"))
    assert code(report) == 80
    assert "not compiled with CUDA" in found(report, "accelerator").observed
    assert report.device_reason.startswith("cuda_unavailable")
    assert report.device == "cpu"


def test_auto_takes_cuda_with_bfloat16_where_it_is() -> None:
    report = examine(seen=machine(accelerator=GPU))
    assert (report.device, report.dtype) == ("cuda", "bfloat16")
    assert {budget.kind for budget in report.memory} == {"host", "device"}


def test_more_ranks_than_gpus_is_refused() -> None:
    assert code(examine(request(parallel={"num_ranks": 2}), machine(accelerator=GPU))) == 69


@pytest.mark.parametrize(
    ("dtype", "flags", "severity", "exit_code"),
    [
        ("auto", (), "ok", 0),
        ("auto", ("avx512_bf16",), "ok", 0),
        ("bfloat16", (), "warning", 0),
        ("bfloat16", ("avx512_bf16",), "ok", 0),
        ("bfloat16", ("amx_bf16",), "ok", 0),
        ("float16", ("avx512_bf16",), "failure", 69),
    ],
)
def test_number_format_on_a_cpu(dtype: str, flags: tuple[str, ...], severity: str, exit_code: int) -> None:
    report = examine(request(model={"dtype": dtype}), machine(cpu_flags=flags))
    assert found(report, "dtype").severity == severity
    assert code(report) == exit_code
    if dtype == "auto":
        assert report.dtype == "float32"


def test_emulated_bfloat16_states_its_cost() -> None:
    assert "10 times" in found(examine(request(model={"dtype": "bfloat16"})), "dtype").needed


def test_threads_share_the_cores_among_ranks() -> None:
    big = NANO.model_copy(update={"num_parameters": 10**8})
    assert examine(request(parallel={"num_ranks": 2}), machine(num_cores=8), model=big).threads_per_rank == 4
    assert examine(seen=machine(num_cores=8), model=NANO).threads_per_rank == 1
    crowded = examine(request(parallel={"num_ranks": 4}), machine(num_cores=2), model=big)
    assert crowded.threads_per_rank == 1
    assert found(crowded, "threads").severity == "warning"


def test_sequence_longer_than_the_model_takes_is_a_request_error() -> None:
    report = examine(request(data={"sequence_length": 4096}))
    assert code(report) == 64
    assert "2048" in str(error_of(report))
    assert "4096" in str(error_of(report))


def test_tokenizer_larger_than_the_embedding_is_a_request_error() -> None:
    assert code(examine(model=NANO.model_copy(update={"tokenizer_vocab_size": 385}))) == 64
    assert code(examine(model=NANO.model_copy(update={"tokenizer_vocab_size": 384}))) == 0


def test_batch_arithmetic_is_explained() -> None:
    report = examine(request(training={"global_batch_size": 8}, parallel={"num_ranks": 2}, memory={"micro_batch_size": 2}))
    assert "8 sequences = 2 ranks x 2 rows x 2 micro-batches" in found(report, "batch").observed


@pytest.mark.parametrize(("warmup_steps", "said"), [(300, True), (201, True), (200, False), (0, False)])
def test_a_warm_up_that_the_run_never_leaves_is_a_notice(warmup_steps: int, said: bool) -> None:
    report = examine(request(training={"max_steps": 200, "warmup_steps": warmup_steps}))
    notices = [finding for finding in report.findings if finding.check == "schedule"]
    assert [finding.severity for finding in notices] == (["notice"] if said else [])
    assert all(f"{warmup_steps}" in finding.observed and "200 steps" in finding.observed for finding in notices)
    assert error_of(report) is None


def test_disk_too_small_for_the_checkpoints_is_exit_73_with_numbers() -> None:
    big = NANO.model_copy(update={"num_parameters": 135_000_000})
    small_disk = FolderObservation(path="/runs", total_bytes=10 * GIB, free_bytes=5 * GIB, free_inodes=10**6)
    report = examine(seen=machine(store_folder=small_disk), model=big)
    assert code(report) == 73
    assert "5 checkpoints of 2.0 GiB" in found(report, "disk").needed


def test_a_resumed_run_needs_room_for_two_more_of_its_own_checkpoints() -> None:
    seen = machine(
        store_folder=FolderObservation(path="/runs", total_bytes=10 * GIB, free_bytes=3 * GIB),
        saved=SavedRun(num_ranks=1, zero_stage=1, step=10, checkpoint_bytes=GIB),
    )
    assert found(examine(seen=seen), "disk").severity == "ok"
    tight = seen.model_copy(update={"saved": SavedRun(num_ranks=1, zero_stage=1, step=10, checkpoint_bytes=2 * GIB)})
    assert code(examine(seen=tight)) == 73


def test_no_free_inodes_is_exit_73() -> None:
    folder = FolderObservation(path="/runs", total_bytes=GIB, free_bytes=50 * GIB, free_inodes=3)
    assert code(examine(seen=machine(store_folder=folder))) == 73


def test_store_that_cannot_be_written_is_exit_73() -> None:
    store = StoreObservation(location="/runs", problem="Permission denied")
    report = examine(seen=machine(store=store))
    assert code(report) == 73
    assert "Permission denied" in str(error_of(report))


def test_relative_store_is_resolved_aloud() -> None:
    store = StoreObservation(location="/home/ada/runs", relative=True)
    assert "/home/ada/runs" in found(examine(request(store="./runs"), machine(store=store)), "store.location").observed


def test_store_finding_prints_the_effective_endpoint() -> None:
    store = StoreObservation(location="s3://bucket/p", local=False, endpoint="http://minio:9000 (AWS_ENDPOINT_URL)")
    assert "http://minio:9000" in found(examine(seen=machine(store=store, store_folder=None)), "store").observed


@pytest.mark.parametrize("folder", [None, FolderObservation(path="/dev/shm", total_bytes=64 * 2**20, free_bytes=64 * 2**20)])
def test_a_containers_small_shared_memory_is_a_warning_for_two_ranks_only(folder: FolderObservation | None) -> None:
    seen = machine(shared_memory=folder)
    assert found(examine(request(parallel={"num_ranks": 2}), seen), "shared_memory").severity == "warning"
    assert not [finding for finding in examine(request(), seen).findings if finding.check == "shared_memory"]


@pytest.mark.parametrize(
    ("data", "severity"),
    [
        (DataNumbers(files=(DataFile(path="a", size_bytes=5),)), "ok"),
        (DataNumbers(), "failure"),
        (DataNumbers(files=(DataFile(path="a", size_bytes=0),)), "failure"),
        (DataNumbers(problems=("gone.txt: no such file",)), "failure"),
        (DataNumbers(files=(DataFile(path="a", size_bytes=5), DataFile(path="b", size_bytes=5, problem="Permission denied"))), "failure"),
    ],
)
def test_first_look_at_the_data(data: DataNumbers, severity: str) -> None:
    report = examine(data=data)
    assert found(report, "data").severity == severity
    assert code(report) == (66 if severity == "failure" else 0)


def test_one_empty_file_among_several_is_a_warning() -> None:
    data = DataNumbers(files=(DataFile(path="a", size_bytes=5), DataFile(path="b", size_bytes=0)))
    assert found(examine(data=data), "data.empty").severity == "warning"
    assert code(examine(data=data)) == 0


def test_a_live_holder_is_exit_76_and_a_dead_one_a_notice() -> None:
    alive = HolderObservation(owner="pid 7 on box", attempt=2, alive=True, expires_in_s=20)
    report = examine(seen=machine(holder=alive))
    assert code(report) == 76
    assert "pid 7 on box" in str(error_of(report))
    dead = alive.model_copy(update={"alive": False})
    assert found(examine(seen=machine(holder=dead)), "holder").severity == "notice"


def test_resuming_with_another_rank_count_is_refused_before_anything_is_loaded() -> None:
    report = examine(request(), machine(saved=SavedRun(num_ranks=2, zero_stage=1, step=500)))
    assert code(report) == 64
    assert "parallel.num_ranks: 2" in found(report, "saved_layout").remedy


@pytest.mark.parametrize(
    "build",
    [
        BuildObservation(folder="/ext", ninja="1.13", compiler_problem="c++: not found"),
        BuildObservation(folder="/ext", compiler="g++ 12", ninja_problem="ninja: not found"),
        BuildObservation(folder="/ext", compiler="g++ 12", ninja="1.13", folder_writable=False),
    ],
)
def test_a_missing_build_tool_stops_only_what_needs_it(build: BuildObservation) -> None:
    """MEM's own engine compiles nothing; torch.compile does."""
    severities = {
        mode: found(examine(request(model={"compile": mode}), machine(build=build)), "build_tools").severity
        for mode in ("on", "auto", "off")
    }
    assert severities == {"on": "failure", "auto": "warning", "off": "ok"}
    assert code(examine(request(model={"compile": "on"}), machine(build=build))) == 69
    assert code(examine(request(), machine(build=build))) == 0


def test_stale_locks_are_named_and_handed_to_the_prepare_step() -> None:
    locks = (
        LockObservation(path="/ext/a/lock", age_s=900, stale=True, reason="no process has it open"),
        LockObservation(path="/ext/b/lock", age_s=5, stale=False, reason="pid 3 builds"),
    )
    report = examine(seen=machine(build=BuildObservation(folder="/ext", compiler="g++", ninja="1", locks=locks)))
    assert report.stale_locks == ("/ext/a/lock",)
    severities = {finding.observed.split(":")[0]: finding.severity for finding in report.findings if finding.check == "ops.lock"}
    assert severities["stale lock /ext/a/lock"] == "warning"
    assert "notice" in severities.values()


@pytest.mark.parametrize(
    "keys",
    [
        {"zero": {"offload_optimizer": {"device": "nvme"}}},
        {"overlap_comm": True},
        {"amp": {"enabled": True}},
        {"nested": {"optimizer": {"params": {"fused": True}}}},
        {"x": {"fp16": {"enabled": True}}},
        {"aio": {"block_size": 1}},
    ],
)
def test_raw_deepspeed_keys_of_no_use_on_a_cpu_are_named_by_path(keys: dict[str, Any]) -> None:
    report = examine(request(deepspeed=keys))
    assert code(report) == 69
    assert f"deepspeed.{next(iter(keys))}" in found(report, "deepspeed").observed


@pytest.mark.parametrize("keys", [{"overlap_comm": False}, {"amp": {"enabled": False}}, {"a": {"device": "none"}}, {"dump_state": True}])
def test_deepspeed_keys_that_are_off_or_harmless_pass(keys: dict[str, Any]) -> None:
    assert code(examine(request(deepspeed=keys))) == 0


def test_versions_other_than_the_tested_ones_are_a_warning_and_missing_ones_a_failure() -> None:
    assert found(examine(seen=machine(versions={"torch": "2.14.0", "deepspeed": "0.19.8"})), "versions").severity == "warning"
    assert code(examine(seen=machine(versions={"torch": "2.13.0"}))) == 69


def test_stale_rank_variables_are_a_notice() -> None:
    assert "RANK" in found(examine(seen=machine(stale_rank_variables=("RANK",))), "rank_variables").observed


def test_the_first_condition_in_the_order_of_exit_codes_decides() -> None:
    """A wrong request outranks a full store, which outranks bad data."""
    seen = machine(store=StoreObservation(location="/runs", problem="full"))
    assert code(examine(seen=seen, data=DataNumbers())) == 73
    assert code(examine(request(data={"sequence_length": 4096}), seen, data=DataNumbers())) == 64


def test_every_failure_has_a_remedy_and_an_exit_code() -> None:
    seen = machine(
        store=StoreObservation(location="/runs", problem="full"),
        versions={},
        build=BuildObservation(folder="/ext"),
        shared_memory=None,
        holder=HolderObservation(owner="x", attempt=1, alive=True),
        host_limits={"MemAvailable": 1},
    )
    report = examine(request(device="cuda", model={"compile": "on"}, parallel={"num_ranks": 2}), seen, data=DataNumbers())
    assert len(report.failures) >= 6
    assert all(finding.remedy and finding.exit_code for finding in report.failures)
    assert all(finding.exit_code == 0 for finding in report.findings if finding.severity != "failure")


def test_the_report_survives_json() -> None:
    report = examine(data=DataNumbers())
    assert EnvironmentReport.model_validate_json(report.model_dump_json()) == report


def test_the_text_names_every_finding_worst_first_and_ends_with_the_verdict() -> None:
    report = examine(request(device="cuda"))
    lines = render_report(report).splitlines()
    assert all(any(finding.check in line for line in lines) for finding in report.findings)
    first = next(line for line in lines[1:] if line.strip())
    assert first.split()[0] == "FAIL"
    assert lines[-1].startswith("This cannot run here: 1 check failed")
    assert render_report(examine()).splitlines()[-1] == "Ready to run."
    assert max(len(line) for line in lines) <= 120


def test_a_home_that_cannot_be_written_is_named_and_ends_with_69() -> None:
    report = examine(seen=machine(home="/home/x/.cache/mem", home_problem="Read-only file system at /home/x"))
    finding = found(report, "home")
    assert (code(report), finding.exit_code) == (69, 69)
    assert "/home/x/.cache/mem cannot be used: Read-only file system" in finding.observed
    assert "MEM_HOME" in finding.remedy
    assert not [finding for finding in examine().findings if finding.check == "home"]
