"""Faults that strike files: checkpoints, journal, lease, build locks. Proven by the bytes before and after."""

import hashlib
import json
import os
import random
import time
from pathlib import Path

from mem_core.core.run.lease import believed_lease
from mem_core.runtime.chaos.faults.scene import Injector, NotNow, NotProven, Scene, Strike, wait_for
from mem_core.runtime.chaos.plan.plan import PlannedFault

LOCK_LIFE_S = 180.0
DAY_S = 86_400.0


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "absent"


def _flip(path: Path, rng: random.Random) -> str:
    offset, bit = rng.randrange(path.stat().st_size), rng.randrange(8)
    with path.open("r+b") as file:
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ (1 << bit)]))
    return f"bit {bit} of byte {offset} flipped"


def _truncate(path: Path, rng: random.Random) -> str:
    size = path.stat().st_size
    keep = rng.randrange(size)
    os.truncate(path, keep)
    return f"cut from {size} to {keep} bytes"


def _delete(path: Path, rng: random.Random) -> str:
    path.unlink()
    return "removed"


DAMAGES = {"flip_checkpoint": _flip, "truncate_checkpoint": _truncate, "delete_checkpoint_file": _delete}


def damage_checkpoint(kind: str) -> Injector:
    """Damage a file of the newest proven checkpoint, then kill a rank, so that a restore meets it."""
    damage = DAMAGES[kind]

    def inject(scene: Scene, fault: PlannedFault, rng: random.Random) -> Strike:
        scene.training()
        valid = scene.view.valid_checkpoints()
        rank = scene.one("rank", rng)
        if len(valid) < 2:
            raise NotNow("there is no older checkpoint to fall back to")
        files = sorted(path for path in valid[-1].rglob("*") if path.is_file() and path.suffix != ".json" and path.stat().st_size)
        if not files:
            raise NotNow("the newest checkpoint is being rotated away")
        target = rng.choice(files)
        before = _sha256(target)
        what = damage(target, rng)
        after = _sha256(target)
        struck_s = scene.kill(rank)
        if before == after:
            raise NotProven(f"{target.name} has the same bytes as before")
        return Strike(struck_s, f"{valid[-1].name}/{target.name}: {what}; SHA-256 {before[:12]} became {after[:12]}; {rank.role} killed")

    return inject


def cut_journal(scene: Scene, fault: PlannedFault, rng: random.Random) -> Strike:
    """Kill the flow and cut the last journal line, as a crash in mid-write does."""
    scene.training()
    with scene.gate:
        struck_s, _ = scene.kill_flow()
        newest = max((scene.view.folder / "journal").glob("attempt-*.jsonl"))
        size, before = newest.stat().st_size, _sha256(newest)
        last_line = newest.read_bytes().rstrip(b"\n").rpartition(b"\n")[2]
        os.truncate(newest, size - 1 - rng.randrange(max(1, len(last_line) - 1)))
        after = _sha256(newest)
    if before == after:
        raise NotProven("the journal has the same bytes as before")
    return Strike(struck_s, f"{newest.name} cut from {size} to {newest.stat().st_size} bytes under a killed flow")


def future_lease(scene: Scene, fault: PlannedFault, rng: random.Random) -> Strike:
    """Kill the flow and leave its lease as a clock that was a day ahead would have written it."""
    scene.training()
    path = believed_lease(scene.view.folder)
    with scene.gate:
        struck_s, _ = scene.kill_flow()
        before = _sha256(path)
        lease = json.loads(path.read_text())
        lease["since_unix_s"] += DAY_S
        lease["expires_unix_s"] += DAY_S
        path.write_text(json.dumps(lease))
        after = _sha256(path)
    if before == after:
        raise NotProven("the lease has the same bytes as before")
    return Strike(struck_s, f"the lease of the killed flow ran {DAY_S:.0f} s into the future")


def stale_build_lock(scene: Scene, fault: PlannedFault, rng: random.Random) -> Strike:
    """Leave a lock of a builder that does not exist in the op folder, then kill the flow: its next start must not wait for ever."""
    scene.training()
    lock = scene.op_folder / f"chaos_op_{fault.number}" / "lock"
    with scene.gate:
        struck_s, _ = scene.kill_flow()
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
        past = time.time() - 3_600
        os.utime(lock, (past, past))
    removed = wait_for(lambda: not lock.exists(), LOCK_LIFE_S, poll_s=0.05)
    lock.unlink(missing_ok=True)
    lock.parent.rmdir()
    if not removed:
        raise NotProven(f"{lock} was still there {LOCK_LIFE_S:.0f} s later")
    return Strike(struck_s, "the lock was there when the flow started again, and was removed")
