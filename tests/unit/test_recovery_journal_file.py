"""A journal line is on the disk as a whole or not at all, on a disk that really refuses writes."""

import subprocess
import sys
from pathlib import Path

import pytest

from mem_core.infrastructure.storage.journal_file import append_line

# In a process of its own: the limit on file size holds for the whole process. The kernel takes the part that fits.
PROGRAM = """
import resource, sys
from pathlib import Path
from mem_core.infrastructure.storage.journal_file import append_line
path, lift_after = Path(sys.argv[1]), int(sys.argv[2])
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
append_line(path, b"a" * 50)
resource.setrlimit(resource.RLIMIT_FSIZE, (80, hard))
waits = []
def sleep(seconds):
    waits.append(path.stat().st_size)
    if len(waits) == lift_after:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
try:
    append_line(path, b"b" * 50, (1, 2, 3), sleep)
except OSError as exc:
    print("refused", exc.errno)
print(waits)
"""


def run(path: Path, lift_after: int) -> list[str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(path), str(lift_after)], capture_output=True, text=True, check=True)
    return done.stdout.split("\n")


def test_a_disk_that_refuses_for_a_moment_costs_a_wait_and_spoils_nothing(tmp_path: Path) -> None:
    """Two tries refused, the third goes through; what got through of the refused ones was cut off before each wait."""
    path = tmp_path / "journal"
    assert run(path, lift_after=2)[0] == "[51, 51]"
    assert path.read_bytes() == b"a" * 50 + b"\n" + b"b" * 50 + b"\n"


def test_a_disk_that_stays_full_is_reported_and_leaves_whole_lines(tmp_path: Path) -> None:
    """After the last wait the kernel's error passes through."""
    path = tmp_path / "journal"
    answer = run(path, lift_after=99)
    assert answer[0].startswith("refused")
    assert answer[1] == "[51, 51, 51]"
    assert path.read_bytes() == b"a" * 50 + b"\n"


def test_a_folder_that_is_gone_is_an_error_at_the_end_of_patience(tmp_path: Path) -> None:
    """Every wait is taken, then it raises."""
    waits: list[float] = []
    with pytest.raises(FileNotFoundError):
        append_line(tmp_path / "gone" / "journal", b"x", (0.1, 0.2), waits.append)
    assert waits == [0.1, 0.2]
