"""The other baseline of `overhead.py`: Hugging Face's Trainer with DeepSpeed on the same rows. Needs `accelerate`.

No saving, no logging, no evaluation; prints one JSON object: steps, seconds.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from mem_core.domain.request import ModelSection
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.models.build import build_model


class Clock(TrainerCallback):
    """Notes the time after the warm-up step and after the last."""

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.started_s = self.ended_s = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.warmup:
            self.started_s = time.perf_counter()
        self.ended_s = time.perf_counter()


def main(order: dict[str, Any]) -> None:
    """Train `warmup` and then `steps` steps; time the latter."""
    torch.set_num_threads(int(order["threads"]))
    model = build_model(ModelSection(source=order["model"]), order["sequence_length"], 0, "float32", False)
    data = TokenDataset.open(Path(order["data"]))
    rows = np.stack([tokens for tokens, _ in data.rows(range(min(4096, len(data))))]).astype(np.int64)
    samples = [{"input_ids": torch.from_numpy(row), "labels": torch.from_numpy(row)} for row in rows]
    clock = Clock(order["warmup"])
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch, max_steps=order["warmup"] + order["steps"], per_device_train_batch_size=order["batch"], use_cpu=True,
            save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True, max_grad_norm=1.0, optim="adamw_torch_fused",
            deepspeed={
                "train_micro_batch_size_per_gpu": order["batch"], "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
                "zero_optimization": {"stage": order["zero_stage"]}, "steps_per_print": 10**9,
            },
        )  # fmt: skip
        Trainer(model=model, args=arguments, train_dataset=samples, callbacks=[clock]).train()
    print(json.dumps({"steps": order["steps"], "seconds": clock.ended_s - clock.started_s}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
