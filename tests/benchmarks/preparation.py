"""Preparing JSONL (reading, hashing, checking, tokens, packing, shards) ÷ `tokenizers.encode_batch` alone on the same rows.

    python tests/benchmarks/preparation.py [--megabytes 20] [--vocabulary 16000] [--rounds 5]

Rows are Python's own sources in pieces of 1,500 characters; the byte-level BPE is trained on them first. One process, both sides in
alternation in the order A B B A; texts are in memory already for `encode_batch`, and its ids are asked for, as whoever stores them
must. Prints seconds of each side, the ratio of each pair, and the peak of resident memory after MEM's first round.
"""

import argparse
import json
import os
import resource
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measuring import parsed, spread

from mem_core.domain.request import DataSection
from mem_core.runtime.data.encoding.tokenize_process import prepare_here
from mem_core.runtime.data.values import PrepareJob
from mem_core.runtime.models.encoding import CURRENT_RULES
from mem_core.testing.tokenizer_folders import END, tokenizer_folder

PIECE_CHARS = 1_500
BATCH_ROWS = 1_000


def texts(size_bytes: int) -> Iterator[str]:
    """Pieces of the standard library, again from its beginning where it does not suffice."""
    done = 0
    while done < size_bytes:
        for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
            whole = path.read_text(encoding="utf-8", errors="ignore")
            for start in range(0, len(whole), PIECE_CHARS):
                piece = whole[start : start + PIECE_CHARS]
                if piece.strip():
                    yield piece
                    done += len(piece)
                if done >= size_bytes:
                    return


def trained(rows: list[str], vocabulary: int) -> Any:
    """A byte-level BPE of so many tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(rows[: 2_000_000 // PIECE_CHARS], trainer)
    return made


def ours(folder: Path) -> float:
    """Seconds of one preparation into an empty cache, in this process, everything imported."""
    shutil.rmtree(folder / "cache", ignore_errors=True)
    data = DataSection.model_validate({"train": [str(folder / "rows.jsonl")], "validation": None, "sequence_length": 512})
    job = PrepareJob(
        data=data, tokenizer_source=str(folder / "model"), vocab_size=None, cache_dir=folder / "cache", parent_pid=0, rules=CURRENT_RULES
    )
    started_s = time.perf_counter()
    prepare_here(job, lambda progress: None)
    return time.perf_counter() - started_s


def theirs(tokenizer: Any, rows: list[str]) -> float:
    """Seconds of `encode_batch` over all rows."""
    started_s = time.perf_counter()
    for start in range(0, len(rows), BATCH_ROWS):
        for found in tokenizer.encode_batch(rows[start : start + BATCH_ROWS], add_special_tokens=False):
            len(found.ids)
    return time.perf_counter() - started_s


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--megabytes", type=float, default=20.0)
    parser.add_argument("--vocabulary", type=int, default=16_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parsed(parser, megabytes=0.2, vocabulary=400, rounds=1)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = list(texts(int(arguments.megabytes * 1e6)))
        (folder / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        tokenizer = trained(rows, arguments.vocabulary)
        tokenizer_folder(folder / "model", tokenizer)
        ours(folder)  # imports, and files into the page cache
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        pairs: list[tuple[float, float]] = []
        for number in range(arguments.rounds):
            if number % 2:
                their_s, our_s = theirs(tokenizer, rows), ours(folder)
            else:
                our_s, their_s = ours(folder), theirs(tokenizer, rows)
            pairs.append((our_s, their_s))
    print(f"rows: {len(rows):,}, {arguments.megabytes:g} MB; cores: {os.cpu_count()}; peak resident {peak_mib:,.0f} MiB")
    print(f"prepare (s):            {spread([pair[0] for pair in pairs])}")
    print(f"encode_batch (s):       {spread([pair[1] for pair in pairs])}")
    print(f"encode_batch ÷ prepare: {spread([their_s / our_s for our_s, their_s in pairs])}")


if __name__ == "__main__":
    main()
