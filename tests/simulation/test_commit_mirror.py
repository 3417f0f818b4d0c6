"""The mirror by exhaustion: the machine dies at every remote call, or a newer attempt takes over at every remote call."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mem_core.domain.checkpoint import checkpoint_name
from mem_core.domain.errors import NoValidCheckpoint, RunHeld, StoreUnavailable
from mem_core.domain.events import Event, Noted
from mem_core.domain.request import CheckpointSection
from mem_core.infrastructure.storage import LocalStore, Store
from mem_core.runtime.checkpoint_manager import BackgroundMirror, Mirror, restore_from_mirror, resume_point
from mem_core.testing.checkpoint_run import SHARDS, Run, proven
from mem_core.testing.interrupted_store import MOMENTS, InterruptedStore, Moment
from mem_core.testing.memory_disk import Crashed, MemoryDisk


class Clock:
    """A clock that is moved by hand."""

    now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with validated checkpoints of steps 1 to 4."""
    run = Run(tmp_path_factory.mktemp("source") / "demo")
    proven(run.attempt(1), 1, 2, 3, 4)
    return run.folder / "checkpoints"


def fresh_remote() -> LocalStore:
    return LocalStore(Path("/remote"), MemoryDisk())


def mirror_of(
    store: Store, attempt: int, clock: Clock, fence: Callable[[], None] = lambda: None, events: list[Event] | None = None
) -> Mirror:
    emit = events.append if events is not None else lambda event: None
    return Mirror(store, "demo", attempt, CheckpointSection(keep_last=1), fence=fence, emit=emit, lease_s=60, clock=clock)


def push_and_rotate(mirror: Mirror, source: Path, clock: Clock, done: list[int]) -> None:
    """Three checkpoints up, two lease times passing, the older ones deleted."""
    for step in (1, 2, 3):
        mirror.push(source / checkpoint_name(step))
        done.append(step)
        mirror.rotate()
        clock.now += 61
    mirror.rotate()


def restored_step(store: Store, folder: Path, attempt: int, clock: Clock) -> int:
    """What a new machine with an empty disk resumes from; 0 if there is nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    run = Run(folder)
    manager = run.attempt(attempt)
    manifest = resume_point(manager, mirror_of(store, attempt, clock), run.events.append)
    if manifest is None:
        return 0
    for name in SHARDS:
        assert (manager.path_of(manifest.step) / name).read_text() == f"{name} of step {manifest.step} "
    return manifest.step


@pytest.mark.parametrize("moment", MOMENTS)
def test_crash_at_every_remote_call(source: Path, tmp_path: Path, moment: Moment) -> None:
    """What was pushed is restored, whole; leftovers are listed as orphans, bounded by one upload, and gone after the next rotations."""
    for point in range(500):
        remote, clock, done = fresh_remote(), Clock(), []
        store = InterruptedStore(remote, point, moment)
        with contextlib.suppress(Crashed):
            push_and_rotate(mirror_of(store, 1, clock), source, clock, done)
        newest = max(done, default=0)
        step = restored_step(remote, tmp_path / "new", 2, clock)
        assert step >= newest, f"point {point}: pushed {newest}, restored {step}"
        successor = mirror_of(remote, 3, clock)
        assert len(successor.orphans()) <= len(SHARDS) + 1, f"point {point}"
        successor.push(source / checkpoint_name(4))
        for _ in range(3):
            successor.rotate()
            clock.now += 61
        keys = [item.key for item in remote.list("demo")]
        assert sorted(key for key in keys if "/attempts/" not in key) == sorted(
            key for key in keys if checkpoint_name(4) in key and "/attempt-3-" in key
        ), f"point {point}"
        if not store.happened:
            assert point > 30
            return
    raise AssertionError("more than 500 calls")


def test_a_newer_attempt_at_every_remote_call(source: Path, tmp_path: Path) -> None:
    """The old attempt's check of the lease is fooled; what the newer one saw stays whole and what comes late is not believed."""
    for point in range(500):
        remote, clock = fresh_remote(), Clock()
        newer = mirror_of(remote, 2, clock)
        seen: list[tuple[object, ...]] = []

        def take_over(newer: Mirror = newer, seen: list[tuple[object, ...]] = seen) -> None:
            newer.begin()
            newer.push(source / checkpoint_name(4))
            seen.append(newer.available())

        store = InterruptedStore(remote, point, hook=take_over)
        with contextlib.suppress(RunHeld):
            push_and_rotate(mirror_of(store, 1, clock), source, clock, [])
        if not store.happened:
            assert point > 30
            return
        assert newer.available()[0] == seen[0][0], f"point {point}"
        assert set(newer.available()) <= set(seen[0]), f"point {point}: a late publication is believed"
        assert restored_step(remote, tmp_path / "new", 3, clock) == 4, f"point {point}"
    raise AssertionError("more than 500 calls")


def test_an_older_attempt_cannot_begin(source: Path) -> None:
    remote, clock = fresh_remote(), Clock()
    mirror_of(remote, 2, clock).begin()
    for act in (lambda mirror: mirror.begin(), lambda mirror: mirror.push(source / checkpoint_name(1)), lambda mirror: mirror.rotate()):
        with pytest.raises(RunHeld):
            act(mirror_of(remote, 1, clock))
    assert mirror_of(remote, 1, clock).highest_attempt() == 2


def test_two_machines_with_one_attempt_number_have_one_winner(source: Path) -> None:
    """Two new machines counted to the same number: the second is refused; the first may be built again under its own name."""
    remote, clock = fresh_remote(), Clock()
    first = Mirror(remote, "demo", 1, CheckpointSection(), fence=lambda: None, emit=lambda event: None, owner="first", clock=clock)
    first.push(source / checkpoint_name(1))
    with pytest.raises(RunHeld):
        mirror_of(remote, 1, clock).push(source / checkpoint_name(2))
    again = Mirror(remote, "demo", 1, CheckpointSection(), fence=lambda: None, emit=lambda event: None, owner="first", clock=clock)
    assert again.push(source / checkpoint_name(2)).step == 2


def test_nothing_is_deleted_within_a_lease_time(source: Path) -> None:
    """First marked, then deleted: what an attempt marked survives until it must have noticed that it was replaced."""
    remote, clock = fresh_remote(), Clock()
    mirror = mirror_of(remote, 1, clock)
    for step in (1, 2):
        mirror.push(source / checkpoint_name(step))
    assert mirror.rotate() == ()
    clock.now += 59
    assert mirror.rotate() == ()
    clock.now += 2
    assert [upload.step for upload in mirror.rotate()] == [1]


def test_damaged_mirror_falls_back_with_its_reason(source: Path, tmp_path: Path) -> None:
    disk = MemoryDisk()
    remote, clock = LocalStore(Path("/remote"), disk), Clock()
    mirror = mirror_of(remote, 1, clock)
    for step in (1, 2):
        mirror.push(source / checkpoint_name(step))
    disk.damage(next(Path(path) for path in disk.files() if checkpoint_name(2) in path and SHARDS[0] in path))
    run = Run(tmp_path / "demo")
    manifest = restore_from_mirror(run.attempt(2), mirror_of(remote, 2, clock), run.events.append)
    assert manifest is not None
    assert manifest.step == 1
    assert any("step 2" in event.text and "SHA-256 differs" in event.text for event in run.seen(Noted))


def test_local_is_used_where_it_is_newer_or_the_mirror_is_away(source: Path, tmp_path: Path) -> None:
    class Away(InterruptedStore):
        def list(self, prefix: str):  # type: ignore[no-untyped-def]
            raise StoreUnavailable("away", remedy="Wait.")

    remote, clock = fresh_remote(), Clock()
    mirror_of(remote, 1, clock).push(source / checkpoint_name(1))
    run = Run(tmp_path / "demo")
    proven(run.attempt(1), 2)
    newest = resume_point(run.attempt(2), mirror_of(remote, 2, clock), run.events.append)
    assert newest is not None
    assert newest.step == 2
    away = mirror_of(Away(remote, 10**9), 3, clock)
    assert resume_point(run.attempt(3), away, run.events.append) == newest
    assert "mirror is away" in run.seen(Noted)[-1].text
    with pytest.raises(StoreUnavailable):
        resume_point(Run(tmp_path / "empty").attempt(4), away, run.events.append)


def test_mirror_saves_a_run_whose_local_checkpoints_are_all_bad(source: Path, tmp_path: Path) -> None:
    remote, clock = fresh_remote(), Clock()
    mirror_of(remote, 1, clock).push(source / checkpoint_name(1))
    run = Run(tmp_path / "demo")
    proven(run.attempt(1), 2)
    (run.attempt(1).path_of(2) / SHARDS[0]).write_text("damaged")
    newest = resume_point(run.attempt(2), mirror_of(remote, 2, clock), run.events.append)
    assert newest is not None
    assert newest.step == 1
    (run.attempt(2).path_of(1) / SHARDS[0]).write_text("damaged")
    with pytest.raises(NoValidCheckpoint):
        resume_point(run.attempt(3), mirror_of(fresh_remote(), 3, clock), run.events.append)


def test_background_mirror_reports_and_never_raises(source: Path) -> None:
    """A mirror that fails is told, the state says so, and the next push goes on."""
    events: list[Event] = []
    remote, clock = fresh_remote(), Clock()
    broken = [True]

    def fence() -> None:
        if broken[0]:
            raise StoreUnavailable("away", remedy="Wait.")

    background = BackgroundMirror(mirror_of(remote, 1, clock, fence), events.append)
    background.submit(1, source / checkpoint_name(1))
    assert background.drain(30)
    assert (background.state().newest_step, "away" in background.state().last_error) == (None, True)
    broken[0] = False
    background.submit(2, source / checkpoint_name(2))
    assert background.close(30)
    assert (background.state().newest_step, background.state().last_error, background.held()) == (2, "", frozenset())
    assert [event.text.split(":")[0] for event in events if isinstance(event, Noted)] == [
        "step 1 was not mirrored, training goes on", "step 2 mirrored to /remote",
    ]  # fmt: skip


def test_local_copy_is_kept_until_the_remote_is_proven(tmp_path: Path) -> None:
    run = Run(tmp_path / "demo")
    held: set[int] = {1}
    manager = run.attempt(section={"keep_last": 1}, held=lambda: held)
    proven(manager, 1, 2, 3)
    assert manager.rotate().remove == (2,)
    held.clear()
    assert manager.rotate().remove == (1,)


def test_multiples_of_keep_every_steps_stay_in_the_mirror_too(source: Path) -> None:
    """Steps 1 to 4 go up one after the other; after two lease times the last one and the multiples of 2 are there."""
    store, clock = fresh_remote(), Clock()
    section = CheckpointSection(keep_last=1, keep_every_steps=2)
    mirror = Mirror(store, "demo", 1, section, fence=lambda: None, emit=lambda event: None, lease_s=60, clock=clock)
    for step in (1, 2, 3, 4):
        mirror.push(source / checkpoint_name(step))
        mirror.rotate()
        clock.now += 61
    mirror.rotate()
    clock.now += 61
    mirror.rotate()
    assert sorted(upload.step for upload in mirror.available()) == [2, 4]
