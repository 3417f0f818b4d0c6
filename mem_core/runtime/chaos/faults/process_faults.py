"""Faults that strike processes: killed, stopped, slowed, starved. All by signals and limits from outside."""

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from mem_core.domain.events import Event, SegmentEnded
from mem_core.runtime.chaos.faults.scene import Injector, NotNow, NotProven, Scene, Strike, wait_for
from mem_core.runtime.chaos.faults.view import SeenProcess, process_state
from mem_core.runtime.chaos.plan.plan import PlannedFault

HANG_FOUND_LIMIT_S = 120.0
SAVE_WINDOW_S = 120.0
BURSTS, BURST_S = 8, 0.1
BALLAST_SHARE, BALLAST_MAX_BYTES = 0.25, 1 << 30
BALLAST_PROGRAM = "import sys,time; block=bytearray(b'1')*int(sys.argv[1]); time.sleep(float(sys.argv[2]))"
TINY_FILE_BYTES = 4_096


def kill_role(role: str) -> Injector:
    """SIGKILL of one process of a role."""

    def inject(scene: Scene, fault: PlannedFault, rng: random.Random) -> Strike:
        scene.training()
        process = scene.one(role, rng)
        struck_s = scene.kill(process)
        return Strike(struck_s, f"{process.role} (pid {process.pid}) was alive and is gone after SIGKILL")

    return inject


def kill_all_ranks(scene: Scene, fault: PlannedFault, rng: random.Random) -> Strike:
    """SIGKILL of every rank at once."""
    scene.training()
    ranks = scene.view.find("rank")
    if not ranks:
        raise NotNow("no rank is alive")
    struck_s = [scene.kill(rank) for rank in ranks if rank.alive()]
    if not struck_s:
        raise NotNow("the ranks are gone")
    return Strike(struck_s[0], f"{len(struck_s)} ranks were alive and are gone after SIGKILL")


def kill_flow(scene: Scene, fault: PlannedFault, rng: random.Random) -> Strike:
    """SIGKILL of the flow."""
    scene.training()
    struck_s, code = scene.kill_flow()
    return _killed(struck_s, code, "while steps were being done")


def _killed(struck_s: float, code: int, when: str) -> Strike:
    if code != -signal.SIGKILL:
        raise NotProven(f"the flow ended with {code} and not by SIGKILL")
    return Strike(struck_s, f"the flow's exit status is SIGKILL, {when}")


def interrupt_flow(scene: Scene, fault: PlannedFault, rng: random.Random) -> Strike:
    """SIGTERM of the flow: it commits and leaves with 75."""
    scene.training()
    struck_s, code = scene.kill_flow(signal.SIGTERM)
    if code != 75:
        raise NotProven(f"the flow ended with {code} after SIGTERM, not with 75")
    return Strike(struck_s, f"the flow left with exit code 75 {time.monotonic() - struck_s:.1f} s after SIGTERM")


def kill_writer(scene: Scene, fault: PlannedFault, rng: random.Random) -> Strike:
    """SIGKILL of the process that a rank forked for its snapshot."""
    scene.training()
    rank = scene.one("rank", rng)
    children = Path(f"/proc/{rank.pid}/task/{rank.pid}/children")

    def writer() -> SeenProcess | None:
        found = [int(pid) for pid in children.read_text().split()] if rank.alive() else []
        return _seen(found[0], rank.role.replace("rank", "writer")) if found else None

    process = wait_for(writer, SAVE_WINDOW_S, poll_s=0.001)
    if process is None:
        raise NotNow("no snapshot was written")
    struck_s = scene.kill(process)
    return Strike(struck_s, f"{process.role} (pid {process.pid}) was writing a snapshot and is gone after SIGKILL")


def _seen(pid: int, role: str) -> SeenProcess | None:
    from mem_core.infrastructure.machine.process_facts import start_ticks

    start = start_ticks(pid)
    return None if start is None else SeenProcess(pid, start, role)


def kill_rank_in_save(scene: Scene, fault: PlannedFault, rng: random.Random) -> Strike:
    """SIGKILL of a rank while engine files lie half-written in staging."""
    scene.training()
    rank = scene.one("rank", rng)
    files = wait_for(scene.view.staged_files, SAVE_WINDOW_S, poll_s=0.001)
    if not files:
        raise NotNow("nothing was staged")
    struck_s = scene.kill(rank)
    return Strike(struck_s, f"{rank.role} was killed with {len(files)} file(s) in staging, such as {files[0].name}")


def kill_flow_in_save(scene: Scene, fault: PlannedFault, rng: random.Random) -> Strike:
    """SIGKILL of the flow while engine files lie in staging."""
    scene.training()
    files = wait_for(scene.view.staged_files, SAVE_WINDOW_S, poll_s=0.001)
    if not files:
        raise NotNow("nothing was staged")
    struck_s, code = scene.kill_flow()
    return _killed(struck_s, code, f"with {len(files)} file(s) in staging")


def kill_flow_in_commit(scene: Scene, fault: PlannedFault, rng: random.Random) -> Strike:
    """SIGKILL of the flow between a manifest and its verdict."""
    scene.training()
    folder = scene.view.folder

    def unjudged() -> Path | None:
        manifests = [*folder.glob("staging/attempt-*/save-*/manifest.json"), *folder.glob("checkpoints/step-*/manifest.json")]
        return next((path for path in manifests if not (path.parent / "verdict.json").exists()), None)

    manifest = wait_for(unjudged, SAVE_WINDOW_S, poll_s=0.001)
    if manifest is None:
        raise NotNow("nothing was committed")
    struck_s, code = scene.kill_flow()
    return _killed(struck_s, code, f"with {manifest.parent.name} committed or about to be, and no verdict when it was aimed at")


def hang_rank(scene: Scene, fault: PlannedFault, rng: random.Random) -> Strike:
    """SIGSTOP of a rank; supervision has to find and replace it."""
    scene.training()
    rank = scene.one("rank", rng)
    struck_s = time.monotonic()
    scene.stop_process(rank)
    if not wait_for(lambda: not rank.alive(), HANG_FOUND_LIMIT_S):
        raise NotProven(f"{rank.role} stood in state T for {HANG_FOUND_LIMIT_S:.0f} s and nobody replaced it")
    return Strike(struck_s, f"{rank.role} was seen in state T and was replaced {time.monotonic() - struck_s:.1f} s later")


def slow_rank(scene: Scene, fault: PlannedFault, rng: random.Random) -> Strike:
    """A rank that gets half of its time."""
    scene.training()
    rank = scene.one("rank", rng)
    struck_s = time.monotonic()
    for _ in range(BURSTS):
        scene.stop_process(rank)
        time.sleep(BURST_S)
        if rank.alive():
            _continue(rank)
        time.sleep(BURST_S)
    return Strike(struck_s, f"{rank.role} was seen in state T {BURSTS} times for {BURST_S:.1f} s", time.monotonic())


def freeze_flow(scene: Scene, fault: PlannedFault, rng: random.Random) -> Strike:
    """SIGSTOP of the flow; workers train on and it must take up where they are."""
    scene.training()
    flow = scene.one("flow", rng)
    struck_s = time.monotonic()
    scene.stop_process(flow)
    time.sleep(scene.outage_s)
    still = process_state(flow.pid)
    _continue(flow)
    if still != "T":
        raise NotProven(f"the flow was in state {still} at the end of the freeze")
    return Strike(struck_s, f"the flow stood in state T for {scene.outage_s:.1f} s", time.monotonic())


def _continue(process: SeenProcess) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGCONT)


def memory_pressure(scene: Scene, fault: PlannedFault, rng: random.Random) -> Strike:
    """A process that holds memory for some seconds."""
    scene.training()
    available_bytes = _meminfo_bytes("MemAvailable")
    size_bytes = min(int(available_bytes * BALLAST_SHARE), BALLAST_MAX_BYTES)
    struck_s = time.monotonic()
    ballast = subprocess.Popen([sys.executable, "-c", BALLAST_PROGRAM, str(size_bytes), str(scene.outage_s)])
    resident = wait_for(lambda: _resident_bytes(ballast.pid) >= size_bytes and _resident_bytes(ballast.pid), 60.0)
    ballast.wait()
    if not resident:
        raise NotProven(f"the ballast never held {size_bytes} bytes")
    return Strike(struck_s, f"a ballast process held {resident / 2**20:.0f} MiB resident for {scene.outage_s:.1f} s", time.monotonic())


def _meminfo_bytes(name: str) -> int:
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def write_limit(scene: Scene, fault: PlannedFault, rng: random.Random) -> Strike:
    """RLIMIT_FSIZE on the ranks from outside: the kernel refuses to let a file grow, as a quota does."""
    scene.training()
    ranks = scene.view.find("rank")
    mark = scene.journal.mark()
    struck_s = time.monotonic()
    try:
        for rank in ranks:
            _, hard = resource.prlimit(rank.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (TINY_FILE_BYTES, hard))
    except ProcessLookupError as exc:
        raise NotNow("a rank is gone") from exc
    event = wait_for(lambda: scene.journal.find(_save_failed, mark), SAVE_WINDOW_S, poll_s=0.02)
    for rank in ranks:
        if rank.alive():
            _, hard = resource.prlimit(rank.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (hard, hard))
    if event is None:
        raise NotProven("no save failed under the limit")
    return Strike(struck_s, f"a save failed: {event.outcome.evidence.exception[:120]}", time.monotonic())  # type: ignore[union-attr]


def _save_failed(event: Event) -> bool:
    return isinstance(event, SegmentEnded) and event.outcome.kind == "save_failed"
