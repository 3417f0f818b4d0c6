"""Seconds and bytes of report.html for a run of a million steps: reading its folder, drawing the page.

Alone on a core, since CPU seconds are printed beside wall seconds: a busy machine slows the latter only.

    python tests/benchmarks/report_page.py [--steps 1000000] [--times 3]
"""

import argparse
import tempfile
import time
from pathlib import Path

from measuring import parsed, spread

from mem_core.core.run.run_report import load_report_data
from mem_core.infrastructure.telemetry.report_page.page import render_report
from mem_core.testing.synthetic_history import SyntheticRun

SEGMENT_STEPS = 1_000


def main() -> None:
    """Print medians with their spread."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--times", type=int, default=3)
    arguments = parsed(parser, steps=5_000, times=1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        SyntheticRun(num_steps=arguments.steps, segment_steps=SEGMENT_STEPS, fault_every_segments=10).write(folder)
        read_s, drawn_s, wall_s, size_bytes = [], [], [], 0
        for _ in range(arguments.times):
            wall_began_s, began_s = time.perf_counter(), time.process_time()
            data = load_report_data(folder)
            middle_s = time.process_time()
            size_bytes = len(render_report(data).encode())
            read_s.append(middle_s - began_s)
            drawn_s.append(time.process_time() - middle_s)
            wall_s.append(time.perf_counter() - wall_began_s)
    print(f"{arguments.steps:,} steps: {size_bytes / 1e6:.2f} MB")
    print(f"reading {spread(read_s)} CPU s, drawing {spread(drawn_s)} CPU s, wall {spread(wall_s)} s")


if __name__ == "__main__":
    main()
