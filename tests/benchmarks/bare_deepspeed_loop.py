"""The baseline of `overhead.py`: the loop that a person would write with DeepSpeed alone. Run by it in a process of its own.

Same model, rows, micro-batch, clipping, optimizer and threads as MEM's run; no checkpoint, no journal, no watching. Prints one
JSON object: steps, seconds.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import deepspeed
import numpy as np
import torch

from mem_core.domain.request import ModelSection, TrainingSection
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.deepspeed.engine import build_optimizer, initialise_distributed
from mem_core.runtime.models.build import build_model
from mem_core.runtime.ranks.local.places import local_place


def main(order: dict[str, object]) -> None:
    """Train `warmup` and then `steps` steps; time the latter."""
    torch.set_num_threads(int(str(order["threads"])))
    with tempfile.TemporaryDirectory() as scratch:
        initialise_distributed(local_place(Path(scratch), "cpu", 0, 1))
        batch, length = int(str(order["batch"])), int(str(order["sequence_length"]))
        model = build_model(ModelSection(source=str(order["model"])), length, 0, "float32", False).train()
        config = {
            "train_micro_batch_size_per_gpu": batch, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
            "zero_optimization": {"stage": order["zero_stage"]}, "steps_per_print": 10**9,
        }  # fmt: skip
        engine, *_ = deepspeed.initialize(model=model, optimizer=build_optimizer(model, TrainingSection()), config=config)
        data = TokenDataset.open(Path(str(order["data"])))
        rows = torch.from_numpy(np.stack([tokens for tokens, _ in data.rows(range(min(4096, len(data))))]).astype(np.int64))
        permutation = torch.randperm(len(rows))
        warmup, steps = int(str(order["warmup"])), int(str(order["steps"]))
        for step in range(warmup + steps):
            if step == warmup:
                started_s = time.perf_counter()
            start = step * batch % (len(rows) - batch)
            inputs = rows[permutation[start : start + batch]]
            loss = engine(input_ids=inputs, labels=inputs).loss
            engine.backward(loss)
            engine.step()
            loss.item()
        print(json.dumps({"steps": steps, "seconds": time.perf_counter() - started_s}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
