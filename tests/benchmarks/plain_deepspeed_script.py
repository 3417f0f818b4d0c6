"""What people write today: a plain DeepSpeed loop with a checkpoint every 100 steps, resumed by hand. For recovery.py."""

import os
import sys
from pathlib import Path

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SAVE_EVERY = 100


def main(folder: str) -> None:
    """Train for ever; one line per step with the pid."""
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=384, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, tie_word_embeddings=True
    )
    model = LlamaForCausalLM(config)
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}}, "steps_per_print": 10**9,
        },
    )  # fmt: skip
    if (Path(folder) / "latest").exists():
        engine.load_checkpoint(folder)
    step = engine.global_steps
    while True:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 256, (8, 128), generator=generator)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        step += 1
        print(f"pid {os.getpid()} step {step}", flush=True)
        if step % SAVE_EVERY == 0:
            engine.save_checkpoint(folder)


if __name__ == "__main__":
    main(sys.argv[1])
