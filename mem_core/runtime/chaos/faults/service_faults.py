"""Faults that strike what the run leans on: its disk, the Prefect API, the planner; and those that happen inside a rank by order."""

import contextlib
import errno
import os
import random
import signal
import socket
import subprocess
import time
from pathlib import Path

from mem_core.domain.events import Event, OomAbsorbed, PolicyDecided, SegmentEnded
from mem_core.domain.segment import NonFinite, OutOfMemory, WorkerError
from mem_core.runtime.chaos.faults.faulty_names import ORDERS, order_name
from mem_core.runtime.chaos.faults.scene import Injector, NotNow, NotProven, Scene, Strike, wait_for
from mem_core.runtime.chaos.faults.store_relay import Misbehaviour
from mem_core.runtime.chaos.plan.plan import PlannedFault

ORDER_LIMIT_S = 60.0
PLANNER_LIMIT_S = 120.0
STORE_LIMIT_S = 60.0
REFUSAL_LIMIT_S = 1.0


def ordered(kind: str) -> Injector:
    """A fault inside a rank. Proven by the failure that the run itself classified and journaled afterwards."""

    def inject(scene: Scene, fault: PlannedFault, rng: random.Random) -> Strike:
        scene.training()
        rank = scene.one("rank", rng)
        name = order_name(fault.number, kind, int(rank.role.removeprefix("rank-")))
        folder = scene.view.folder / ORDERS
        if not folder.is_dir():
            raise NotNow("the ranks take no orders yet")
        mark = scene.journal.mark()
        struck_s = time.monotonic()
        (folder / name).touch()
        found = wait_for(lambda: scene.journal.find(lambda event: _shows(event, kind, name.partition(".")[0]), mark), ORDER_LIMIT_S, 0.01)
        (folder / name).unlink(missing_ok=True)
        if found is None:
            raise NotProven("the journal shows no such failure")
        return Strike(struck_s, f"journaled by the run: {_words(found)}")

    return inject


def _shows(event: Event, kind: str, token: str) -> bool:
    if isinstance(event, OomAbsorbed):
        return kind == "failed_allocation"
    if not isinstance(event, SegmentEnded):
        return False
    match event.outcome:
        case WorkerError():
            return token in event.outcome.evidence.exception
        case NonFinite():
            return kind == "nan_batch"
        case OutOfMemory():
            return kind == "failed_allocation"
        case _:
            return False


def _words(event: Event) -> str:
    if isinstance(event, OomAbsorbed):
        return f"out of {event.memory} memory in {event.phase} of batch {event.batch_index}, absorbed"
    assert isinstance(event, SegmentEnded)
    evidence = getattr(event.outcome, "evidence", None)
    return f"{event.outcome.kind} {evidence.exception[:120] if evidence else ''}".strip()


def hostile_planner(scene: Scene, fault: PlannedFault, rng: random.Random) -> Strike:
    """One reply that must be refused as a whole."""
    scene.training()
    if scene.planner is None:
        raise NotNow("no planner is asked")
    mark = scene.journal.mark()
    what = scene.planner.misbehave(fault.salt)
    if not scene.planner.wait_served(PLANNER_LIMIT_S):
        raise NotNow("the planner was not asked")
    struck_s = time.monotonic()
    event = wait_for(lambda: scene.journal.find(lambda item: isinstance(item, PolicyDecided), mark), 30.0, 0.02)
    if not isinstance(event, PolicyDecided):
        raise NotProven("no decision followed the reply")
    return Strike(struck_s, f"served {what}; decided: {event.decision.reason}", time.monotonic())


def store_misbehaves(how: Misbehaviour, expected: tuple[str, ...]) -> Injector:
    """The object store is away for some seconds, and at least until the run itself has met it."""

    def inject(scene: Scene, fault: PlannedFault, rng: random.Random) -> Strike:
        scene.training()
        if scene.relay is None:
            raise NotNow("no object store is used through a relay")
        struck_s = time.monotonic()
        scene.relay.misbehave(how)
        try:
            seen = scene.relay.probe()
            met = wait_for(lambda: scene.relay is not None and scene.relay.refused > 1, STORE_LIMIT_S, 0.02)
            time.sleep(max(0.0, scene.outage_s - (time.monotonic() - struck_s)))
            refused = scene.relay.refused - 1
        finally:
            scene.relay.misbehave(None)
        if not met:
            raise NotNow("the run did not ask the store")
        if seen not in expected:
            raise NotProven(f"a stranger got {seen} from the store")
        lasted_s = time.monotonic() - struck_s
        return Strike(
            struck_s, f"a stranger got {seen}, and {refused} connections of the run met the same in {lasted_s:.0f} s", time.monotonic()
        )

    return inject


# -- Prefect ------------------------------------------------------------------------------------------------------------------


def prefect_away(scene: Scene, fault: PlannedFault, rng: random.Random) -> Strike:
    """The API stops answering for some seconds; connections are taken and nothing comes back."""
    scene.training()
    server = scene.one("prefect", rng)
    struck_s = time.monotonic()
    scene.stop_process(server)
    try:
        answered = _answers(server.port or 0)
        time.sleep(scene.outage_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.pid, signal.SIGCONT)
    if answered:
        raise NotProven("the API answered while its process was stopped")
    return Strike(
        struck_s, f"the API gave no answer within {REFUSAL_LIMIT_S:.0f} s and stayed away for {scene.outage_s:.0f} s", time.monotonic()
    )


def prefect_killed(scene: Scene, fault: PlannedFault, rng: random.Random) -> Strike:
    """The API is gone for good."""
    scene.training()
    server = scene.one("prefect", rng)
    struck_s = scene.kill(server)
    if not wait_for(lambda: not _answers(server.port or 0), 5.0, 0.05):  # its owner keeps the port for the next one
        raise NotProven(f"port {server.port} still answers")
    return Strike(struck_s, f"nobody answers at port {server.port}")


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=REFUSAL_LIMIT_S) as link:
            link.settimeout(REFUSAL_LIMIT_S)
            link.sendall(b"GET /api/health HTTP/1.0\r\n\r\n")
            return bool(link.recv(1))
    except OSError:
        return False


def refuses(port: int) -> bool:
    """Whether nobody listens on a loopback port."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=REFUSAL_LIMIT_S).close()
    except OSError:
        return True
    return False


# -- disk ---------------------------------------------------------------------------------------------------------------------


def read_only_store(scene: Scene, fault: PlannedFault, rng: random.Random) -> Strike:
    """The run folder becomes a read-only mount of itself for some seconds."""
    scene.training()
    folder = scene.view.folder
    struck_s = time.monotonic()
    _mount("--bind", str(folder), str(folder))
    try:
        _mount("-o", "remount,bind,ro", str(folder))
        refused = _refusal(folder)
        time.sleep(scene.outage_s)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)
    if refused != errno.EROFS:
        raise NotProven("a file could be created in the read-only folder")
    return Strike(struck_s, f"creating a file failed with EROFS; read-only for {scene.outage_s:.0f} s", time.monotonic())


def full_disk(scene: Scene, fault: PlannedFault, rng: random.Random) -> Strike:
    """The run's own small disk is filled to the last byte for some seconds."""
    scene.training()
    if not scene.own_disk:
        raise NotNow("the run has no small disk of its own")
    ballast = scene.view.folder / "ballast"
    struck_s = time.monotonic()
    try:
        refused = _fill(ballast)
        time.sleep(scene.outage_s)
    finally:
        ballast.unlink(missing_ok=True)
    if refused != errno.ENOSPC:
        raise NotProven("the disk never said that it was full")
    return Strike(struck_s, f"a write failed with ENOSPC; full for {scene.outage_s:.0f} s", time.monotonic())


def _fill(path: Path) -> int | None:
    block, refused = bytes(1 << 20), None
    with path.open("wb", buffering=0) as file:
        for size in (len(block), 4_096, 1):
            try:
                for _ in range(1 << 20):
                    file.write(block[:size])
            except OSError as exc:
                refused = exc.errno
    return refused


def _refusal(folder: Path) -> int | None:
    probe = folder / ".probe"
    try:
        probe.touch()
    except OSError as exc:
        return exc.errno
    probe.unlink()
    return None


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)
