"""A process of one's own for work on data: how it is started, listened to and ended, and what it is on the other side.

One job as a JSON line on its standard input; JSON lines on its standard output: {"progress": ...} while it works, then an answer or
{"error": ...}. It has its own memory and its own core, and dies with its parent: by signal, and by the end of its standard input.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from mem_core.domain import errors
from mem_core.domain.errors import EnvironmentUnfit, InternalError, MemError

Say = Callable[[dict[str, Any]], None]
_PR_SET_PDEATHSIG = 1
_STDERR_LINES = 15
_LOOK_EVERY_MS = 200


class NoAnswer(TimeoutError):
    """The process had not answered when its time was over."""


class NoWord(Exception):
    """The process ended without an answer."""


@contextlib.contextmanager
def started(
    module: str, environ: Mapping[str, str] | None = None, held: Sequence[int] = ()
) -> "Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]":
    """A program in a session of its own, and the file of its complaints; it has ended when the block does. `held`: descriptors that it
    inherits."""
    with tempfile.TemporaryFile() as complaints:
        child = subprocess.Popen(
            [sys.executable, "-P", "-X", "utf8", "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints,
            start_new_session=True, env=None if environ is None else dict(environ), pass_fds=tuple(held),
        )  # fmt: skip
        try:
            yield child, complaints
        finally:
            child.kill()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()
            child.wait()


def ask_child(module: str, job: str, on_progress: Callable[[Any], None] = lambda progress: None, limit_s: float | None = None) -> Any:
    """The answer of a program to a job, both JSON; the process has ended when this returns.

    Raises:
        MemError: what the program met. EnvironmentUnfit: it was killed. InternalError: it ended without an answer. NoAnswer: too late.
    """
    with started(module) as (child, complaints):
        try:
            return converse(child, job, on_progress, limit_s)
        except NoWord:
            raise _died(child, complaints) from None


def converse(child: "subprocess.Popen[bytes]", job: str, on_progress: Callable[[Any], None], limit_s: float | None = None) -> Any:
    """Hand over the job and listen until it is answered.

    Raises:
        MemError: what the program met. NoWord: it ended without an answer. NoAnswer: `limit_s` is over.
    """
    assert child.stdin is not None
    try:
        child.stdin.write(job.encode() + b"\n")
        child.stdin.flush()
    except BrokenPipeError:
        raise NoWord from None
    for message in messages(child, limit_s):
        if "progress" in message:
            on_progress(message["progress"])
        elif "error" in message:
            raise error_from_json(message["error"])
        else:
            return message["answer"]
    raise NoWord


def messages(child: "subprocess.Popen[bytes]", limit_s: float | None = None) -> Iterator[dict[str, Any]]:
    """What the child says, until it has ended: the end of its pipe may never come, where a process that it started holds it open.

    Raises:
        NoAnswer: `limit_s` is over.
    """
    assert child.stdout is not None
    descriptor, waiting, ended = child.stdout.fileno(), b"", False
    until_s = None if limit_s is None else time.monotonic() + limit_s
    os.set_blocking(descriptor, False)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while not ended:
        if until_s is not None and time.monotonic() > until_s:
            raise NoAnswer
        poll.poll(_LOOK_EVERY_MS)
        ended = child.poll() is not None  # asked before the last reading, so that nothing which was said is lost
        for block in _blocks(descriptor):
            ended = ended or not block
            *lines, waiting = (waiting + block).split(b"\n")
            yield from (json.loads(line) for line in lines)


def _blocks(descriptor: int) -> Iterator[bytes]:
    """What can be read without waiting; an empty block is the end."""
    try:
        while block := os.read(descriptor, 65_536):
            yield block
        yield b""
    except BlockingIOError:
        return


def last_lines(complaints: IO[bytes]) -> tuple[str, ...]:
    """What a process that has ended said last."""
    complaints.seek(0)
    return tuple(complaints.read().decode(errors="replace").splitlines()[-_STDERR_LINES:])


def _died(child: "subprocess.Popen[bytes]", complaints: IO[bytes]) -> MemError:
    code, last = child.wait(), "\n".join(last_lines(complaints))
    if code < 0:
        name = signal.Signals(-code).name
        return EnvironmentUnfit(
            f"the tokenising process was killed by {name}",
            remedy="If memory ran out, free some or give smaller files; run again, nothing half-made is used",
        )
    return InternalError(f"the tokenising process ended with code {code}:\n{last}\n", remedy="Report this with the lines above")


def error_from_json(raw: dict[str, Any]) -> MemError:
    """The error that the process met."""
    kind = getattr(errors, str(raw["kind"]), InternalError)
    return kind(raw["problem"], remedy=raw["remedy"], field=raw["field"], value=raw["value"], bound=raw["bound"])


def error_to_json(error: MemError) -> dict[str, Any]:
    """An error on its way to another process."""
    return {
        "kind": type(error).__name__, "problem": error.problem, "remedy": error.remedy,
        "field": error.field, "value": error.value, "bound": error.bound,
    }  # fmt: skip


def answer_parent(work: Callable[[bytes, Say], Any]) -> None:
    """The program's side: read the job, do it, answer, end. `work` gets the job and a way to tell progress; it may print what it likes."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    job = sys.stdin.buffer.readline()
    die_with_parent(int(json.loads(job)["parent_pid"]))
    threading.Thread(target=_leave_at_end_of_input, daemon=True).start()

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")

    try:
        say({"answer": work(job, lambda progress: say({"progress": progress}))})
    except MemError as error:
        say({"error": error_to_json(error)})
    answers.close()
    os._exit(0)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent dies; leave at once if it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(3)


def _leave_at_end_of_input() -> None:
    """Reads the bare descriptor: a thread inside a buffered reader makes the interpreter abort when it ends."""
    while os.read(0, 4_096):
        pass
    os._exit(3)
