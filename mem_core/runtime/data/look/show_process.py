"""The showing process: `python -m mem_core.runtime.data.look.show_process`, one ShowJob as a JSON line on standard input.

The first rows of prepared data as text, in stretches of tokens that are trained or not. Tokenizers of model folders need transformers,
which the caller's process must not import.
"""

import os
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mem_core.core.results.data_report import Segment, ShownRow
from mem_core.domain.units import Value
from mem_core.runtime.data.child import Say, answer_parent, ask_child
from mem_core.runtime.data.encoding.encoder import Encoder
from mem_core.runtime.data.encoding.encoders import make_encoder
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.data.serving.shards import BEGINS_DOCUMENT, COUNTS
from mem_core.runtime.data.values import PreparedData

PROGRAM = "mem_core.runtime.data.look.show_process"
LIMIT_S = 120.0


class ShowJob(Value):
    """Which rows to show, and how they were made."""

    train_dir: str
    tokenizer_source: str
    rules: int
    num_rows: int
    parent_pid: int


def first_rows(prepared: PreparedData, tokenizer_source: str, rules: int, num_rows: int) -> tuple[ShownRow, ...]:
    """The first training rows, decoded in a process of its own.

    Raises:
        RequestError: no usable tokenizer. EnvironmentUnfit: the process was killed. NoAnswer: it was too slow.
    """
    job = ShowJob(train_dir=prepared.train_dir, tokenizer_source=tokenizer_source, rules=rules, num_rows=num_rows, parent_pid=os.getpid())
    return tuple(ShownRow.model_validate(row) for row in ask_child(PROGRAM, job.model_dump_json(), limit_s=LIMIT_S))


def shown(dataset: TokenDataset, encoder: Encoder, num_rows: int) -> list[ShownRow]:
    """Rows from the first on."""
    rows: list[ShownRow] = []
    for tokens, mask in dataset.rows(range(min(num_rows, len(dataset)))):
        flags = np.ones(tokens.size, np.uint8) if mask is None else mask
        segments = tuple(_segments(tokens, flags, encoder))
        trained = sum(segment.num_tokens for segment in segments if segment.trained)
        rows.append(ShownRow(segments=segments, num_tokens=tokens.size, trained_tokens=trained))
    return rows


def _segments(tokens: NDArray[np.integer[Any]], flags: NDArray[np.uint8], encoder: Encoder) -> Iterator[Segment]:
    """Stretches of equal kind. A first token is never predicted, and one that begins a document is predicted by none before it."""
    trained = (flags & COUNTS).astype(bool)
    trained[:1] = False
    begins = (flags & BEGINS_DOCUMENT).astype(bool)
    edges = [0, *(at for at in range(1, tokens.size) if trained[at] != trained[at - 1] or begins[at]), tokens.size]
    for start, end in pairwise(edges):
        if end > start:
            yield Segment(
                text=encoder.decode(tokens[start:end].tolist()), num_tokens=end - start, trained=bool(trained[start]),
                begins=bool(begins[start]),
            )  # fmt: skip


def _work(line: bytes, say: Say) -> list[dict[str, Any]]:
    del say
    job = ShowJob.model_validate_json(line)
    with TokenDataset.open(job.train_dir) as dataset:
        return [row.model_dump(mode="json") for row in shown(dataset, make_encoder(job.tokenizer_source, job.rules), job.num_rows)]


def main() -> None:
    """Answer the parent."""
    answer_parent(_work)


if __name__ == "__main__":
    main()
