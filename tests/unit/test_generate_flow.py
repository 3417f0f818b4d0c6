"""The flow of answers: what a deployment refuses, and what its page shows."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from flows.generate_flow import page, refuse_relative
from flows.prefect_view.counted import CountedProgress
from mem_core.domain.errors import RequestError
from mem_core.domain.results.generation import GenerationResult
from mem_core.infrastructure.telemetry.progress import ProgressView


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


class Server:
    """Keeps what it is given, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.bars = error, list[tuple[str, float, str]]()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def put_artifact(self, key: str, kind: str, data: float, description: str) -> None:
        assert kind == "progress"
        if self.error is not None:
            raise self.error
        self.bars.append((key, data, description))


def test_answers_have_a_bar_that_shows_the_last_view_and_never_raises() -> None:
    log, server = logging.getLogger("counted"), Server()
    with CountedProgress(server.__enter__, "mem-generate-progress", log) as progress:
        for rows in range(1, 9):
            progress.update(ProgressView(step=rows, total_steps=8, unit="row"))
    assert server.bars == [("mem-generate-progress", 100.0, "row 8/8 100.0%")]
    for broken in (Server(ConnectionError("503")).__enter__, lambda: 1 / 0):
        with CountedProgress(broken, "mem-generate-progress", log) as progress:  # type: ignore[arg-type]
            progress.update(ProgressView(step=1, total_steps=8, unit="row"))


def test_a_bar_is_renewed_while_rows_are_answered() -> None:
    server = Server()
    progress = CountedProgress(server.__enter__, "mem-generate-progress", logging.getLogger("counted"))
    progress.every_s = 0.01
    with progress:
        for rows in (1, 2):
            progress.update(ProgressView(step=rows, total_steps=4, unit="row"))
            end_s = time.monotonic() + 10.0
            while len(server.bars) < rows and time.monotonic() < end_s:
                time.sleep(0.005)
    assert [data for _, data, _ in server.bars] == [25.0, 50.0]


def test_a_deployment_takes_whole_paths_only() -> None:
    refuse_relative(prompts="/a/b.jsonl", output="~/c.jsonl")
    with pytest.raises(RequestError, match="output: a relative path means another file on each worker"):
        refuse_relative(prompts="/a/b.jsonl", output="c.jsonl")
