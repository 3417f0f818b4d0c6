"""The other baseline of `overhead.py`: Hugging Face's Trainer with DeepSpeed on the same rows. Needs `accelerate`.

No saving, no logging, no evaluation. For each line that it reads it trains a block of steps and prints `block SECONDS`.
"""

import json
import sys
import tempfile
import time
from typing import Any

import torch
from bare_deepspeed_loop import rows_of
from transformers import Trainer, TrainerCallback, TrainingArguments

from mem_core.domain.request import ModelSection
from mem_core.runtime.models.build import build_model


class InBlocks(TrainerCallback):
    """Waits for a line before each block of steps."""

    def __init__(self, block_steps: int) -> None:
        self._block_steps = block_steps
        self._began_s = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._wait()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._block_steps == 0:
            print(f"block {time.perf_counter() - self._began_s}", flush=True)
            self._wait()

    def _wait(self) -> None:
        if not sys.stdin.readline():
            sys.exit(0)
        self._began_s = time.perf_counter()


def main(order: dict[str, Any]) -> None:
    """Train in blocks until the input ends."""
    torch.set_num_threads(order["threads"])
    model = build_model(ModelSection(source=order["model"]), order["sequence_length"], 0, "float32", False)
    rows = rows_of(order)
    samples = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch, max_steps=10**6, per_device_train_batch_size=order["batch"], use_cpu=True, torch_compile=order["compile"],
            save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True, max_grad_norm=1.0, optim="adamw_torch_fused",
            deepspeed={
                "train_micro_batch_size_per_gpu": order["batch"], "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
                "zero_optimization": {"stage": order["zero_stage"]}, "steps_per_print": 10**9,
            },
        )  # fmt: skip
        Trainer(model=model, args=arguments, train_dataset=samples, callbacks=[InBlocks(order["block_steps"])]).train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
