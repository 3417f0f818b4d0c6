"""Snapshots of the engine's state that hardly stall training.

DeepSpeed's own `save_checkpoint` builds the state and hands each file to a checkpoint engine. This one only collects them;
`write_forked` then forks the worker: the child sees the state frozen by copy-on-write and writes it while the parent trains
on. On CUDA a process cannot be forked after the device is in use, so the state is copied to host memory and written by a thread.
"""

import errno
import json
import os
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from mem_core.infrastructure.machine.process_ties import die_with_parent, first_to_be_killed
from mem_core.runtime.deepspeed.trainable import weights_digest
from mem_core.runtime.ranks.worker.protocol import Saved


class CollectingCheckpointEngine(CheckpointEngine):
    """Takes DeepSpeed's files as references and loads only what `weights_only` with an allow-list can load."""

    def __init__(self, safe_classes: list[Any]) -> None:
        super().__init__()
        self.name = "mem"
        self.collected: list[tuple[dict[str, Any], str]] = []
        self._safe_classes = safe_classes

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing is made: the staging folder is there already, and where it is not, the store has gone away and must not be made anew."""

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a checkpoint."""
        self.collected = []

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        """Remember one file; nothing is written yet."""
        self.collected.append((state_dict, path))

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one file without executing any pickle that is not on the allow-list."""
        with torch.serialization.safe_globals(self._safe_classes):
            return torch.load(path, map_location=map_location, weights_only=True)

    def commit(self, info: CheckpointCommitInfo) -> bool:  # type: ignore[override] - annotated None there, read as a bool
        """Nothing to do: proof and publication are the checkpoint manager's."""
        return True

    def preserves_storage_sharing(self) -> bool:  # type: ignore[override] - annotated as always True there
        """Tensors are cloned out of shared flat buffers in the writer, not here on the critical path."""
        return False

    def take(self) -> list[tuple[dict[str, Any], str]]:
        """Hand over what was collected."""
        files, self.collected = self.collected, []
        return files


class Snapshot:
    """State of one step on its way to disk. `write` returns at once; `on_saved` is called from a thread when all is written."""

    def __init__(
        self,
        step: int,
        files: list[tuple[dict[str, Any], str]],
        digest_tensors: list[tuple[str, torch.Tensor]],
        weights_digest: str,
        on_saved: Callable[[Saved], None],
    ) -> None:
        self._step = step
        self._files = files
        self._digest_tensors = digest_tensors
        self._weights_digest = weights_digest
        self._on_saved = on_saved
        self._started_s = time.monotonic()
        self._thread: threading.Thread | None = None

    def write_forked(self, room_bytes: int) -> None:
        """Fork; the child writes and reports through a pipe, a thread of the parent waits for it.

        `room_bytes` of resident memory are left. Each page that training writes meanwhile is copied, the whole state in the end (a
        control group counts it though no process seems to grow), and the child clones what lies in larger buffers.

        Raises:
            OSError: ENOMEM, no room for it.
        """
        if _writer_bytes(self._files) > room_bytes:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        read_fd, write_fd = os.pipe()
        parent_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            os.close(read_fd)
            os.close(write_fd)
            raise
        if pid == 0:
            _child_main(parent_pid, write_fd, self)
        os.close(write_fd)
        self._release()
        self._thread = threading.Thread(target=self._await_child, args=(pid, read_fd), name="snapshot-writer", daemon=True)
        self._thread.start()

    def write_foreground(self) -> None:
        """Write here and now: where memory does not suffice for another process, training waits instead."""
        self._write_here()

    def write_threaded(self) -> None:
        """Copy device tensors to the host, then write from a thread."""
        self._files = [(_to_host(state), path) for state, path in self._files]
        self._digest_tensors = [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in self._digest_tensors]
        self._thread = threading.Thread(target=self._write_here, name="snapshot-writer", daemon=True)
        self._thread.start()

    def write_files(self) -> dict[str, Any]:
        """Write everything; returns the reply's fields."""
        for state, path in self._files:
            torch.save(_compact(state, {}), path)
        digest = self._weights_digest or (weights_digest(self._digest_tensors) if self._digest_tensors else "")
        return {"weights_digest": digest}

    def _write_here(self) -> None:
        try:
            self._report(self.write_files())
        except OSError as exc:
            self._report({"error": f"{type(exc).__name__}: {exc}", "errno": exc.errno})
        except Exception as exc:  # noqa: BLE001 - becomes a SaveFailed outcome with its text
            self._report({"error": f"{type(exc).__name__}: {exc}"})
        finally:
            self._release()

    def _await_child(self, pid: int, read_fd: int) -> None:
        with os.fdopen(read_fd, "rb") as pipe:
            text = pipe.read()
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0 or not text:
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            self._report({"error": f"the writer process ended by {name}"})
        else:
            self._report(json.loads(text))

    def _report(self, fields: dict[str, Any]) -> None:
        self._on_saved(Saved(step=self._step, duration_s=time.monotonic() - self._started_s, **fields))

    def _release(self) -> None:
        self._files, self._digest_tensors = [], []


def _child_main(parent_pid: int, write_fd: int, snapshot: Snapshot) -> None:
    """The forked writer: one thread, no collectives, leaves without running any of the parent's exit handlers."""
    code = 1
    try:
        die_with_parent(parent_pid)
        torch.set_num_threads(1)  # the parent's thread pool does not exist in this process
        os.nice(5)  # the next segment trains meanwhile
        first_to_be_killed()  # a lost save costs less than a lost rank
        fields = snapshot.write_files()
        code = 0
    except OSError as exc:
        fields = {"error": f"{type(exc).__name__}: {exc}", "errno": exc.errno}
    except BaseException as exc:  # noqa: BLE001 - last frame of a process; reported through the pipe
        fields = {"error": f"{type(exc).__name__}: {exc}"}
    try:
        os.write(write_fd, json.dumps(fields).encode())
    finally:
        os._exit(code)


def _compact(value: Any, clones: dict[tuple[Any, ...], torch.Tensor]) -> Any:
    """Clone tensors that view a larger buffer, since torch.save writes whole storages; tied weights stay one tensor."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        if storage.nbytes() == value.numel() * value.element_size():
            return value
        key = (storage.data_ptr(), value.storage_offset(), value.shape, value.stride(), value.dtype)
        if key not in clones:
            clones[key] = value.detach().clone()
        return clones[key]
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _compact(item, clones)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_compact(item, clones) for item in value)
    return value


def _writer_bytes(value: Any) -> int:
    """Resident memory that a forked writer of nested state leads to: copies of its pages, and clones of what `_compact` clones."""
    if isinstance(value, torch.Tensor):
        size = value.numel() * value.element_size()
        return size if value.untyped_storage().nbytes() == size else 2 * size
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(_writer_bytes(item) for item in items)


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _to_host(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_to_host(item) for item in value)
    return value
