"""Looking at stores and run folders: real probes that leave nothing behind, room, holders, saved layout, left-overs."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mem_core.core.run.holder import observe_holder
from mem_core.infrastructure.machine import store as machine_store
from mem_core.infrastructure.machine.process_facts import boot_id


def test_a_writable_folder_passes_and_stays_empty(tmp_path: Path) -> None:
    assert machine_store.probe_folder(tmp_path) == ""
    assert list(tmp_path.iterdir()) == []


def test_a_folder_to_be_made_is_tried_above_and_not_made(tmp_path: Path) -> None:
    assert machine_store.probe_folder(tmp_path / "a" / "b") == ""
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("x")
    assert "is not a folder" in machine_store.probe_folder(tmp_path / "runs" / "demo")


def test_a_filesystem_that_takes_no_files_is_a_problem() -> None:
    assert machine_store.probe_folder(Path("/proc/mem-runs")) != ""


def test_a_full_disk_is_told_by_its_own_words(tmp_path: Path) -> None:
    """A real filesystem of one page."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(tmp_path)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs is not allowed here")
    try:
        (tmp_path / "fill").write_bytes(b"x" * 4096)
        assert "No space left" in machine_store.probe_folder(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["fill"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_local_and_remote_stores_are_told_apart(tmp_path: Path) -> None:
    asked: list[str] = []
    local = machine_store.observe_store(f"file://{tmp_path}", lambda url: asked.append(url) or "")
    remote = machine_store.observe_store("s3://bucket/p", lambda url: asked.append(url) or "denied", "http://minio")
    assert (local.local, local.location, local.problem) == (True, str(tmp_path), "")
    assert (remote.local, remote.problem, remote.endpoint) == (False, "denied", "http://minio")
    assert asked == ["s3://bucket/p"]
    assert machine_store.observe_store("./runs", lambda _: "").relative


def test_any_fsspec_url_is_probed_for_real(tmp_path: Path) -> None:
    assert machine_store.probe_url("memory://mem-probe-test/x", {}) == ""
    assert machine_store.probe_url(f"file://{tmp_path}/gone/deep", {}) != ""
    assert list(tmp_path.iterdir()) == []


def test_no_key_is_echoed_when_a_remote_store_fails() -> None:
    problem = machine_store.probe_url("nosuchprotocol-hunter2://x", {"secret": "hunter2"})
    assert problem
    assert "hunter2" not in problem


def test_room_is_that_of_the_filesystem(tmp_path: Path) -> None:
    seen = machine_store.observe_folder(tmp_path / "later")
    stats = os.statvfs(tmp_path)
    assert seen is not None
    assert seen.total_bytes == stats.f_blocks * stats.f_frsize
    assert 0 < seen.free_bytes <= seen.total_bytes


def write_lease(folder: Path, **changes: object) -> None:
    lease = {
        "run_id": "demo",
        "attempt": 3,
        "pid": 1,
        "start_ticks": 0,
        "boot_id": boot_id(),
        "host": socket.gethostname(),
        "since_unix_s": 0.0,
        "expires_unix_s": 1e12,
    }
    (folder / "lease.json").write_text(json.dumps(lease | changes))


def test_a_holder_on_another_machine_counts_until_its_lease_ends(tmp_path: Path) -> None:
    write_lease(tmp_path, host="elsewhere")
    holder = observe_holder(tmp_path)
    assert holder is not None
    assert (holder.alive, holder.attempt) == (True, 3)
    write_lease(tmp_path, host="elsewhere", expires_unix_s=1.0)
    expired = observe_holder(tmp_path)
    assert expired is not None
    assert not expired.alive


def test_a_dead_process_here_holds_nothing_and_oneself_is_no_other(tmp_path: Path) -> None:
    write_lease(tmp_path, pid=1, start_ticks=-1)
    holder = observe_holder(tmp_path)
    assert holder is not None
    assert not holder.alive
    write_lease(tmp_path, pid=os.getpid())
    assert observe_holder(tmp_path) is None
    assert observe_holder(tmp_path / "new") is None


def test_the_newest_readable_manifest_tells_the_saved_layout(tmp_path: Path) -> None:
    for step, ranks in ((90, 1), (1000, 2)):
        folder = tmp_path / "checkpoints" / f"step-{step:09d}"
        folder.mkdir(parents=True)
        files = [{"path": "a", "size_bytes": 5}, {"path": "b", "size_bytes": 7}]
        (folder / "manifest.json").write_text(json.dumps({"num_ranks": ranks, "zero_stage": 1, "step": step, "files": files}))
    torn = tmp_path / "checkpoints" / "step-000002000"
    torn.mkdir()
    (torn / "manifest.json").write_text('{"num_ranks": 4, "zer')
    saved = machine_store.observe_saved(tmp_path)
    assert saved is not None
    assert (saved.step, saved.num_ranks, saved.checkpoint_bytes) == (1000, 2, 12)
    assert machine_store.observe_saved(tmp_path / "new") is None


def test_a_marked_process_whose_owner_is_gone_is_a_left_over(tmp_path: Path) -> None:
    """The owner forks a marked sleeper and ends; a marked child of our own is no left-over."""
    env = os.environ | {"MEM_RUN_FOLDER": str(tmp_path)}
    sleeper = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], stdout=-3, stderr=-3)"
    owner = [sys.executable, "-c", f"import subprocess, sys; print({sleeper}.pid)"]
    orphan_pid = int(subprocess.run(owner, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=30).stdout)
    own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=env)
    try:
        found = machine_store.find_leftovers(tmp_path, "MEM_RUN_FOLDER")
        assert [entry.split(":")[0] for entry in found] == [f"pid {orphan_pid}"]
    finally:
        os.kill(orphan_pid, 9)
        own.kill()
        own.wait(timeout=30)
