"""Heartbeats: what a rank wrote is what the supervisor reads, whole, from another process, also while it is being written."""

import subprocess
import sys
import time
from pathlib import Path

from mem_core.runtime.ranks.local.heartbeat import HeartbeatReader, HeartbeatWriter
from mem_core.runtime.ranks.port import Heartbeat

HAMMER = """
import sys, time
from pathlib import Path
from mem_core.runtime.ranks.local.heartbeat import HeartbeatWriter
writer = HeartbeatWriter(Path(sys.argv[1]))
end = time.monotonic() + 60
number = 0
while time.monotonic() < end:
    number += 1
    writer.beat("step", number, number, number, float(number), float(number), float(number), number, number, float(number), number)
"""


def test_every_field_arrives(tmp_path: Path) -> None:
    writer = HeartbeatWriter(tmp_path / "beat")
    before_s = time.monotonic()
    values = {"batch_index": 7, "applied_steps": 6, "micro_batches": 2, "loss": 3.5, "grad_norm": 1.25, "learning_rate": 1e-4}
    values |= {"tokens": 900, "memory_bytes": 2**33, "step_s": 0.5, "peak_bytes": 2**34}
    writer.beat("first_step", **values)  # type: ignore[arg-type]
    beat = HeartbeatReader(tmp_path / "beat").read()
    assert before_s <= beat.beat_s <= time.monotonic()
    assert beat == Heartbeat(beat_s=beat.beat_s, phase="first_step", **values)  # type: ignore[arg-type]


def test_before_the_first_beat_there_is_a_record_that_says_so(tmp_path: Path) -> None:
    reader = HeartbeatReader(tmp_path / "beat")
    assert reader.read() == Heartbeat()
    HeartbeatWriter(tmp_path / "beat")
    assert reader.read() == Heartbeat()


def test_a_file_that_is_not_complete_yet_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "beat").write_bytes(b"short")
    assert HeartbeatReader(tmp_path / "beat").read() == Heartbeat()


def test_no_torn_record_is_ever_read_from_a_process_that_writes_without_pause(tmp_path: Path) -> None:
    """All fields of a record carry the same number; a mixture of two records would show."""
    writer = subprocess.Popen([sys.executable, "-c", HAMMER, str(tmp_path / "beat")])
    try:
        reader = HeartbeatReader(tmp_path / "beat")
        end = time.monotonic() + 30
        while reader.read().batch_index == 0 and time.monotonic() < end:
            time.sleep(0.01)
        beats = [reader.read() for _ in range(20_000)]
    finally:
        writer.kill()
        writer.wait()
    mixed = [b for b in beats if len({b.batch_index, b.applied_steps, b.tokens, b.peak_bytes, int(b.loss), int(b.step_s)}) != 1]
    assert mixed == []
    assert len({b.batch_index for b in beats}) > 5, "the writer really wrote meanwhile"
    assert [b.batch_index for b in beats] == sorted(b.batch_index for b in beats)
