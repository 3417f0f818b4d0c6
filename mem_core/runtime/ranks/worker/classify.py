"""Exceptions become outcomes here and nowhere else, by type first and by wording only where a type does not exist."""

import errno
import re
import signal
import traceback
from collections.abc import Sequence
from typing import Literal

from mem_core.core.memory.control import GROWN_SHARE
from mem_core.core.memory.ladder import MicroBatch
from mem_core.domain.segment import Evidence, OutOfMemory, Phase, Refusal, SaveFailed, SegmentFailure, WorkerError, WorkerLost
from mem_core.runtime.ranks.port import Heartbeat

LAST_FRAMES, LAST_LINES = 6, 20
NEAR_LIMIT = 0.9  # a process killed with its peak above this part of the limit was probably killed for memory

# CPU and vendor allocators raise bare RuntimeErrors. Each pattern was read in the source that raises it.
_HOST_ALLOCATOR = re.compile(
    r"DefaultCPUAllocator: (can't allocate memory|not enough memory)|[Cc]annot allocate memory|std::bad_alloc|"
    r"unable to (mmap|open shared memory)[^\n]*(Cannot allocate|ENOMEM)|could not create a memory"
)
_DEVICE_ALLOCATOR = re.compile(
    r"CUDA out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDA error: out of memory|CUDNN_STATUS_ALLOC_FAILED|NCCL.*out of memory|"
    r"HIP out of memory|NVML_SUCCESS == r INTERNAL ASSERT FAILED"
)
# What gloo and NCCL say on the ranks that are left when a peer is gone; read in the messages that real kills produced.
_PEER_GONE = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|[Rr]emote process exited|Socket (closed|Timeout)|"
    r"Timed out waiting|connect\w* timed? ?out|peer (is )?(gone|down)|ncclRemoteError|NCCL communicator was aborted|unhandled system error"
)
# Phases whose errors are about what a process finds when it begins. `restore` is not among them: there the checkpoint is the suspect.
_BEGINNING = ("start", "op_build", "calibrate", "first_step", "forward", "backward", "step")
# Units and order as torch 2 prints them; what it could not tell is missing.
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
_DEVICE_TOTAL = re.compile(rf"total capacity of {_SIZE} of which {_SIZE} is free")
_DEVICE_HELD = re.compile(rf"{_SIZE} is allocated by PyTorch.*?{_SIZE} is reserved by PyTorch but unallocated", re.DOTALL)
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_HOST_DEATH = ("DefaultCPUAllocator", "MemoryError", "std::bad_alloc", "Cannot allocate memory")


def memory_kind(exc: BaseException) -> Literal["host", "device"] | None:
    """Which memory ran out where the exception is a failed allocation, else None. A shape error is not one.

    torch raises `OutOfMemoryError` for devices, a bare RuntimeError for host memory and for what cuBLAS and NCCL could not get.
    """
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


def says_peer_gone(text: str) -> bool:
    """Whether these are the words of a rank that lost another one."""
    return _PEER_GONE.search(text) is not None


def _may_pass(exc: BaseException) -> bool:
    """Whether the next process may be spared this error: what a store, a peer or a drill has done. Distributed errors of torch are
    RuntimeErrors, told by their names."""
    name = type(exc).__name__
    return isinstance(exc, OSError | EOFError) or name.startswith(("Dist", "Injected")) or says_peer_gone(str(exc))


def device_evidence(text: str) -> dict[str, int]:
    """What torch's message says of the device at the failed allocation: used, reserved and the most this process could reserve.

    Empty where it does not say. Other processes' memory is no part of the limit.
    """
    total, held = _DEVICE_TOTAL.search(text), _DEVICE_HELD.search(text)
    if total is None or held is None:
        return {}
    free, used, idle = (round(float(number) * _UNITS[unit]) for number, unit in (total.groups()[2:], held.groups()[:2], held.groups()[2:]))
    return {"used_bytes": used, "reserved_bytes": used + idle, "limit_bytes": used + idle + free}


def classify(
    exc: BaseException,
    rank: int,
    phase: str,
    batch_index: int,
    *,
    failed: MicroBatch | None = None,
    peak_bytes: int | None = None,
    steps_done: bool = True,
) -> SegmentFailure:
    """The outcome that an exception in a rank stands for, with its evidence. `failed` is the forward pass it happened in.

    `steps_done`: whether this process had applied a step before.
    """
    outcome = getattr(exc, "outcome", None)
    if outcome is not None:
        return outcome
    known: Phase = phase if phase in Phase.__args__ else "step"  # type: ignore[attr-defined,assignment]
    text = f"{type(exc).__name__}: {exc}"[:2000]
    evidence = Evidence(
        rank=rank, phase=known, batch_index=batch_index, exception=text, peak_bytes=peak_bytes, last_lines=_own_traceback(exc)
    )
    memory = memory_kind(exc)
    if memory is not None:
        size = {"failed_rows": failed.rows, "failed_length": failed.length} if failed and known in ("forward", "backward") else {}
        held = device_evidence(text) if memory == "device" else {}
        return OutOfMemory(memory=memory, evidence=evidence.model_copy(update=size | held))
    if phase == "save" and isinstance(exc, OSError):
        return SaveFailed(evidence=evidence)
    lasting = not steps_done and known in _BEGINNING and not _may_pass(exc)
    return WorkerError(evidence=evidence, refusal=Refusal.of(exc), before_any_step=lasting)


def with_growth(evidence: Evidence, steps: Sequence[tuple[Heartbeat, Heartbeat] | None]) -> Evidence:
    """The evidence of a death with how far the processes had grown, from the first and last beat after a step of each rank.

    As a rank would say it of itself, had it been asked: a process that is killed tells nobody.
    """
    spans = [span for span in steps if span is not None]
    if not spans or not evidence.limit_bytes:
        return evidence
    growth = sum(last.memory_bytes - first.memory_bytes for first, last in spans)
    done = max(last.batch_index - first.batch_index + 1 for first, last in spans)
    return evidence.model_copy(update={"grown": growth >= GROWN_SHARE * evidence.limit_bytes, "process_steps": done})


def classify_death(evidence: Evidence, *, oom_kills: int = 0) -> OutOfMemory | WorkerLost:
    """The outcome of a rank process that ended without a word, from what was seen from outside.

    SIGKILL is the kernel's OOM killer where its counter rose meanwhile (`oom_kills`), and probably where the last peak was near
    the limit; a SIGKILL with neither came from somebody else. An abort after the allocator's last words is memory too.
    """
    words = "\n".join(evidence.last_lines)
    if evidence.signal == "SIGKILL":
        near = bool(evidence.limit_bytes and evidence.peak_bytes and evidence.peak_bytes >= NEAR_LIMIT * evidence.limit_bytes)
        if oom_kills > 0:
            return _killed("killed by the kernel's OOM killer", evidence)
        if near:
            return _killed("killed by SIGKILL, probably for host memory", evidence)
    elif any(word in words for word in _HOST_DEATH):
        return OutOfMemory(memory="host", evidence=evidence)
    return WorkerLost(cause=evidence.signal or f"exit code {evidence.exit_code}", evidence=evidence)


def classify_server_death(exit_code: int | None, last_lines: tuple[str, ...], rank: int) -> WorkerError | WorkerLost:
    """The outcome of a rank that was never forked, since the server that forks died at its imports or was killed.

    `exit_code` is the server's: negative for a signal. What its own log ends with is the exception that it died of.
    """
    signal_name = signal.Signals(-exit_code).name if exit_code is not None and exit_code < 0 else ""
    evidence = Evidence(rank=rank, phase="start", exit_code=exit_code, signal=signal_name, last_lines=last_lines)
    if signal_name or not last_lines:
        how = signal_name or f"exit code {exit_code}"
        return WorkerLost(cause=f"{how} of the process that forks the ranks", evidence=evidence)
    words = next((line.strip() for line in reversed(last_lines) if line.strip()), "")
    return WorkerError(evidence=evidence.model_copy(update={"exception": words[:2000]}), before_any_step=True)


def _own_traceback(exc: BaseException) -> tuple[str, ...]:
    """The last lines of the traceback, for people who do not see the rank's log."""
    lines = "".join(traceback.format_exception(exc, limit=-LAST_FRAMES)).splitlines()
    return tuple(line[:500] for line in lines[-LAST_LINES:])


def _killed(how: str, evidence: Evidence) -> OutOfMemory:
    from mem_core.domain.units import format_bytes

    peak = format_bytes(evidence.peak_bytes) if evidence.peak_bytes else "unknown"
    limit = format_bytes(evidence.limit_bytes) if evidence.limit_bytes else "unknown"
    return OutOfMemory(memory="host", evidence=evidence.model_copy(update={"exception": f"{how}; peak {peak} of limit {limit}"}))
