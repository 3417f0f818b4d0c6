"""What an exception or a silent death stands for: by type, phase and memory, with evidence; a wrong shape is not out of memory."""

import errno
from typing import Any

import pytest
import torch

from mem_core.core.memory.diagnosis import failed_in_pieces
from mem_core.core.memory.ladder import MicroBatch
from mem_core.domain.segment import Evidence, OutOfMemory, SaveFailed, WorkerError, WorkerLost
from mem_core.runtime.ranks.worker.classify import classify, classify_death, memory_kind
from mem_core.testing.memory_faults import IN_PIECES

GIB = 2**30
CPU_ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 16777216 bytes. "
    "Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("exc", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "device"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "device"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "device"),
        (RuntimeError("NCCL error: unhandled cuda error, ncclUnhandledCudaError: Cuda failure 2 'out of memory'"), "device"),
        (RuntimeError(CPU_ALLOCATOR), "host"),
        (RuntimeError("std::bad_alloc"), "host"),
        (MemoryError(), "host"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "host"),
        (OSError(errno.ENOSPC, "No space left on device"), None),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x64 and 65x8)"), None),
        (RuntimeError("CUDA error: device-side assert triggered"), None),
        (ValueError("you ran out of memory"), None),
        (AssertionError(), None),
    ],
)
def test_memory_kind(exc: BaseException, expected: str | None) -> None:
    """By type where there is one, by wording only where the allocator raises a bare RuntimeError."""
    assert memory_kind(exc) == expected


def test_a_real_failed_allocation_is_host_memory() -> None:
    """The allocator of this very torch, not a sentence copied from it."""
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**46, dtype=torch.float32)
    assert memory_kind(error.value) == "host"


@pytest.mark.parametrize("phase", ["calibrate", "forward", "backward", "step", "save", "restore", "evaluate"])
def test_the_phase_is_kept(phase: str) -> None:
    """The phase decides what is done about it, and only passes carry the size that failed."""
    failure = classify(RuntimeError(CPU_ALLOCATOR), 1, phase, 7, failed=MicroBatch(2, 64), peak_bytes=5)
    assert isinstance(failure, OutOfMemory)
    assert (failure.memory, failure.evidence.phase, failure.evidence.rank, failure.evidence.batch_index) == ("host", phase, 1, 7)
    assert failure.evidence.failed_rows == (2 if phase in ("forward", "backward") else None)
    assert failure.evidence.peak_bytes == 5


def test_other_failures() -> None:
    """A full disk in a save is a failed save; anything else is an error in the worker."""
    assert isinstance(classify(OSError(errno.ENOSPC, "No space left"), 0, "save", 3), SaveFailed)
    assert isinstance(classify(ValueError("shape"), 0, "forward", 3), WorkerError)


def test_a_failed_allocation_with_room_in_pieces_is_fragmentation() -> None:
    """What torch says of the device is kept as numbers; gigabytes that are reserved and unused are told from a pass too large."""
    failure = classify(torch.OutOfMemoryError(IN_PIECES), 0, "forward", 7, failed=MicroBatch(4, 2_048))
    seen = failure.evidence
    assert (seen.used_bytes, seen.reserved_bytes, seen.limit_bytes) == (round(12.3 * GIB), round(22.3 * GIB), round(23.64 * GIB))
    assert failed_in_pieces(failure)
    full = IN_PIECES.replace("12.30 GiB is allocated", "22.10 GiB is allocated").replace("10.00 GiB is reserved", "205.00 MiB is reserved")
    assert not failed_in_pieces(classify(torch.OutOfMemoryError(full), 0, "forward", 7))
    assert not failed_in_pieces(classify(torch.OutOfMemoryError("CUDA out of memory."), 0, "forward", 7))
    assert not failed_in_pieces(classify(RuntimeError(CPU_ALLOCATOR), 0, "forward", 7))


def death(**values: Any) -> Evidence:
    """Evidence of a rank that is gone."""
    return Evidence(rank=0, phase="step", batch_index=9, **values)


def test_a_kill_with_memory_evidence_is_out_of_memory() -> None:
    """The kernel's counter, or a peak near the limit, each with the numbers in words."""
    counted = classify_death(death(signal="SIGKILL", peak_bytes=10, limit_bytes=1_000), oom_kills=1)
    assert isinstance(counted, OutOfMemory)
    assert "OOM killer" in counted.evidence.exception
    near = classify_death(death(signal="SIGKILL", peak_bytes=95 * 2**20, limit_bytes=100 * 2**20))
    assert isinstance(near, OutOfMemory)
    assert near.evidence.exception == "killed by SIGKILL, probably for host memory; peak 95.0 MiB of limit 100.0 MiB"


@pytest.mark.parametrize(
    ("evidence", "cause"),
    [
        (death(signal="SIGKILL", peak_bytes=10, limit_bytes=1_000), "SIGKILL"),
        (death(signal="SIGKILL"), "SIGKILL"),
        (death(signal="SIGSEGV", peak_bytes=99, limit_bytes=100), "SIGSEGV"),
        (death(exit_code=3), "exit code 3"),
    ],
)
def test_a_kill_without_memory_evidence_is_a_lost_worker(evidence: Evidence, cause: str) -> None:
    """Somebody else's SIGKILL must not shrink anything."""
    failure = classify_death(evidence)
    assert isinstance(failure, WorkerLost)
    assert failure.cause == cause


def test_an_abort_after_the_allocators_last_words_is_memory() -> None:
    """std::terminate after bad_alloc leaves SIGABRT and a line in the log."""
    aborted = classify_death(death(signal="SIGABRT", last_lines=("terminate called after throwing an instance of 'std::bad_alloc'",)))
    assert isinstance(aborted, OutOfMemory)
