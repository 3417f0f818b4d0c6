"""I4 by exhaustion: the machine dies at every changing storage call of stage, commit, validate, rotate and takeover.

Bytes that were not synced are lost, in five ways. The journal's lines are durable one by one, and what is found is held against them.

Mutants of the protocol (no fsync, no digest check, delete before validate, manifests that the journal was not told of before they could
be seen) must be caught by the same checker.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mem_core.core.run.belonging import CheckpointWords
from mem_core.domain.checkpoint import (
    CheckpointDraft,
    CheckpointExpectation,
    CheckpointManifest,
    CheckpointVerdict,
    TrainingPosition,
)
from mem_core.domain.errors import NoValidCheckpoint
from mem_core.domain.events import CheckpointSealed, Event
from mem_core.domain.request import CheckpointSection
from mem_core.infrastructure.storage.disk import Disk, remove_tree
from mem_core.runtime.checkpoint_manager import CheckpointManager
from mem_core.runtime.checkpoint_manager.inspection.file_checks import check_files
from mem_core.runtime.checkpoint_manager.inspection.manifest_codec import encode_manifest, sha256_hex
from mem_core.runtime.checkpoint_manager.ports import CheckpointScope
from mem_core.testing.checkpoint_run import manager_of
from mem_core.testing.memory_disk import LOSSES, CrashAt, Crashed, Loss, MemoryDisk

RUN = Path("/store/demo")
BIRTH = {"training.seed": 0, "data": "d", "model": "m"}
SHARDS = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")


@dataclass
class Protocol:
    """The protocol under test, or a mutant of it."""

    disk: type[MemoryDisk] = MemoryDisk
    check_digests: bool = True
    delete_before_validate: bool = False
    announce: bool = True


@dataclass
class History:
    """What the outside world was promised."""

    committed: int = 0
    proven: int = 0
    condemned: set[int] = field(default_factory=set)
    events: list[Event] = field(default_factory=list)

    def later(self) -> "History":
        """The same promises and the same journal, for whoever starts next."""
        return History(self.committed, self.proven, set(self.condemned), list(self.events))

    @property
    def promised(self) -> int:
        """I4: the newest valid checkpoint is at least this step."""
        return self.committed


class NoFileSync(MemoryDisk):
    """Mutant: data is never synced."""

    def sync_file(self, path: Path) -> None:
        pass


class NoFolderSync(MemoryDisk):
    """Mutant: names are never synced."""

    def sync_folder(self, path: Path) -> None:
        pass


def judge(disk: Disk, check_digests: bool, folder: Path, manifest: CheckpointManifest, previous: str, level: Any) -> CheckpointVerdict:
    reasons = check_files(disk, folder, manifest) if check_digests else ()
    if manifest.weights_digest.startswith("bad"):
        reasons = (*reasons, "not finite")
    digest = sha256_hex(encode_manifest(manifest))
    return CheckpointVerdict(step=manifest.step, level=level, valid=not reasons, reasons=reasons, weights_bad=False, manifest_sha256=digest)


def open_manager(disk: MemoryDisk, attempt: int, history: History, protocol: Protocol, key: bytes | None = None) -> CheckpointManager:
    scope = CheckpointScope(RUN, "demo", attempt, CheckpointSection(keep_last=1), CheckpointExpectation(num_ranks=1, zero_stage=1), BIRTH)
    words = CheckpointWords(history.events)

    def emit(event: Event) -> None:
        if protocol.announce or not isinstance(event, CheckpointSealed):
            history.events.append(event)
            words.add(event)

    return manager_of(
        scope, functools.partial(judge, disk, protocol.check_digests), emit=emit, words=words, disk=disk, scan=lambda path: (),
        clock=lambda: float(len(history.events)), signature_key=key,  # a step that is saved again has another manifest
    )  # fmt: skip


def content(name: str, step: int) -> bytes:
    return f"{name} of step {step}, long enough to be cut in half".encode()


def save(disk: MemoryDisk, manager: CheckpointManager, step: int, history: History, protocol: Protocol, *, bad: bool = False) -> None:
    staging = manager.new_staging(step)
    for name in SHARDS:
        disk.write(staging / name, content(name, step))
    position = TrainingPosition(applied_steps=step, batch_index=step)
    manager.commit(step, staging, CheckpointDraft(position=position, weights_digest=f"bad-{step}" if bad else f"digest-{step}"))
    if bad:
        history.condemned.add(step)
    else:
        history.committed = max(history.committed, step)
    if protocol.delete_before_validate:
        for info in manager.listing():
            if info.step < step and info.state != "quarantined":
                remove_tree(disk, Path(info.folder))
    manager.validate(step)
    manager.rotate()


def train(disk: MemoryDisk, history: History, protocol: Protocol) -> None:
    """One attempt: good saves, a redone one, a bad one, a good one again; then a second attempt takes over and goes on."""
    first = open_manager(disk, 1, history, protocol)
    for step in (1, 2, 2):
        save(disk, first, step, history, protocol)
    save(disk, first, 3, history, protocol, bad=True)
    disk.write(first.new_staging(4) / SHARDS[0], b"half a save that nobody will finish")
    second = open_manager(disk, 2, history, protocol)
    second.newest_valid()
    save(disk, second, 3, history, protocol)
    second.pin(3)
    save(disk, second, 4, history, protocol)


def violation(disk: MemoryDisk, history: History, protocol: Protocol, attempt: int = 9) -> str:
    """Resume on what the next boot found; says which promise was broken, or ""."""
    manager = open_manager(disk, attempt, history, protocol)
    try:
        newest = manager.newest_valid(recheck=protocol.check_digests)
    except NoValidCheckpoint as exc:
        return f"promised {history.promised}, none valid: {exc}" if history.promised else ""
    step = newest.step if newest else 0
    if step < history.promised:
        return f"promised {history.promised}, resumed {step}"
    wrong = [name for name in SHARDS if newest and disk.read(manager.path_of(step) / name) != content(name, step)]
    if wrong:
        return f"resumed step {step} with wrong bytes in {wrong}"
    save(disk, manager, step + 5, history, Protocol())
    after = manager.newest_valid()
    return "" if after and after.step == step + 5 else "the run could not go on after the crash"


def count_operations(act: Callable[[MemoryDisk, History, Protocol], None], protocol: Protocol) -> int:
    disk = fresh_disk(protocol)
    before = disk.operations
    act(disk, History(), protocol)
    return disk.operations - before


def fresh_disk(protocol: Protocol) -> MemoryDisk:
    disk = protocol.disk()
    disk.make_folder(RUN, parents=True)
    for folder in (Path("/"), *reversed(RUN.parents[:-1]), RUN):
        MemoryDisk.sync_folder(disk, folder)
    return disk


def crash(point: int, protocol: Protocol) -> tuple[MemoryDisk, History, bool]:
    """Train until the machine dies at a point. Returns the disk as it was, what had been promised, and whether it died."""
    disk, history = fresh_disk(protocol), History()
    hook = CrashAt(point)
    disk.before = hook
    with contextlib.suppress(Crashed, NoValidCheckpoint):  # a mutant may end itself; the checker then finds the promise broken
        train(disk, history, protocol)
    disk.before = None
    return disk, history, hook.crashed


def violations(protocol: Protocol, losses: tuple[Loss, ...] = LOSSES, damage: bool = False) -> tuple[int, list[str]]:
    """(number of crashes tried, promises broken) over every crash point and every kind of loss."""
    points = count_operations(train, protocol) if not protocol.delete_before_validate else 400
    tried, broken = 0, []
    for point in range(points + 1):
        disk, history, crashed = crash(point, protocol)
        for loss in losses:
            survivor = disk.after_crash(loss)
            promised = history.later()
            if damage:
                rot_newest(survivor, promised)
            found = violation(survivor, promised, protocol)
            tried += 1
            if found:
                broken.append(f"point {point}, loss {loss}: {found}")
        if not crashed:
            break
    return tried, broken


def rot_newest(disk: MemoryDisk, history: History) -> None:
    """Silent damage of the newest checkpoint's first file; what remains promised is whatever lies below, intact or nothing."""
    names = sorted(path for path in disk.files() if path.startswith(f"{RUN}/checkpoints/") and path.endswith(SHARDS[0]))
    if names:
        disk.damage(Path(names[-1]))
    history.committed = 0


def test_crash_at_every_point_breaks_no_promise() -> None:
    """0 violations over every changing call × 5 kinds of loss, and the run goes on afterwards."""
    tried, broken = violations(Protocol())
    assert broken == []
    assert tried > 700


def test_silent_damage_after_the_crash_is_never_resumed() -> None:
    """The newest checkpoint rots after its verdict: its bytes are never handed out."""
    _, broken = violations(Protocol(), losses=("kill", "strict"), damage=True)
    assert broken == []


@pytest.mark.parametrize("loss", ["kill", "strict", "torn"])
def test_crash_during_recovery_from_a_crash(loss: Loss) -> None:
    """Every 7th first crash × every second crash inside the takeover that follows it."""
    broken: list[str] = []
    for point in range(0, count_operations(train, Protocol()), 7):
        disk, history, _ = crash(point, Protocol())
        for second in range(200):
            survivor = disk.after_crash(loss)
            hook = CrashAt(second)
            survivor.before = hook
            with contextlib.suppress(Crashed, NoValidCheckpoint):
                open_manager(survivor, 8, again := history.later(), Protocol()).newest_valid()
            if not hook.crashed:
                break
            survivor.before = None
            found = violation(survivor.after_crash(loss), again, Protocol())
            if found:
                broken.append(f"points {point}, {second}: {found}")
        else:
            raise AssertionError("recovery has more than 200 changing calls")
    assert broken == []


@pytest.mark.parametrize(
    ("mutant", "damage"),
    [
        pytest.param(Protocol(disk=NoFileSync), False, id="no fsync of files"),
        pytest.param(Protocol(disk=NoFolderSync), False, id="no fsync of folders"),
        pytest.param(Protocol(check_digests=False), True, id="no digest check"),
        pytest.param(Protocol(delete_before_validate=True), False, id="delete before validate"),
        pytest.param(Protocol(announce=False), False, id="no word before it is seen"),
    ],
)
def test_mutants_are_caught(mutant: Protocol, damage: bool) -> None:
    """The checker has teeth: each weakened protocol breaks a promise somewhere."""
    _, broken = violations(mutant, damage=damage)
    assert broken


def test_signed_checkpoints_survive_crashes_as_well() -> None:
    """The signature file is part of the commit: every other crash point, strict loss."""
    history = History()
    disk = fresh_disk(Protocol())
    manager = open_manager(disk, 1, history, Protocol(), key=b"k")
    save(disk, manager, 1, history, Protocol())
    survivor = disk.after_crash("strict")
    newest = open_manager(survivor, 2, history.later(), Protocol(), key=b"k").newest_valid()
    assert newest is not None
    assert newest.step == 1
