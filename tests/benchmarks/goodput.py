"""Goodput under one real fault every 120 s: `python tests/benchmarks/goodput.py [--minutes 20] [--every-s 120] [--seed 1]`.

A short run first measures step and save; from them and the fault rate the segment length is chosen (recovery_interval). Prints
one JSON object and never passes or fails on a figure. Goodput is productive seconds ÷ wall seconds, from the run's own ledger,
the start included; `after_start` leaves the first start out.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from mem_core.core.recovery_interval import best_segment_steps, expected_goodput
from mem_core.core.run_fold import fold_result
from mem_core.core.state_manager import read_journal
from mem_core.domain.request import ChaosSection, RuntimeRequest
from mem_core.domain.segment import SegmentCompleted
from mem_core.infrastructure.settings import Settings
from mem_core.runtime.chaos.drill import Drill
from mem_core.runtime.chaos.faulty_names import MAKE_FAULTY
from mem_core.runtime.chaos.plan import PlannedFault, plan_faults
from mem_core.runtime.chaos.report import DrillReport

KINDS = (
    "kill_rank", "kill_rank_in_save", "hang_rank", "error_in_forward", "error_in_step", "nan_batch", "failed_allocation",
    "flip_checkpoint", "kill_writer", "kill_validator", "slow_rank",
)  # fmt: skip


def run(folder: Path, run_id: str, max_steps: int, segment_steps: int, plan: tuple[PlannedFault, ...], twin: bool) -> DrillReport:
    """One run under a plan (perhaps an empty one)."""
    settings = Settings.from_environment()
    request = RuntimeRequest.model_validate(
        {
            "run_id": run_id, "store": str(folder), "device": "cpu",
            "training": {"max_steps": max_steps, "segment_steps": segment_steps},
        }
    )  # fmt: skip

    def command(on_built: str) -> Any:
        return lambda file: [sys.executable, "-m", "flows.drill_child", str(os.getpid()), on_built, str(file)]

    return Drill(
        request=request, twin_id=f"{run_id}-twin", root=folder, plan=plan, seed=0, command=command(MAKE_FAULTY), twin_command=command(""),
        environment=settings.environ, op_folder=settings.torch_extensions_dir, with_twin=twin,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    ).run()  # fmt: skip


def measured(folder: Path) -> tuple[float, float]:
    """(seconds per step, stall per segment) of a finished run: what is neither steps nor start is the segments' cost."""
    lines = read_journal(folder / "journal")
    segments = [line.event.outcome for line in lines if line.event.event == "segment_ended"]
    done = [outcome for outcome in segments if isinstance(outcome, SegmentCompleted)][1:]
    step_s = sum(outcome.duration_s for outcome in done) / sum(outcome.to_step - outcome.from_step for outcome in done)
    seconds = fold_result(lines).goodput.seconds
    between_s = sum(seconds.get(bucket, 0.0) for bucket in ("save_stall", "validation_wait", "idle"))
    return step_s, between_s / max(1, len(segments))


def main() -> None:
    """Measure, choose, drill, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every-s", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--twin", action="store_true", help="also train the twin and compare")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(folder, "probe", 1_000, 100, (), twin=False)
        step_s, stall_s = measured(folder / "probe")
        max_steps = int(arguments.minutes * 60 / step_s)
        segment_steps = best_segment_steps(step_s, stall_s, arguments.every_s, max_steps)
        section = ChaosSection(seed=arguments.seed, every_s=arguments.every_s)
        report = run(
            folder, "goodput", max_steps, segment_steps, plan_faults(arguments.seed, section, max_steps, KINDS), twin=arguments.twin
        )
    seconds = report.goodput["seconds"]
    started_s = sum(seconds.get(bucket, 0.0) for bucket in ("start", "op_build", "data", "restore"))
    wall_s = sum(seconds.values())
    answer = {
        "goodput": round(report.goodput["fraction"], 4),
        "after_start": round(seconds.get("productive", 0.0) / (wall_s - started_s), 4),
        "expected": round(expected_goodput(segment_steps * step_s, stall_s, arguments.every_s, 1.0), 4),
        "seconds": {bucket: round(value, 2) for bucket, value in seconds.items()},
        "faults": {"fired": sum(f.fired for f in report.faults), "survived": sum(f.verdict == "survived" for f in report.faults)},
        "steps": max_steps, "segment_steps": segment_steps, "step_s": round(step_s, 5), "stall_s": round(stall_s, 4),
        "load": os.getloadavg()[0],
    }  # fmt: skip
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
