"""Every measurement still runs: a figure that nobody can take again is no figure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
FOLDER = Path(__file__).parents[1] / "benchmarks"
MEASUREMENTS = sorted(path.name for path in FOLDER.glob("*.py") if "from measuring import" in path.read_text())


def test_all_that_take_arguments_are_measurements() -> None:
    assert len(MEASUREMENTS) >= 7
    takes = {path.name for path in FOLDER.glob("*.py") if "parser = argparse.ArgumentParser(" in path.read_text()}
    assert takes == set(MEASUREMENTS)


LONG = {
    "goodput.py",
    "memory_first_shrink.py",
    "overhead.py",
    "recovery.py",
    "adapter_memory.py",
    "preparation_killed.py",
}  # half a minute and more each
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in MEASUREMENTS]


@pytest.mark.parametrize("name", NAMES)
def test_a_measurement_runs_and_prints(name: str, tmp_path: Path) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    program = [sys.executable, FOLDER / name, "--smoke"]
    done = subprocess.run(program, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3_000:]
    assert any(character.isdigit() for character in done.stdout)
