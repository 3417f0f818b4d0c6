"""The engine of `mem generate` ÷ a plain loop of batched `model.generate`, in rows a second over the same rows, greedy.

    python tests/benchmarks/generate.py [--rows 96] [--batch-rows 16] [--new-tokens 32] [--pairs 5]

Once with prompts of equal lengths, once with prompts of natural lengths as they stand in their file: docstrings of Python's own library.
Both sides have the same model in the same process and answer at most `--batch-rows` rows at once; the plain loop takes them as they come,
pads on the left, decodes, and writes a line a row. MEM's side composes, records and syncs, as it does for a file. Loading is in neither.
In alternation, A B B A; prints the ratio of each pair's times, median and range.
"""

import argparse
import ast
import json
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from measuring import parsed, spread

from mem_core.domain.results.generation import GenerateOrder, Sampling
from mem_core.runtime.inference.answering import Answering
from mem_core.runtime.inference.generate_process import Generation, Teller
from mem_core.runtime.inference.opening import OpenModel, open_model
from mem_core.runtime.inference.prompt_rows import Prompt
from mem_core.runtime.inference.work_folder import WorkFolder
from mem_core.runtime.ranks.worker.device import CpuDevice
from mem_core.testing.model_folders import model_folder

MOST_CHARS = 900


def docstrings() -> Iterator[str]:
    """Of the functions and classes of Python's own library, in the order of its files."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="ignore"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                yield text[:MOST_CHARS]


def plain(model: OpenModel, texts: Sequence[str], order: GenerateOrder, path: Path) -> None:
    """What somebody writes who needs answers once."""
    tokenizer: Any = model.encoder._tokenizer
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
    module: Any = model.module
    with path.open("w") as file, torch.inference_mode():
        for start in range(0, len(texts), order.batch_rows):
            batch = tokenizer(list(texts[start : start + order.batch_rows]), return_tensors="pt", padding=True)
            made = module.generate(
                batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=order.sampling.max_new_tokens, do_sample=False,
                use_cache=True, pad_token_id=tokenizer.pad_token_id,
            )  # fmt: skip
            for text in tokenizer.batch_decode(made[:, batch["input_ids"].shape[1] :], skip_special_tokens=True):
                file.write(json.dumps({"completion": text}) + "\n")


def engine(model: OpenModel, texts: Sequence[str], order: GenerateOrder, folder: Path) -> None:
    """What the answering process does once its model is open."""
    work, device = WorkFolder(folder / "out.jsonl"), CpuDevice()
    work.remove()
    with work.held():
        teller = Teller(lambda message: None, device.probe())
        prompts = list(model.encoder.prompts(Prompt(text) for text in texts))
        Generation(order, work, Answering(model, order.sampling, teller.beat), prompts, device, teller).run()


def took(work: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def measured(model: OpenModel, texts: Sequence[str], order: GenerateOrder, folder: Path, pairs: int) -> list[float]:
    """Seconds of the plain loop ÷ seconds of the engine, a pair each."""
    sides = [lambda: plain(model, texts, order, folder / "plain.jsonl"), lambda: engine(model, texts, order, folder)]
    for side in sides:
        side()
    ratios: list[float] = []
    for pair in range(pairs):
        turn = (0, 1) if pair % 2 == 0 else (1, 0)
        seconds = {side: took(sides[side]) for side in turn}
        ratios.append(seconds[0] / seconds[1])
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description="mem generate's engine against a plain loop of model.generate")
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--batch-rows", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=5)
    asked = parsed(parser, rows=6, batch_rows=3, new_tokens=3, hidden=16, layers=1, pairs=1)
    texts = [text for text, _ in zip(docstrings(), range(asked.rows), strict=False)]
    equal = ["the quick brown fox " * 12] * asked.rows
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = {"hidden_size": asked.hidden, "intermediate_size": 4 * asked.hidden, "num_hidden_layers": asked.layers}
        model_folder(folder / "llama", "llama", **sizes, num_attention_heads=4, head_dim=asked.hidden // 4, max_position_embeddings=2048)
        model = open_model(str(folder / "llama"), "float32", "cpu")
        order = GenerateOrder(
            model=str(folder / "llama"), prompts="", output=str(folder / "out.jsonl"), batch_rows=asked.batch_rows, device="cpu",
            sampling=Sampling(max_new_tokens=asked.new_tokens),
        )  # fmt: skip
        for words, rows in (("equal lengths", equal), ("natural lengths, in file order", texts)):
            lengths = [prompt.size for prompt in model.encoder.prompts(Prompt(text) for text in rows)]
            ratios = measured(model, rows, order, folder, asked.pairs)
            print(f"{words}: {min(lengths)} to {max(lengths)} tokens, {len(rows)} rows: MEM / plain = {spread(ratios)}")


if __name__ == "__main__":
    main()
