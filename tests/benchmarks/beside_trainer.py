"""Tokens/s of MEM ÷ those of Hugging Face's Trainer: the whole model and LoRA, eager and compiled, and docstring pairs (packed ÷ padded).

Both train in one process, in turns of some steps (`trainer_blocks.py`): the same model class, rows, batch size, threads, clipping and
AdamW kernel; MEM with all that its loop does beside. A pair is a block of each, one after the other; medians of the pairs' ratios are
printed, of wall time and of CPU time, which a busy machine disturbs less. Targets: 0.98 eager and 1.1 compiled.

The last part trains on question-and-answer pairs made of the standard library's docstrings, at 512 tokens and 8 rows a step: MEM packs
them into rows (its default), the Trainer takes them in order and pads each batch to its longest. Trained tokens are the assistant's.
The target there is 1.3.

Without the package `accelerate` there is no Trainer: it says so and ends well.

    python tests/benchmarks/beside_trainer.py [--pairs 11] [--block-steps 25] [--model preset:llama-tiny] [--only full,lora,compiled]
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from measuring import parsed, spread
from trainer_blocks import InTurns

from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.settings import Settings, child_environment
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.ranks.local.processes import ForkServer
from mem_core.testing.driver import drive
from mem_core.testing.ports import with_port

HERE = Path(__file__).parent
PAIRS_SCRIPT = HERE.parents[1] / "deployments" / "models" / "docstring_pairs.py"
SETTINGS = ("full", "lora", "compiled", "compiled lora", "both compiled", "docstrings")
LORA: dict[str, Any] = {"rank": 8, "alpha": 16}


class Bench:
    """One store and one fork server for all parts."""

    def __init__(self, arguments: argparse.Namespace, scratch: Path) -> None:
        self.arguments, self.scratch = arguments, scratch
        settings = Settings.from_environment()
        environment = child_environment(settings, device="cpu", extra={"PYTHONPATH": str(HERE)})
        self.server = ForkServer.start(environment, scratch / "logs")

    def measure(self, name: str, turns: InTurns, model: dict[str, Any], data: dict[str, Any], rows: int) -> None:
        """One run with the Trainer inside; prints its line."""
        blocks = turns.pairs + turns.warm_up
        request = RuntimeRequest.model_validate(
            {
                "run_id": name.replace(" ", "-"), "store": str(self.scratch), "device": "cpu", "model": {"dtype": "float32", **model},
                "data": {"validation": None, **data},
                "training": {
                    "max_steps": blocks * turns.block_steps, "segment_steps": blocks * turns.block_steps, "global_batch_size": rows,
                    "warmup_steps": 2,
                },
                "parallel": {"zero_stage": self.arguments.zero_stage}, "checkpoint": {"export": "off"},
                "resilience": {"segment_deadline_s": 36_000},
            }
        )  # fmt: skip
        drive(request, options=with_port(turns), server=self.server)
        tell(name, json.loads(Path(turns.answer).read_text()))

    def rows_of(self, data: dict[str, Any], model: str) -> Path:
        """Where the rows lie that a run with such a section trains on."""
        found: list[str] = []
        request = RuntimeRequest.model_validate(
            {
                "run_id": "rows", "store": str(self.scratch), "device": "cpu", "model": {"source": model, "dtype": "float32"},
                "data": {"validation": None, **data}, "training": {"max_steps": 1, "segment_steps": 1, "warmup_steps": 0},
                "checkpoint": {"export": "off"},
            }
        )  # fmt: skip
        drive(request, prepared=lambda ready: found.append(str(ready.data.train_dir)), server=self.server)
        return Path(found[0])


def tell(name: str, blocks: list[dict[str, Any]]) -> None:
    """Medians and the ratios of neighbours."""
    ours, theirs = ([each for each in blocks if each["who"] == who] for who in ("MEM", "Trainer"))
    pairs = list(zip(ours, theirs, strict=False))
    for clock in ("wall_s", "cpu_s"):
        rates = [(a["trained_tokens"] / a[clock], b["trained_tokens"] / b[clock]) for a, b in pairs]
        print(
            f"{name}, by {clock.removesuffix('_s')} time: MEM {spread([a for a, _ in rates], 0)} trained tokens/s, "
            f"Trainer {spread([b for _, b in rates], 0)}; ratio {spread([a / b for a, b in rates])}",
            flush=True,
        )


def docstrings(bench: Bench, turns: InTurns, model: str) -> None:
    """Packed rows of docstring pairs beside the same pairs padded in order."""
    folder = bench.scratch / "pairs"
    subprocess.run([sys.executable, str(PAIRS_SCRIPT), str(folder)], check=True, capture_output=True)
    data = {"train": [str(folder / "train.jsonl")], "messages_field": "messages", "sequence_length": bench.arguments.length_of_pairs}
    rows = bench.rows_of({**data, "packing": False}, model)
    with TokenDataset.open(rows) as read:
        lengths, trained = np.asarray(read.lengths), np.asarray(read.trained_tokens)
    at = " ".join(f"p{q} {np.percentile(lengths, q):.0f}" for q in (10, 50, 90, 99))
    print(f"docstring pairs: {len(lengths):,} rows, tokens {at} max {lengths.max()}, {trained.sum() / lengths.sum():.2f} of them trained")
    own = replace(turns, padded_rows=str(rows), lengthen=bench.arguments.lengthen)
    bench.measure("docstrings", own, {"source": model}, data, bench.arguments.rows)


def main() -> None:
    """Measure every part in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--block-steps", type=int, default=25)
    parser.add_argument("--model", default="preset:llama-tiny")
    parser.add_argument("--model-of-pairs", default="", help="a folder with a chat template; default a small random one")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--length-of-pairs", type=int, default=512)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--lengthen", type=int, default=4, help="steps of the Trainer on padded rows for one of MEM on packed ones")
    parser.add_argument("--zero-stage", type=int, default=1)
    parser.add_argument("--only", default=",".join(SETTINGS), help=f"some of: {', '.join(SETTINGS)}")
    short = {"pairs": 1, "block_steps": 2, "model": "preset:llama-nano", "only": "full,lora,docstrings", "length_of_pairs": 256, "rows": 2}
    arguments = parsed(parser, **short)
    if importlib.util.find_spec("accelerate") is None:
        print("0 figures: the package accelerate is not installed, and without it there is no Trainer")
        return
    with tempfile.TemporaryDirectory(prefix="mem-beside-trainer-") as folder:
        bench = Bench(arguments, Path(folder))
        try:
            measure_all(bench)
        finally:
            bench.server.close()


def measure_all(bench: Bench) -> None:
    """The parts that were asked for."""
    arguments, data = bench.arguments, {"sequence_length": bench.arguments.length}
    warm_up = 1 if arguments.smoke else 2
    for name in arguments.only.split(","):
        answer = str(bench.scratch / f"{name.replace(' ', '-')}.json")
        turns = InTurns(answer, arguments.pairs, arguments.block_steps, warm_up, torch_compile=name == "both compiled")
        if name == "docstrings":
            docstrings(bench, turns, arguments.model_of_pairs or small_model(bench.scratch / "model"))
            continue
        model: dict[str, Any] = {"source": arguments.model, "compile": "on" if "compiled" in name else "off"}
        bench.measure(name, turns, model | ({"lora": LORA} if "lora" in name else {}), data, arguments.rows)


def small_model(folder: Path) -> str:
    """Random weights of four layers, with ChatML's template and a small tokenizer."""
    from mem_core.testing.model_folders import model_folder

    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
    return str(model_folder(folder, "llama", **sizes, head_dim=32))


if __name__ == "__main__":
    main()
