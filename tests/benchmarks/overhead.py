"""Steps/s of a MEM run of a million steps ÷ loops that people write by hand with DeepSpeed and with the Trainer, eager and compiled.

All sides stay alive, each in a process of its own, and take turns: a partner's block of steps, two segments of MEM, a partner's block, and
so on. MEM's turn is two segments of `mem train` with default checkpointing and validation, until both checkpoints are proven and nothing
of it is at work; only then a partner begins. Each turn of MEM is held against the mean of the blocks before and after it. Partners have the
same model, rows, micro-batch, clipping, optimizer kernel and threads, and save nothing. Medians and spread of the ratios are printed.

A run of a million steps is compiled by the rule of `model.compile: auto`; `--set model.compile=off` measures eager against eager.
The Trainer's parts need `accelerate`, and say so where it is missing.

    python tests/benchmarks/overhead.py [--pairs 10] [--block-steps 500] [--rows 8] [--length 128] [--zero-stage 1] [--set KEY=VALUE]
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measuring import parsed, spread

from mem_core.core.run.record import record_of
from mem_core.core.run.state_manager import read_journal
from mem_core.domain.events import CheckpointJudged
from mem_core.infrastructure.request.file import apply_overrides, build_request
from mem_core.infrastructure.settings import Settings, child_environment
from mem_core.infrastructure.telemetry.progress import NoProgress
from mem_core.testing.driver import drive

HERE = Path(__file__).parent
PARTNERS = {
    "bare DeepSpeed, eager": ("bare_deepspeed_loop.py", False),
    "bare DeepSpeed, engine.compile()": ("bare_deepspeed_loop.py", True),
    "Trainer with DeepSpeed, eager": ("hf_trainer_loop.py", False),
    "Trainer with DeepSpeed, compiled": ("hf_trainer_loop.py", True),
}


class Notes(NoProgress):
    """Says what the run says."""

    def note(self, text: str) -> None:
        """On standard error, beside the figures."""
        print(text, file=sys.stderr, flush=True)


class Enough(Exception):
    """All pairs are measured: the run of a million steps need not go on."""


class Partner:
    """A baseline's process. It does a block of steps when it is told so, and says how long that took."""

    def __init__(self, name: str, folder: Path, arguments: argparse.Namespace) -> None:
        script, compiled = PARTNERS[name]
        record, settings = record_of(folder), Settings.from_environment()
        order = {
            "threads": record.threads_per_rank, "batch": record.request.training.global_batch_size, "compile": compiled,
            "sequence_length": record.request.data.sequence_length, "model": record.request.model.source,
            "zero_stage": arguments.zero_stage, "data": str(settings.data_cache_dir / record.data_fingerprint / "train"),
            "block_steps": arguments.block_steps,
        }  # fmt: skip
        environment = child_environment(settings, device="cpu", threads_per_rank=record.threads_per_rank)
        port = str(29500 + os.getpid() % 1000 + list(PARTNERS).index(name))  # the Trainer makes its own process group
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self.log = folder / f"{script}-{compiled}.log"
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / script), json.dumps(order)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("wb"), text=True,
            env={**environment, **ranks, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *sys.path])},
        )  # fmt: skip

    def block_s(self) -> float:
        """One block, in seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("block "):
                return float(line.removeprefix("block "))
        raise RuntimeError(f"a baseline ended: {self.log.read_text()[-2000:]}")

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


@dataclass
class Turns:
    """Called before each segment of MEM's run. Rates are in steps/s."""

    arguments: argparse.Namespace
    partners: dict[str, Partner] = field(default_factory=dict[str, Partner])
    ours: list[float] = field(default_factory=list[float])
    theirs: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    _began_s: float = 0.0
    _at_step: int = 0

    def __call__(self, session: Any, segment: Any) -> None:
        """End MEM's turn when its checkpoints are proven; then the others have theirs."""
        measured = segment.segment_index - self.arguments.warm_up
        if measured < 0 or measured % 2:
            return
        step, folder = segment.from_step, session.attempt.state.folder
        wait_validated(folder, step)
        if measured:
            self.ours.append((step - self._at_step) / (time.perf_counter() - self._began_s))
        else:
            self._start(folder)
        for name, partner in self.partners.items():
            self.theirs[name].append(self.arguments.block_steps / partner.block_s())
        if len(self.ours) >= self.arguments.pairs:
            raise Enough
        self._at_step, self._began_s = step, time.perf_counter()

    def _start(self, folder: Path) -> None:
        for name in self.arguments.partners:
            self.partners[name] = Partner(name, folder, self.arguments)
            self.theirs[name] = []
            for _ in range(2):
                self.partners[name].block_s()  # imports, compiling and the first steps are nobody's block

    def close(self) -> None:
        """End all partners."""
        for partner in self.partners.values():
            partner.close()


def wait_validated(folder: Path, step: int) -> None:
    """Until the checkpoint of this step is proven and nothing of MEM is at work."""
    judged = set[int]()
    while step not in judged:
        time.sleep(0.002)
        judged = {line.event.verdict.step for line in read_journal(folder / "journal") if isinstance(line.event, CheckpointJudged)}


def main() -> None:
    """Measure in turns; print medians and the ratio of each pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9, help="turns of MEM that are held against the blocks around them")
    parser.add_argument("--warm-up", type=int, default=2, help="segments before the first pair")
    parser.add_argument("--steps", type=int, default=1_000_000, help="of the run, which is left when all pairs are measured")
    parser.add_argument("--block-steps", type=int, default=1000, help="of a partner; MEM's are its segments: of as many, if not more")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--zero-stage", type=int, default=1)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--partners", type=lambda text: text.split(";"), default=list(PARTNERS), help=f"some of: {'; '.join(PARTNERS)}")
    short = {"pairs": 2, "warm_up": 1, "block_steps": 20, "steps": 1_000, "partners": list(PARTNERS)[:1], "set": ["model.compile=off"]}
    arguments = parsed(parser, **short)
    if importlib.util.find_spec("accelerate") is None:
        print("the Trainer is left out: accelerate is not installed")
        arguments.partners = [name for name in arguments.partners if not name.startswith("Trainer")]
    with tempfile.TemporaryDirectory() as scratch:
        turns = Turns(arguments)
        request = {
            "run_id": "overhead", "store": scratch, "device": "cpu", "data": {"sequence_length": arguments.length},
            "training": {"max_steps": arguments.steps, "segment_steps": arguments.block_steps, "global_batch_size": arguments.rows},
            "parallel": {"zero_stage": arguments.zero_stage},
        }  # fmt: skip
        try:
            drive(build_request(apply_overrides(request, arguments.set)), before_segment=turns, progress=Notes())
        except Enough:
            tell(turns, compiled=bool(record_of(Path(scratch) / "overhead").compiled))
        finally:
            turns.close()


def tell(turns: Turns, *, compiled: bool) -> None:
    """Rates, and the ratio of each turn to the blocks around it."""
    size = f"{turns.arguments.rows} x {turns.arguments.length} tokens"
    print(f"MEM ({size}, {'compiled' if compiled else 'eager'}): {spread(turns.ours, 1)} steps/s")
    for name, blocks in turns.theirs.items():
        ratios = [2 * ours / (before + after) for ours, before, after in zip(turns.ours, blocks, blocks[1:], strict=False)]
        print(f"{name}: {spread(blocks, 1)} steps/s; MEM ÷ it {spread(ratios)}")


if __name__ == "__main__":
    main()
