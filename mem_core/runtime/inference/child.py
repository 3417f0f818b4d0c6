"""A process for inference, from its owner's side: started with an environment of its own, listened to, and judged when it dies."""

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

from mem_core.domain.segment import Evidence, OutOfMemory
from mem_core.infrastructure.machine.memory_probe import take_snapshot
from mem_core.runtime.data.child import error_from_json, messages
from mem_core.runtime.ranks.worker.classify import classify_death

SILENCE_LIMIT_S = 1_800.0  # of a process that tells of every token; only the loading and the first pass of a batch are long
_LAST_LINES = 15


@dataclass(frozen=True)
class Died:
    """The process ended without an answer. `memory`: for want of memory, as far as can be seen from outside; `killed`: by a signal."""

    how: str
    memory: bool
    killed: bool
    last_lines: tuple[str, ...]

    def words(self) -> str:
        """How, and its last words."""
        said = "\n".join(self.last_lines)
        return f"{self.how}{f', its last lines:{chr(10)}{said}' if said else ''}"


@dataclass
class Child:
    """A program that is given a job and answers once. `told` is the newest of what it has said of itself."""

    program: str
    environ: Mapping[str, str]
    held: Sequence[int] = ()
    told: dict[str, Any] = field(default_factory=dict[str, Any])

    def ask(self, job: str, on_told: Callable[[dict[str, Any]], None]) -> Any | Died:
        """The answer to a job, or how the process died; it has ended when this returns.

        Raises:
            MemError: what the program met.
        """
        with tempfile.TemporaryFile() as complaints:
            process = subprocess.Popen(
                [sys.executable, "-P", "-X", "utf8", "-m", self.program],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, start_new_session=True, env=dict(self.environ),
                pass_fds=tuple(self.held),
            )  # fmt: skip
            kills_before = take_snapshot([]).oom_kills
            try:
                return self._listen(process, job, on_told, complaints, kills_before)
            finally:
                process.kill()
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        pipe.close()
                process.wait()

    def _listen(
        self, process: "subprocess.Popen[bytes]", job: str, on_told: Callable[[dict[str, Any]], None], complaints: IO[bytes], kills: int
    ) -> Any | Died:
        assert process.stdin is not None
        try:
            process.stdin.write(job.encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return self._died(process, complaints, kills)
        with _watched(process) as heard:
            for message in messages(process):
                heard()
                if "progress" in message:
                    self.told = message["progress"]
                    on_told(self.told)
                elif "error" in message:
                    raise error_from_json(message["error"])
                else:
                    return message["answer"]
        return self._died(process, complaints, kills)

    def _died(self, process: "subprocess.Popen[bytes]", complaints: IO[bytes], kills_before: int) -> Died:
        """A process that was killed with its peak near the limit was killed for memory, and so was one that said so last."""
        code = process.wait()
        complaints.seek(0)
        lines = tuple(complaints.read().decode(errors="replace").splitlines()[-_LAST_LINES:])
        name = signal.Signals(-code).name if code < 0 else ""
        evidence = Evidence(
            exit_code=code, signal=name, peak_bytes=self.told.get("peak_bytes") or None, limit_bytes=self.told.get("limit_bytes") or None,
            last_lines=lines,
        )  # fmt: skip
        judged = classify_death(evidence, oom_kills=take_snapshot([]).oom_kills - kills_before)
        how = f"killed by {name}" if name else f"ended with code {code}"
        return Died(how, isinstance(judged, OutOfMemory), bool(name), lines)


@contextmanager
def _watched(process: "subprocess.Popen[bytes]") -> Iterator[Callable[[], None]]:
    """Kills a process that is silent for too long; what is given is to be called for each word of it."""
    heard_s, over = [time.monotonic()], threading.Event()

    def watch() -> None:
        while not over.wait(1.0):
            if time.monotonic() - heard_s[0] > SILENCE_LIMIT_S:
                process.kill()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: heard_s.__setitem__(0, time.monotonic())
    finally:
        over.set()
        thread.join()
