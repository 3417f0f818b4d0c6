"""Tokens/s with token-packed micro-batches ÷ the fixed micro-batch that is safe for the longest document (DESIGN §7: at least 1.5).

Long-tailed documents (log-normal lengths), one rank, one engine: each global batch is trained twice, packed and fixed in
alternation, so that a busy machine slows all alike. All stay under the same padded tokens per pass. "in order" takes rows as they
come, padded to the longest of their pass, as trainers do; "fixed" has them sorted by length first, as MEM does with any plan.

Two settings by default, since packing saves passes and padding, not arithmetic: llama-nano at 512 tokens, where a pass of two short
rows leaves the processor idle as it does a device (the claim is about this one), and llama-tiny at 1,024 tokens, where two rows keep
one core busy, so that only padding is saved. "padded" is padded ÷ real tokens.

    python tests/benchmarks/token_packing.py [--batches 20] [--model preset:llama-nano --length 512] [--safe-rows 2] [--rows 64]
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from measuring import parsed, spread

from mem_core.domain.plan import Hyperparams, MemoryPlan
from mem_core.domain.request import RuntimeRequest
from mem_core.runtime.data.serving.splits import split_batch
from mem_core.runtime.deepspeed.engine import Engine, initialise_distributed
from mem_core.runtime.deepspeed.engine_config import engine_config
from mem_core.runtime.deepspeed.objective import NextToken
from mem_core.runtime.deepspeed.passes import Passes
from mem_core.runtime.models.build import build_model
from mem_core.runtime.ranks.local.places import local_place

SETTINGS = [("preset:llama-nano", 512), ("preset:llama-tiny", 1_024)]


class Documents:
    """Random rows of given lengths, read as `TokenDataset` is."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths, self.index = lengths, SimpleNamespace(documents_apart=False)
        generator = np.random.default_rng(1)
        self._rows = [generator.integers(3, 259, size=length, dtype=np.int32) for length in lengths]

    def full_rows(self, ids: list[int], length: int) -> None:
        """Never quick: lengths differ."""

    def rows(self, ids: list[int]) -> list[tuple[np.ndarray, None]]:
        """Tokens of each row; every label counts."""
        return [(self._rows[row], None) for row in ids]


def long_tailed(number: int, longest: int, seed: int) -> np.ndarray:
    """Log-normal lengths with a median of about a sixteenth of the longest, as web documents have."""
    drawn = np.random.default_rng(seed).lognormal(np.log(longest / 16), 1.1, number)
    return np.clip(drawn, 8, longest).astype(np.int64)


def build(arguments: argparse.Namespace) -> tuple[Engine, RuntimeRequest]:
    """An engine of one rank."""
    request = RuntimeRequest.model_validate(
        {
            "run_id": "bench", "store": "/tmp", "device": "cpu", "model": {"source": arguments.model},
            "data": {"sequence_length": arguments.length}, "training": {"global_batch_size": arguments.rows},
        }
    )  # fmt: skip
    model = build_model(request.model, arguments.length, 0, "float32", False)
    size = sum(parameter.numel() for parameter in model.parameters())
    config = engine_config(request, "float32", MemoryPlan(micro_batch_rows=0), Hyperparams(), size)
    return Engine(model, config, request.training), request


def main() -> None:
    """Measure in alternation and print medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--model", default="", help="only this one; with --length")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--safe-rows", type=int, default=2)
    parser.add_argument("--rows", type=int, default=64)
    arguments = parsed(parser, batches=2, rows=8, model="preset:llama-nano")
    torch.set_num_threads(1)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ[name] = value
    with tempfile.TemporaryDirectory() as folder:
        initialise_distributed(local_place(Path(folder), "cpu", 0, 1))
        for model, length in [(arguments.model, arguments.length)] if arguments.model else SETTINGS:
            arguments.model, arguments.length = model, length
            engine, request = build(arguments)
            measure(engine, request, arguments)
        torch.distributed.destroy_process_group()


def measure(engine: Engine, request: RuntimeRequest, arguments: argparse.Namespace) -> None:
    """Train every batch under both plans."""
    documents = Documents(long_tailed(arguments.rows * (arguments.batches + 1), arguments.length, seed=0))
    passes = Passes(engine, documents, torch.device("cpu"), arguments.length, NextToken(0))  # type: ignore[arg-type]
    plans = {
        "fixed": MemoryPlan(micro_batch_rows=arguments.safe_rows),
        "in order": MemoryPlan(micro_batch_rows=arguments.safe_rows),
        "packed": MemoryPlan(micro_batch_rows=0, micro_batch_tokens=arguments.safe_rows * arguments.length),
    }
    rates: dict[str, list[float]] = {name: [] for name in plans}
    counts: dict[str, int] = dict.fromkeys(plans, 0)
    padded: dict[str, int] = dict.fromkeys(plans, 0)
    real = 0
    for batch in range(arguments.batches + 1):
        ids = np.arange(batch * arguments.rows, (batch + 1) * arguments.rows)
        lengths = documents.lengths[ids]
        real += int(lengths.sum())
        for name, plan in plans.items():
            (mine,) = split_batch(lengths, 1, plan, passes.bucket) if name != "in order" else (in_order(arguments),)
            padded[name] += sum(len(rows) * passes.bucket(int(lengths[list(rows)].max())) for rows in mine)
            started_s = time.perf_counter()
            passes.accumulate(mine, ids, lengths, 1.0 / float(lengths.sum()))
            engine.step()
            if batch:  # the first warms up
                rates[name].append(float(lengths.sum()) / (time.perf_counter() - started_s))
                counts[name] += len(mine)
    most = arguments.safe_rows * arguments.length
    print(f"{arguments.model}, {arguments.rows} documents of 8 to {arguments.length} tokens, at most {most} padded tokens a pass")
    for name, values in rates.items():
        pairs = [packed / other for packed, other in zip(rates["packed"], values, strict=True)]
        print(
            f"  {name}: {spread(values, 0)} tokens/s in {counts[name] / arguments.batches:.1f} passes, "
            f"padded {padded[name] / real:.2f}; "
            f"packed ÷ this: {spread(pairs, 2)}"
        )


def in_order(arguments: argparse.Namespace) -> tuple[tuple[int, ...], ...]:
    """What most trainers do: rows as they come, each pass padded to its longest."""
    return tuple(tuple(range(start, start + arguments.safe_rows)) for start in range(0, arguments.rows, arguments.safe_rows))


if __name__ == "__main__":
    main()
