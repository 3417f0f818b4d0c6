"""Starting `mem` in the background, killing it at a moment seen in its run folder, and finding what it left behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import psutil

MEM = Path(sys.executable).with_name("mem")
WAIT_S = 600.0  # a deadline for a machine that does ten other things, not an expectation


class BackgroundMem:
    """A `mem` command of its own session whose descendants are known. Output goes to files, so that no pipe keeps anybody waiting."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self._out: BinaryIO = (folder / "out.txt").open("wb")
        self._err: BinaryIO = (folder / "err.txt").open("wb")
        self.process = subprocess.Popen(
            [str(MEM), *arguments], cwd=folder, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err, start_new_session=True
        )

    def wait_for(self, moment: Callable[[], bool], poll_s: float = 0.001) -> None:
        """Return when the moment has come; fail if the command ends first."""
        end = time.monotonic() + WAIT_S
        while not moment():
            assert self.process.poll() is None, f"it ended before the moment came: {self.error_text()}"
            assert time.monotonic() < end, f"the moment never came: {self.error_text()}"
            time.sleep(poll_s)

    def descendants(self) -> list[psutil.Process]:
        """Every process that it started and that still lives."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def kill(self, whole_tree: bool) -> list[psutil.Process]:
        """SIGKILL to its process group, or to every descendant as well; returns the descendants of that moment."""
        family = self.descendants()
        os.killpg(self.process.pid, signal.SIGKILL)
        for member in family if whole_tree else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        self.process.wait(timeout=10)
        self._close()
        return family

    def finish(self, timeout_s: float = WAIT_S) -> dict[str, Any]:
        """Wait for a good end; returns the object on standard output."""
        code = self.process.wait(timeout=timeout_s)
        self._close()
        assert code == 0, self.error_text()
        return json.loads((self.folder / "out.txt").read_text())

    def wait_code(self, timeout_s: float = WAIT_S) -> int:
        """Wait for whatever end; returns the exit code."""
        code = self.process.wait(timeout=timeout_s)
        self._close()
        return code

    def error_text(self) -> str:
        """What it said to people so far."""
        return (self.folder / "err.txt").read_text(errors="replace")[-2000:]

    def _close(self) -> None:
        self._out.close()
        self._err.close()


def alive(process: psutil.Process) -> bool:
    """Whether it runs: a zombie that nobody has collected yet does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def marked_processes(run_folder: Path) -> list[int]:
    """Processes that carry the run's mark in their environment, as the doctor looks for them."""
    mark = f"MEM_RUN_FOLDER={run_folder.absolute()}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def survivors(family: list[psutil.Process], run_folder: Path, grace_s: float = 5.0) -> list[str]:
    """What still runs after a grace: descendants of a killed command and everything with the run's mark."""
    end = time.monotonic() + grace_s
    while True:
        left = [f"{member.pid}" for member in family if alive(member)] + [str(pid) for pid in marked_processes(run_folder)]
        if not left or time.monotonic() >= end:
            return left
        time.sleep(0.02)


def events(run_folder: Path, attempt: int | None = None) -> list[dict[str, Any]]:
    """Journaled events of one attempt or of all; a line that is being written is left out."""
    name = "attempt-*.jsonl" if attempt is None else f"attempt-{attempt:04d}.jsonl"
    found = []
    for path in sorted((run_folder / "journal").glob(name)):
        for raw in path.read_bytes().split(b"\n")[:-1]:
            found.append(json.loads(raw)["event"])
    return found


def num_attempts(run_folder: Path) -> int:
    """How many times the run was taken up."""
    return len(list((run_folder / "journal").glob("attempt-*.jsonl")))


def validated_step(run_folder: Path) -> int:
    """Highest step with a verdict that says valid."""
    steps = [int(path.parent.name.removeprefix("step-")) for path in (run_folder / "checkpoints").glob("step-*/verdict.json")]
    return max(steps, default=0)
