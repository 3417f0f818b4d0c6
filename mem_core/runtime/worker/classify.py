"""Exceptions become outcomes here and nowhere else, by type first and by wording only where a type does not exist."""

import errno
import re

from mem_core.domain.segment import Evidence, OutOfMemory, Phase, SaveFailed, SegmentFailure, WorkerError

# CPU and vendor allocators raise bare RuntimeErrors. Each pattern was read in the source that raises it.
_HOST_ALLOCATOR = re.compile(r"DefaultCPUAllocator: (can't allocate memory|not enough memory)|Cannot allocate memory|std::bad_alloc")
_DEVICE_ALLOCATOR = re.compile(
    r"CUDA out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDA error: out of memory|NCCL.*out of memory|HIP out of memory"
)


def memory_kind(exc: BaseException) -> str | None:
    """ "host" or "device" where the exception is a failed allocation, else None. A shape error is not one."""
    if type(exc).__name__ == "OutOfMemoryError" and isinstance(exc, RuntimeError):
        return "device"
    if isinstance(exc, MemoryError):
        return "host"
    if isinstance(exc, OSError):
        return "host" if exc.errno == errno.ENOMEM else None
    if isinstance(exc, RuntimeError):
        text = str(exc)
        if _DEVICE_ALLOCATOR.search(text):
            return "device"
        if _HOST_ALLOCATOR.search(text):
            return "host"
    return None


def classify(exc: BaseException, rank: int, phase: str, batch_index: int) -> SegmentFailure:
    """The outcome that an exception in a rank stands for, with its evidence."""
    outcome = getattr(exc, "outcome", None)
    if outcome is not None:
        return outcome
    known: Phase = phase if phase in Phase.__args__ else "step"  # type: ignore[attr-defined,assignment]
    text = f"{type(exc).__name__}: {exc}"[:2000]
    evidence = Evidence(rank=rank, phase=known, batch_index=batch_index, exception=text)
    memory = memory_kind(exc)
    if memory == "device" or memory == "host":
        return OutOfMemory(memory=memory, evidence=evidence)
    if phase == "save" and isinstance(exc, OSError):
        return SaveFailed(evidence=evidence)
    return WorkerError(evidence=evidence)
