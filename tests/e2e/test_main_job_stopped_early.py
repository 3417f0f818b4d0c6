"""SIGTERM before there is anything to commit: a message, the code of a run that can be resumed, and nothing left behind."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

MEM = Path(sys.executable).with_name("mem")
REQUEST = {"run_id": "early", "store": "runs", "device": "cpu", "training": {"max_steps": 20, "segment_steps": 10, "warmup_steps": 2}}


def _handles_sigterm(pid: int) -> bool:
    """Whether the process has installed a handler (SigCgt is a bit mask, signal 1 is bit 0)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
    return bool(mask >> (signal.SIGTERM - 1) & 1)


def _wait(condition, seconds: float) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)


@pytest.mark.integration
@pytest.mark.parametrize("moment", ["as soon as it can be told", "while the libraries are loaded", "seconds later"])
def test_a_stop_while_the_run_is_loaded_says_so(tmp_path: Path, moment: str) -> None:
    (tmp_path / "request.json").write_text(json.dumps(REQUEST))
    errors = tmp_path / "stderr"
    with errors.open("wb") as file:
        child = subprocess.Popen([str(MEM), "train", "request.json"], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=file)
    try:
        _wait(lambda: _handles_sigterm(child.pid), 60)
        if moment != "as soon as it can be told":
            _wait(lambda: b"loading torch" in errors.read_bytes(), 120)
        if moment == "seconds later":
            time.sleep(3.0)
        child.send_signal(signal.SIGTERM)
        assert child.wait(120) == 75
    finally:
        child.kill()
    text = errors.read_text()
    assert "stopped" in text.splitlines()[-1]
    assert "SIGTERM" in text.splitlines()[-1]
    assert "Traceback" not in text
