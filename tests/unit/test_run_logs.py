"""Logs stay within bounds while a process writes them, and nothing empty piles up."""

import os
import subprocess
import sys
import time
from pathlib import Path

from mem_core.infrastructure.machine.logs import MOST_FORK_SERVER_LOGS, LogFolder, remove_logs_of_the_dead

CHATTER = """
import os, sys, time
log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
last = int(sys.argv[2]) - 1
for number in range(last + 1):
    if number == last:
        time.sleep(0.5)  # what is written while a cut goes on may be lost; a process that has something to say does not write all the time
    os.write(log, b"line %d of many\\n" % number)
"""


def test_a_log_that_is_written_without_end_stays_bounded_and_keeps_its_last_words(tmp_path: Path) -> None:
    """Cut from outside, again and again, under a process that holds it open."""
    path, logs = tmp_path / "rank-0.log", LogFolder(tmp_path, max_bytes=100_000, kept_bytes=20_000, last_bytes=1_000)
    process = subprocess.Popen([sys.executable, "-c", CHATTER, str(path), "60000"])
    while process.poll() is None:
        logs.bound()
        time.sleep(0.001)
    logs.bound()
    assert process.returncode == 0
    assert path.stat().st_size <= 100_000
    assert (tmp_path / "rank-0.log.1").stat().st_size == 20_000
    lines = path.read_text().splitlines()
    mark = "[cut here; what was before is in rank-0.log.1]"
    assert sum(line.endswith(mark) for line in lines) == 1, "one cut is told; the writer may be quicker with a line or with half of one"
    assert lines[-1] == "line 59999 of many"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["rank-0.log", "rank-0.log.1"]


def test_short_logs_and_what_is_no_plain_file_are_left_alone(tmp_path: Path) -> None:
    """A pipe in place of a log must not block, a link must not lead elsewhere."""
    (tmp_path / "short.log").write_text("a few words\n")
    outside = tmp_path / "outside.txt"
    outside.write_bytes(b"x" * 1_000)
    folder = tmp_path / "logs"
    folder.mkdir()
    os.mkfifo(folder / "pipe.log")
    (folder / "link.log").symlink_to(outside)
    for place in (tmp_path, folder, tmp_path / "not-there"):
        LogFolder(place, max_bytes=100).bound()
        LogFolder(place).remove_empty()
    assert (tmp_path / "short.log").read_text() == "a few words\n"
    assert outside.stat().st_size == 1_000
    assert sorted(item.name for item in folder.iterdir()) == ["link.log", "pipe.log"]


def test_empty_logs_go_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").touch()
    (tmp_path / "rank-1.log").write_text("a warning\n")
    LogFolder(tmp_path).remove_empty()
    assert [item.name for item in tmp_path.iterdir()] == ["rank-1.log"]


def test_logs_of_fork_servers_whose_owner_was_killed(tmp_path: Path) -> None:
    """Empty ones go, the newest others stay, and those of the living are not touched."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for number in range(MOST_FORK_SERVER_LOGS + 5):
        path = tmp_path / f"fork-server-{10_000_000 + number}.log"  # beyond any process id
        path.write_text("ImportError: no module\n")
        os.utime(path, (number, number))
    (tmp_path / f"fork-server-{dead.pid}.log").touch()
    (tmp_path / f"fork-server-{os.getpid()}.log").touch()
    remove_logs_of_the_dead(tmp_path)
    left = {item.name for item in tmp_path.iterdir()}
    assert f"fork-server-{os.getpid()}.log" in left
    assert f"fork-server-{dead.pid}.log" not in left
    assert len(left) == MOST_FORK_SERVER_LOGS + 1
    assert "fork-server-10000000.log" not in left
    remove_logs_of_the_dead(tmp_path / "not-there")
