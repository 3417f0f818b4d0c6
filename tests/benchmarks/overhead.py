"""Steps/s of a MEM run ÷ a bare DeepSpeed loop (DESIGN §7), in the order A B A B..., medians printed.

MEM's figure is taken from segment 2 to the last commit of a whole `mem train` with default checkpointing and validation; the
bare loop does the same number of steps with the same model, rows, micro-batch, clipping, optimizer and threads.

With `--trainer-python` Hugging Face's Trainer with DeepSpeed is measured too (it needs accelerate, which MEM does not).

    python tests/benchmarks/overhead.py [--steps 3000] [--rounds 3] [--zero-stage 1] [--set training.segment_steps=1000]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import parsed, spread

from mem_core.core.run.state_manager import RunRecord, read_journal
from mem_core.domain.events import CheckpointCommitted, SegmentEnded
from mem_core.infrastructure.settings import Settings, child_environment

HERE = Path(__file__).parent


def mem_steps_per_s(store: Path, run_id: str, arguments: argparse.Namespace) -> tuple[float, Path]:
    """One whole run; returns steps/s from segment 2 to the last commit, and the run folder."""
    request = {
        "run_id": run_id, "store": str(store), "device": "cpu",
        "training": {"max_steps": arguments.steps + 500, "segment_steps": 500},
        "parallel": {"zero_stage": arguments.zero_stage},
    }  # fmt: skip
    path = store / f"{run_id}.json"
    path.write_text(json.dumps(request))
    overrides = [part for value in arguments.set for part in ("--set", value)]
    subprocess.run([str(Path(sys.prefix) / "bin" / "mem"), "train", str(path), *overrides], check=True, capture_output=True)
    lines = read_journal(store / run_id / "journal")
    ended = [line for line in lines if isinstance(line.event, SegmentEnded)]
    committed = [line for line in lines if isinstance(line.event, CheckpointCommitted)]
    first, last = ended[0], committed[-1]
    steps = last.event.step - ended[0].event.outcome.to_step  # type: ignore[union-attr]
    return steps / (last.time_unix_s - first.time_unix_s), store / run_id


def baseline_steps_per_s(python: str, script: str, folder: Path, arguments: argparse.Namespace) -> float:
    """A baseline's loop on the rows that the run prepared."""
    record = RunRecord.model_validate_json((folder / "run.json").read_bytes())
    settings = Settings.from_environment()
    order = {
        "threads": record.threads_per_rank, "batch": record.request.training.global_batch_size,
        "sequence_length": record.request.data.sequence_length, "model": record.request.model.source,
        "zero_stage": arguments.zero_stage, "data": str(settings.data_cache_dir / record.data_fingerprint / "train"),
        "warmup": 300, "steps": arguments.steps,
    }  # fmt: skip
    environment = child_environment(settings, device="cpu", threads_per_rank=record.threads_per_rank)
    port = str(29500 + os.getpid() % 1000)  # the Trainer makes its own process group
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    result = subprocess.run(
        [python, str(HERE / script), json.dumps(order)],
        check=True, capture_output=True, text=True,
        env={**environment, **ranks, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *sys.path])},
    )  # fmt: skip
    answer = json.loads(result.stdout.splitlines()[-1])
    return answer["steps"] / answer["seconds"]


def main() -> None:
    """Measure in alternation and print medians and the ratio of each pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--zero-stage", type=int, default=1)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--trainer-python", default="", help="a Python that has accelerate beside everything else: adds the Trainer")
    arguments = parsed(parser, steps=600, rounds=1)
    ours, bare, trainer = [], [], []
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(arguments.rounds):
            rate, folder = mem_steps_per_s(Path(scratch), f"overhead-{number}", arguments)
            ours.append(rate)
            bare.append(baseline_steps_per_s(sys.executable, "bare_deepspeed_loop.py", folder, arguments))
            line = f"round {number}: MEM {ours[-1]:.1f} steps/s, bare DeepSpeed {bare[-1]:.1f} steps/s, ratio {ours[-1] / bare[-1]:.3f}"
            if arguments.trainer_python:
                trainer.append(baseline_steps_per_s(arguments.trainer_python, "hf_trainer_loop.py", folder, arguments))
                line += f"; Trainer {trainer[-1]:.1f} steps/s, ratio {ours[-1] / trainer[-1]:.3f}"
            print(line, flush=True)
    pairs = [a / b for a, b in zip(ours, bare, strict=True)]
    print(f"steps/s: MEM {spread(ours, 1)}, bare {spread(bare, 1)}; ratio {spread(pairs)}")
    if trainer:
        print(f"steps/s: Trainer {spread(trainer, 1)}; ratio of MEM to it {spread([a / b for a, b in zip(ours, trainer, strict=True)])}")


if __name__ == "__main__":
    main()
