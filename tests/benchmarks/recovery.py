"""SIGKILL of a worker -> first step of the redone segment, beside torchrun and a relaunched Hugging Face Trainer.

Prints medians and ratios, never passes or fails on an absolute time:
`python tests/benchmarks/recovery.py [--kills 9] [--compile on] [--json]`.
The Trainer's part needs `accelerate` beside transformers and is left out, and said so, where that is missing.
"""

import argparse
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import parsed

HERE = Path(__file__).parent
MAX_STEPS_PER_KILL = 400


def mem_recovery_s(kills: int, folder: Path, compiled: str) -> list[float]:
    """Recovery of MEM's own run, measured from outside: SIGKILL -> beat of the first step done again."""
    from mem_core.domain.request import RuntimeRequest
    from mem_core.infrastructure.settings import Settings
    from mem_core.runtime.chaos.drill.drill import Drill
    from mem_core.runtime.chaos.plan.plan import PlannedFault

    steps = kills * MAX_STEPS_PER_KILL + 200
    request = RuntimeRequest.model_validate(
        {
            "run_id": "recovery", "store": str(folder), "device": "cpu", "model": {"compile": compiled},
            "training": {"max_steps": steps, "segment_steps": 100},
        }
    )  # fmt: skip
    settings = Settings.from_environment()
    command = lambda file: [sys.executable, "-m", "flows.commands.drill_child", str(os.getpid()), "", str(file)]  # noqa: E731
    plan = tuple(PlannedFault(i + 1, "kill_rank", at_step=150 + i * MAX_STEPS_PER_KILL, salt=i) for i in range(kills))
    drill = Drill(
        request=request, twin_id="recovery-twin", root=folder, plan=plan, seed=0, command=command, twin_command=command,
        environment=settings.environ, op_folder=settings.torch_extensions_dir, with_twin=False,
    )  # fmt: skip
    return [fault.recovered_s for fault in drill.run().faults if fault.recovered_s is not None]


def torchrun_recovery_s(kills: int, folder: Path) -> list[float]:
    """A plain DeepSpeed script with its own checkpoints, restarted by `torchrun --max-restarts`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", f"--max-restarts={kills}", "--standalone"]
    return _kill_loop([*command, str(HERE / "plain_deepspeed_script.py"), str(folder)], kills, relaunch=False)


def trainer_recovery_s(kills: int, folder: Path) -> list[float]:
    """A Hugging Face Trainer that a person starts again with resume_from_checkpoint."""
    return _kill_loop([sys.executable, str(HERE / "plain_trainer_script.py"), str(folder)], kills, relaunch=True)


def _kill_loop(command: list[str], kills: int, *, relaunch: bool) -> list[float]:
    """Kill the process that prints `pid N step S` lines, time until the next such line of another pid."""
    from mem_core.infrastructure.machine.build import remove_stale_locks
    from mem_core.infrastructure.settings import Settings

    # DeepSpeed compiles an op at its first start and waits for ever for the lock of a killed compiler: minutes, but only once.
    extensions = Settings.from_environment().mem_home / "benchmark_extensions"
    extensions.mkdir(parents=True, exist_ok=True)
    remove_stale_locks(extensions)
    environment = {
        **os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TORCH_EXTENSIONS_DIR": str(extensions),
    }  # fmt: skip
    recovered: list[float] = []
    process = _launch(command, environment)
    try:
        pid = _first_steps(process, not_pid=0, steps=20)
        for _ in range(kills):
            killed_s = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            if relaunch:
                process.wait()
                process = _launch(command, environment)
            pid = _first_steps(process, not_pid=pid, steps=1)
            recovered.append(time.monotonic() - killed_s)
            _first_steps(process, not_pid=0, steps=20)
    finally:
        process.send_signal(signal.SIGTERM)
        process.kill()
        process.wait()
    return recovered


def _launch(command: list[str], environment: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def _first_steps(process: "subprocess.Popen[str]", not_pid: int, steps: int) -> int:
    assert process.stdout is not None
    seen = 0
    for line in process.stdout:
        match = re.match(r"pid (\d+) step (\d+)", line)
        if match and int(match.group(1)) != not_pid:
            seen += 1
            if seen >= steps:
                return int(match.group(1))
    raise RuntimeError("the process ended before it made its steps")


def main() -> None:
    """Measure all, print medians and ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=9)
    parser.add_argument("--others-kills", type=int, default=3)
    parser.add_argument("--compile", choices=("on", "off"), default="off", help="MEM's passes: compiled before the first of them")
    parser.add_argument("--only", choices=("mem", "torchrun", "trainer"), default=None)
    parser.add_argument("--json", action="store_true")
    arguments = parsed(parser, kills=1, others_kills=1, only="mem")
    measured: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if arguments.only in (None, "mem"):
            measured["mem"] = mem_recovery_s(arguments.kills, root / "mem", arguments.compile)
        if arguments.only in (None, "torchrun"):
            measured["torchrun"] = torchrun_recovery_s(arguments.others_kills, root / "torchrun")
        if arguments.only in (None, "trainer") and importlib.util.find_spec("accelerate") is not None:
            measured["trainer"] = trainer_recovery_s(arguments.others_kills, root / "trainer")
    answer: dict[str, object] = {
        name: {"median_s": round(statistics.median(v), 3), "all_s": [round(x, 3) for x in v]} for name, v in measured.items()
    }
    if "mem" in measured:
        own = statistics.median(measured["mem"])
        answer["ratios"] = {name: round(statistics.median(v) / own, 1) for name, v in measured.items() if name != "mem"}
    if arguments.only is None and "trainer" not in measured:
        answer["trainer"] = "left out: accelerate is not installed"
    print(json.dumps(answer) if arguments.json else "\n".join(f"{name}: {value}" for name, value in answer.items()))


if __name__ == "__main__":
    main()
