"""The last word of a run that no plan lets fit, where the model cannot be read any more."""

from types import SimpleNamespace

from mem_core.domain.environment import EnvironmentReport, ModelNumbers
from mem_core.domain.errors import MemoryExhausted
from mem_core.domain.events import DoctorReported, Noted, SegmentEnded
from mem_core.domain.plan import MemoryPlan
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.segment import Evidence, OutOfMemory
from mem_core.infrastructure.telemetry.progress import NoProgress
from mem_core.runtime.ranks.worker.protocol import WorkerSpec
from mem_core.runtime.session.memory_service import MemoryService
from mem_core.testing.synthetic_run import JournalBuilder


def test_a_remote_model_gets_its_way_out_without_being_fetched_again() -> None:
    """Exit 78 takes the model's sizes from the doctor's report: the folder behind the URL may be gone by then."""
    request = RuntimeRequest.model_validate(
        {"run_id": "far", "store": "/tmp", "model": {"source": "https://models.invalid/far/away"}, "data": {"sequence_length": 512},
         "parallel": {"num_ranks": 2, "zero_stage": 1}}
    )  # fmt: skip
    spec = WorkerSpec(
        request=request, device="cuda", dtype="float32", num_threads=1, data_folder="", validation_folder=None,
        pad_token_id=0, default_plan=MemoryPlan(micro_batch_rows=1),
    )  # fmt: skip
    model = ModelNumbers(num_parameters=10_000_000, num_layers=8, hidden_size=256, vocab_size=32_000)
    report = EnvironmentReport(
        device="cpu", device_reason="", dtype="float32", num_cores=2, threads_per_rank=1, versions={}, memory=(), findings=(), model=model
    )
    journal = SimpleNamespace(lines=JournalBuilder().add(DoctorReported(report=report)).lines.copy)
    failure = OutOfMemory(memory="device", evidence=Evidence(phase="forward", batch_index=3, limit_bytes=3 * 10**9))
    error = MemoryService(spec, journal, NoProgress()).exhausted(failure, MemoryExhausted("out of memory", remedy="None."))  # type: ignore[arg-type]
    assert error.exit_code == 78
    for way in ("One row of 512 tokens", "data.sequence_length: 256", "parallel.offload_optimizer: cpu"):
        assert way in str(error)


def test_memory_in_pieces_gives_new_workers_another_allocator_once() -> None:
    """Used 12.3, reserved 22.3, limit 23.6 GiB: the setting and no smaller plan; a second time, or in a later command, the ladder."""
    request = RuntimeRequest.model_validate({"run_id": "pieces", "store": "/tmp"})
    spec = WorkerSpec(
        request=request, device="cuda", dtype="float32", num_threads=1, data_folder="", validation_folder=None,
        pad_token_id=0, default_plan=MemoryPlan(micro_batch_rows=4),
    )  # fmt: skip
    held = {"used_bytes": round(12.3 * 2**30), "reserved_bytes": round(22.3 * 2**30), "limit_bytes": round(23.6 * 2**30)}
    failure = OutOfMemory(memory="device", evidence=Evidence(phase="forward", batch_index=3, **held))
    said: list[Noted] = []
    service = MemoryService(spec, SimpleNamespace(lines=list, emit=said.append), NoProgress())  # type: ignore[arg-type]
    assert service.configured(spec) == spec
    assert service.can_defragment_after(failure)
    service.defragment_after(failure)
    assert service.configured(spec).allocator_setting == "expandable_segments:True"
    assert "10.0 GiB of 23.6 GiB were reserved and unused" in said[0].text
    assert service.changes == ()
    assert not service.can_defragment_after(failure)
    journal = SimpleNamespace(lines=JournalBuilder().add(SegmentEnded(segment_index=0, outcome=failure)).lines.copy)
    assert not MemoryService(spec, journal, NoProgress()).can_defragment_after(failure)  # type: ignore[arg-type]
