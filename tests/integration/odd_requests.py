"""Odd requests, each with the one answer that the doctor and training must both give: a table of data.

A case makes its own files below a folder and returns the request's values. `code` is the exit code (0: trains), `words` stand in both
answers, in the doctor's findings where it trains. `promise`: the doctor refuses what would train, on purpose. `environ` is what the
environment says beside the usual.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Values = dict[str, Any]
PAIRS = {"prompt_field": "prompt", "completion_field": "completion"}
TINY: Values = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 384, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Odd:
    """One odd request. `quick`: one of those that CI tries."""

    name: str
    make: Callable[[Path], Values]
    code: int
    words: str = ""
    promise: bool = False
    environ: Callable[[Path], dict[str, str]] = lambda folder: {}
    quick: bool = False


def of(**sections: Any) -> Callable[[Path], Values]:
    """The same values wherever it is tried."""
    return lambda folder: sections


def rows(text: str, name: str = "a.jsonl", **data: Any) -> Callable[[Path], Values]:
    """A data file of this content."""

    def make(folder: Path) -> Values:
        (folder / name).write_text(text)
        return {"data": {"train": [str(folder / name)], **data}}

    return make


def jsonl(*values: object) -> str:
    """JSON lines."""
    return "".join(json.dumps(value) + "\n" for value in values)
