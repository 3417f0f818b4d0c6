"""The flow of answers: what a deployment refuses, and what its page shows."""

import json
from pathlib import Path

import pytest

from flows.generate_flow import page, refuse_relative
from mem_core.domain.errors import RequestError
from mem_core.domain.results.generation import GenerationResult


def test_the_page_shows_counts_and_the_first_rows_and_nothing_breaks_out_of_it(tmp_path: Path) -> None:
    rows = [
        {"id": number, "prompt": f"ask {number} | <b>", "completion": "`a`\n# head", "prompt_tokens": 4, "completion_tokens": 2,
         "finish_reason": "stop"}
        for number in range(14)
    ]  # fmt: skip
    path = tmp_path / "out.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    result = GenerationResult(
        output=str(path), rows=14, prompt_tokens=56, completion_tokens=28, stopped=14, cut=0, sha256="", batches=1, shrunk=0
    )
    text = page(result)
    assert "14 answers in" in text
    assert "| 9 | ask 9 \\| &lt;b> | \\`a\\` # head | stop |" in text
    assert "ask 10" not in text
    assert "\n# head" not in text


def test_a_deployment_takes_whole_paths_only() -> None:
    refuse_relative(prompts="/a/b.jsonl", output="~/c.jsonl")
    with pytest.raises(RequestError, match="output: a relative path means another file on each worker"):
        refuse_relative(prompts="/a/b.jsonl", output="c.jsonl")
