"""The baseline of `overhead.py`: the loop that a person would write with DeepSpeed alone. Run by it in a process of its own.

Same model, rows, micro-batch, clipping, optimizer and threads as MEM's run; no checkpoint, no journal, no watching. For each line that
it reads it trains a block of steps and prints `block SECONDS`.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch

from mem_core.domain.request import ModelSection
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.models.build import build_model


def rows_of(order: dict[str, Any]) -> torch.Tensor:
    """The run's own rows, int64 [rows, tokens]."""
    data = TokenDataset.open(Path(order["data"]))
    return torch.from_numpy(np.stack([tokens for tokens, _ in data.rows(range(min(4096, len(data))))]).astype(np.int64))


def main(order: dict[str, Any]) -> None:
    """Train in blocks until the input ends."""
    torch.set_num_threads(order["threads"])
    with tempfile.TemporaryDirectory() as scratch:
        torch.distributed.init_process_group("gloo", init_method=f"file://{scratch}/meeting", rank=0, world_size=1)
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        batch, length = order["batch"], order["sequence_length"]
        model = build_model(ModelSection(source=order["model"]), length, 0, "float32", False).train()
        config = {
            "train_micro_batch_size_per_gpu": batch, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
            "zero_optimization": {"stage": order["zero_stage"]}, "steps_per_print": 10**9,
        }  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        if order["compile"]:
            engine.compile()
        rows = rows_of(order)
        permutation, step = torch.randperm(len(rows)), 0
        for _ in sys.stdin:
            started_s = time.perf_counter()
            for _ in range(order["block_steps"]):
                start = step * batch % (len(rows) - batch)
                inputs = rows[permutation[start : start + batch]]
                loss = engine(input_ids=inputs, labels=inputs).loss
                engine.backward(loss)
                engine.step()
                loss.item()
                step += 1
            print(f"block {time.perf_counter() - started_s}", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
