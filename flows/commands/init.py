"""`mem init`: a commented request from five questions, or from flags. Asks only where somebody sits at a terminal."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from mem_core.domain.errors import RequestError
from mem_core.infrastructure.request.file import apply_overrides, build_request, parse_mapping, parse_value

COMMENT_COLUMN = 36
TEMPLATE = """\
# A run of MEM. Look at it with `mem doctor {file}`, train with `mem train {file}`; the same command again goes on with it.
# The fields: README.md; all of them with their bounds: mem_core/domain/request/, or the form of the deployment in Prefect's UI.
run_id: {run_id}              # its folder is {store}/{run_id}; another name is another run
store: {store}
device: auto                  # auto, cpu or cuda
model:
  source: {model}             # a Hugging Face folder, a URL, or preset:NAME
data:
  train: {data}               # files, globs or URLs; a row a line (JSONL) or plain text
  sequence_length: 512        # tokens of one row; longer documents are cut into several
training:
  max_steps: {steps}          # optimizer updates
  segment_steps: {segment}    # a checkpoint is written and proven after so many
  global_batch_size: 8        # rows of one update, over all ranks
  learning_rate: {rate}
  warmup_steps: {warmup}
  seed: 0                     # the same seed ends with the same weights, to the bit
"""


@dataclass(frozen=True)
class Question:
    """One of the five: the flag that answers it, the words, and what an empty answer means."""

    name: str
    words: str
    default: str


QUESTIONS = (
    Question("run_id", "Name of the run", "my-run"),
    Question("model", "Model (folder, URL or preset:NAME)", "preset:llama-nano"),
    Question("data", "Training data (files or globs, separated by commas)", "stdlib:"),
    Question("steps", "Optimizer updates", "1000"),
    Question("rate", "Peak learning rate", "2e-5"),
)


def init(output: Path, given: dict[str, str | None], as_json: bool, ask: Callable[[str], str] | None = None) -> int:
    """Write the request; what no flag answers is asked for at a terminal and else takes its default.

    Raises:
        RequestError: a value is out of bounds, or the file is there already.
    """
    if os.path.lexists(output):
        raise RequestError("there is a file already", field="--output", value=output, remedy="Name another one, or remove it.")
    asking = ask or (_ask if sys.stdin is not None and sys.stdin.isatty() else None)
    answers = {question.name: given.get(question.name) or _answer(question, asking) for question in QUESTIONS}
    text = request_text(answers, output.name)
    build_request(apply_overrides(parse_mapping(text), ()))
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as exc:
        remedy = "Name a file in a folder that is there and can be written."
        raise RequestError(f"the request cannot be written: {exc.strerror}", field="--output", value=output, remedy=remedy) from exc
    print(f"{output} is written; next: mem doctor {output}, then mem train {output}", file=sys.stderr)
    if as_json:
        print(json.dumps({"request": str(output)}))
    return 0


def request_text(answers: dict[str, str], file: str) -> str:
    """The commented request. Values are quoted as YAML needs them."""
    steps = parse_value(answers["steps"])
    tenth = max(1, steps // 10) if isinstance(steps, int) else 1
    files = [part.strip() for part in answers["data"].split(",") if part.strip()]
    text = TEMPLATE.format(
        file=file, run_id=_quoted(answers["run_id"]), store="./runs", model=_quoted(answers["model"]), data=_quoted(files),
        steps=answers["steps"], segment=min(1_000, tenth), rate=answers["rate"], warmup=min(100, tenth),
    )  # fmt: skip
    return "".join(_aligned(line) + "\n" for line in text.splitlines())


def _aligned(line: str) -> str:
    """Comments behind values stand in one column."""
    value, mark, comment = line.partition("  # ")
    return f"{value.rstrip():<{COMMENT_COLUMN}}  # {comment}" if mark and value.strip() else line


def _quoted(value: str | list[str]) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")


def _answer(question: Question, ask: Callable[[str], str] | None) -> str:
    if ask is None:
        return question.default
    return ask(f"{question.words} [{question.default}]: ").strip() or question.default


def _ask(words: str) -> str:
    print(words, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline()
