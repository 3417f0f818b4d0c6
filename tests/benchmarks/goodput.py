"""Goodput under one real fault every 120 s: `python tests/benchmarks/goodput.py [--minutes 20] [--every-s 120] [--seed 1]`.

A short run first measures the step, for the number of steps that fill the time. The segment length is MEM's own choice
(`checkpoint.every_s: auto`, from what the run itself measures: cost of a save, fault rate). Prints one JSON object and never
passes or fails on a figure. Goodput is productive seconds ÷ wall seconds, from the run's own ledger, the start included;
`after_start` leaves the first start out.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import parsed

from mem_core.core.recovery.interval import RunPace, expected_goodput
from mem_core.core.run.fold import fold_result
from mem_core.core.run.state_manager import read_journal
from mem_core.domain.request import ChaosSection, RuntimeRequest
from mem_core.infrastructure.settings import Settings
from mem_core.runtime.chaos.drill.drill import Drill
from mem_core.runtime.chaos.drill.report import DrillReport
from mem_core.runtime.chaos.faults.faulty_names import MAKE_FAULTY
from mem_core.runtime.chaos.plan.plan import PlannedFault, plan_faults

PROBE_STEPS = 1_000
KINDS = (
    "kill_rank", "kill_rank_in_save", "hang_rank", "error_in_forward", "error_in_step", "nan_batch", "failed_allocation",
    "flip_checkpoint", "kill_writer", "kill_validator", "slow_rank",
)  # fmt: skip


def run(folder: Path, run_id: str, max_steps: int, plan: tuple[PlannedFault, ...], twin: bool) -> DrillReport:
    """One run under a plan (perhaps an empty one). Segments of 10,000 steps at most, so that time decides where they end."""
    settings = Settings.from_environment()
    request = RuntimeRequest.model_validate(
        {
            "run_id": run_id, "store": str(folder), "device": "cpu",
            "training": {"max_steps": max_steps, "segment_steps": 10_000}, "checkpoint": {"every_s": "auto"},
        }
    )  # fmt: skip

    def command(on_built: str) -> Any:
        return lambda file: [sys.executable, "-m", "flows.commands.drill_child", str(os.getpid()), on_built, str(file)]

    return Drill(
        request=request, twin_id=f"{run_id}-twin", root=folder, plan=plan, seed=0, command=command(MAKE_FAULTY), twin_command=command(""),
        environment=settings.environ, op_folder=settings.torch_extensions_dir, with_twin=twin,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    ).run()  # fmt: skip


def pace_of(folder: Path) -> RunPace:
    """What a finished run showed of itself."""
    pace = RunPace()
    for line in read_journal(folder / "journal"):
        pace.add(line.event)
    return pace


def productive_step_s(folder: Path, max_steps: int) -> float:
    """Seconds per step, from the run's own ledger."""
    return fold_result(read_journal(folder / "journal")).goodput.seconds["productive"] / max_steps


def main() -> None:
    """Measure, choose, drill, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every-s", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--twin", action="store_true", help="also train the twin and compare")
    arguments = parsed(parser, minutes=0.2, every_s=4.0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(folder, "probe", PROBE_STEPS, (), twin=False)
        step_s = productive_step_s(folder / "probe", PROBE_STEPS)
        max_steps = int(arguments.minutes * 60 / step_s)
        section = ChaosSection(seed=arguments.seed, every_s=arguments.every_s)
        report = run(folder, "goodput", max_steps, plan_faults(arguments.seed, section, max_steps, KINDS), twin=arguments.twin)
        pace = pace_of(folder / "goodput")
        interval_s = pace.interval_s("auto", 1) or 0.0
        cost_s = pace.segment_cost_s
    seconds = report.goodput["seconds"]
    started_s = sum(seconds.get(bucket, 0.0) for bucket in ("start", "op_build", "data", "restore"))
    wall_s = sum(seconds.values())
    answer = {
        "goodput": round(report.goodput["fraction"], 4),
        "after_start": round(seconds.get("productive", 0.0) / (wall_s - started_s), 4),
        "expected": round(expected_goodput(interval_s, cost_s, arguments.every_s, 1.0), 4),
        "seconds": {bucket: round(value, 2) for bucket, value in seconds.items()},
        "faults": {"fired": sum(f.fired for f in report.faults), "survived": sum(f.verdict == "survived" for f in report.faults)},
        "steps": max_steps, "segments": pace.segments, "interval_s": round(interval_s, 2), "segment_cost_s": round(cost_s, 4),
        "mean_time_between_faults_s": round(pace.mean_time_between_faults_s, 1), "step_s": round(step_s, 5),
        "load": os.getloadavg()[0],
    }  # fmt: skip
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
