"""A process for inference, from its owner's side: started with an environment of its own, listened to, and judged when it dies."""

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

from mem_core.domain.segment import Evidence, OutOfMemory
from mem_core.infrastructure.machine.memory_probe import take_snapshot
from mem_core.runtime.data.child import NoWord, converse, last_lines, started
from mem_core.runtime.ranks.worker.classify import classify_death

SILENCE_LIMIT_S = 1_800.0  # of a process that tells of every token; only the loading and the first pass of a batch are long


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
        with started(self.program, self.environ, self.held) as (process, complaints):
            kills_before = take_snapshot([]).oom_kills
            with _watched(process) as heard:

                def told(progress: dict[str, Any]) -> None:
                    heard()
                    self.told = progress
                    on_told(progress)

                try:
                    return converse(process, job, told)
                except NoWord:
                    return self._died(process, complaints, kills_before)

    def _died(self, process: "subprocess.Popen[bytes]", complaints: IO[bytes], kills_before: int) -> Died:
        """A process that was killed with its peak near the limit was killed for memory, and so was one that said so last."""
        code = process.wait()
        lines = last_lines(complaints)
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
