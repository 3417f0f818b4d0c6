"""A Hugging Face Trainer with checkpoints, started again with resume_from_checkpoint. For recovery.py; needs accelerate."""

import os
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Random rows, the same for the same index."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 256, (128,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class Tell(TrainerCallback):
    """One line per step with the pid."""

    def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        print(f"pid {os.getpid()} step {state.global_step}", flush=True)


def main(folder: str) -> None:
    """Train for very long; resume where a checkpoint is."""
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=384, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, tie_word_embeddings=True
    )
    arguments = TrainingArguments(
        output_dir=folder, max_steps=10**6, per_device_train_batch_size=8, save_steps=100, save_total_limit=3, use_cpu=True, report_to=[],
        disable_tqdm=True, logging_strategy="no", ignore_data_skip=True,
    )  # fmt: skip
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=Rows(), callbacks=[Tell()])
    trainer.train(resume_from_checkpoint=any(Path(folder).glob("checkpoint-*")))


if __name__ == "__main__":
    main(sys.argv[1])
