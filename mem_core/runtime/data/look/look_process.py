"""The looking process: `python -m mem_core.runtime.data.look.look_process`, one LookJob as a JSON line on standard input.

Tokenizers of model folders need transformers, which the caller's process must not import.
"""

from typing import Any

from mem_core.runtime.data.child import Say, answer_parent
from mem_core.runtime.data.look.rows import LookJob, look_here


def _work(line: bytes, say: Say) -> dict[str, Any]:
    del say
    return look_here(LookJob.model_validate_json(line)).model_dump(mode="json")


def main() -> None:
    """Answer the parent."""
    answer_parent(_work)


if __name__ == "__main__":
    main()
