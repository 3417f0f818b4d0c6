"""The doctor's prediction for LoRA against measured peaks: `python tests/benchmarks/adapter_memory.py [--folder FOLDER]`.

A model of SmolLM2-135M's sizes with random weights (540 MB, made in FOLDER, default a temporary one) is trained for four steps in each
shape; the largest resident peak of steps 3 and 4, as the run recorded it, is printed beside the prediction. Float32, one rank.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from measuring import parsed

from mem_core.core.doctor.memory import estimate_memory
from mem_core.core.run.state_manager import read_journal
from mem_core.domain.events import DoctorReported
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.settings import Settings, child_environment
from mem_core.runtime.ranks.local.processes import ForkServer
from mem_core.testing.driver import drive

MIB = 2**20
SIZES: dict[str, Any] = {
    "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1_536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "max_position_embeddings": 8_192, "tie_word_embeddings": True,
}  # fmt: skip
LORA: dict[str, Any] = {"rank": 8}
# ZeRO stage, rows and tokens of a forward pass, what trains, activations recomputed
SHAPES: tuple[tuple[int, int, int, dict[str, Any], bool], ...] = (
    (0, 1, 128, {"lora": LORA}, False),
    (0, 4, 128, {"lora": LORA}, False),
    (1, 1, 128, {"lora": LORA}, False),
    (1, 4, 128, {"lora": LORA}, False),
    (2, 4, 128, {"lora": LORA}, False),
    (3, 4, 128, {"lora": LORA}, False),
    (1, 4, 256, {"lora": LORA}, False),
    (1, 4, 128, {"lora": {"rank": 64, "dropout": 0.1}}, False),
    (1, 4, 128, {"lora": {"rank": 8, "target_modules": ["q_proj", "v_proj"]}}, False),
    (1, 4, 128, {"lora": LORA}, True),
    (1, 4, 128, {"freeze": ["model.embed_tokens.*", "*.mlp.*"]}, False),
)


def make_model(folder: Path) -> Path:
    """A folder of that size with random weights, and a tokenizer of bytes."""
    import torch
    from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
        ByT5Tokenizer().save_pretrained(folder)
    return folder


def request(store: Path, model: Path, number: int, shape: tuple[int, int, int, dict[str, Any], bool]) -> RuntimeRequest:
    """Four steps of one forward pass each."""
    stage, rows, length, part, recompute = shape
    return RuntimeRequest.model_validate(
        {
            "run_id": f"shape-{number}",
            "store": str(store),
            "device": "cpu",
            "model": {"source": str(model), "dtype": "float32", "activation_checkpointing": "on" if recompute else "off", **part},
            "data": {"sequence_length": length, "validation": None},
            "training": {"max_steps": 4, "segment_steps": 4, "global_batch_size": rows, "warmup_steps": 0},
            "parallel": {"zero_stage": stage},
            "memory": {"mode": "fixed", "micro_batch_size": rows},
        }
    )


def measure(asked: RuntimeRequest, server: ForkServer) -> tuple[int, int]:
    """Predicted and measured peak in bytes."""
    folder = Path(drive(asked, server=server).run_folder)
    report = next(line.event.report for line in read_journal(folder / "journal") if isinstance(line.event, DoctorReported))
    assert report.model is not None
    rows = asked.training.global_batch_size
    predicted = estimate_memory(report.model, asked, report.dtype, micro_batch_rows=rows)["training_peak_per_rank"]
    with np.load(folder / "metrics" / "step-000000004.npz") as columns:
        return predicted, int(columns["peak_bytes"][2:].max())


def run(folder: Path, num_shapes: int) -> None:
    """Print a line for each shape."""
    settings = Settings.from_environment()
    model = make_model(folder / "model")
    server = ForkServer.start(child_environment(settings, device="cpu", extra={}), folder)
    try:
        with tempfile.TemporaryDirectory(dir=folder) as store:
            for number, shape in enumerate(SHAPES[:num_shapes]):
                predicted, measured = measure(request(Path(store), model, number, shape), server)
                error = predicted / measured - 1
                print(f"{shape}: predicted {predicted / MIB:,.0f} MiB, measured {measured / MIB:,.0f} MiB, {error:+.1%}", flush=True)
    finally:
        server.close()


def main() -> None:
    """Measure each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=None, help="where the model is made; default a temporary folder")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only the first ones")
    arguments = parsed(parser, shapes=1)
    with tempfile.TemporaryDirectory(prefix="mem-adapter-memory-") as made:
        run(arguments.folder or Path(made), arguments.shapes)


if __name__ == "__main__":
    main()
