"""The output: every row of the prompts with its answer, in their order; it appears whole, and beside it what decided it."""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from mem_core.core.inference.recorded import Recorded, changes
from mem_core.domain.errors import RequestError
from mem_core.domain.results.generation import GenerateOrder, GenerationResult
from mem_core.domain.units import Value
from mem_core.infrastructure.storage.disk import OsDisk
from mem_core.infrastructure.storage.reading import RECORD_LIMIT_BYTES, open_regular, read_regular_text
from mem_core.infrastructure.storage.writing import replace_text
from mem_core.runtime.inference.prompt_rows import PromptRows
from mem_core.runtime.inference.work_folder import OUTPUT, SUMMARY, WorkFolder

WAY_OUT = "Give another --output, or remove this one and what stands beside it to begin anew."


class Finished(Value):
    """`OUTPUT.mem.json`: what decided the answers in a finished file, and what they came to."""

    identity: dict[str, str]
    result: GenerationResult


def summary_path(output: Path) -> Path:
    """Where it stands."""
    return output.with_name(f"{output.name}.mem.json")


def write_output(work: WorkFolder, rows: PromptRows, order: GenerateOrder, record: Recorded) -> GenerationResult:
    """Join rows and answers in the work folder; `finish` puts them in place. Raises OSError."""
    counts: dict[str, Any] = {"rows": 0, "prompt_tokens": 0, "completion_tokens": 0, "stopped": 0, "cut": 0}
    digest = hashlib.sha256()
    completion, prompt_tokens, completion_tokens, finish_reason = rows.added
    with work.open_output() as file:
        for (_, row), answer in zip(rows.rows(), work.answers(range(len(record.rows))), strict=True):
            added = {
                completion: answer.completion, prompt_tokens: answer.prompt_tokens, completion_tokens: answer.tokens,
                finish_reason: answer.finish_reason,
            }  # fmt: skip
            line = json.dumps({**row, **added}, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
            file.write(line)
            digest.update(line)
            counts["rows"] += 1
            counts["prompt_tokens"] += answer.prompt_tokens
            counts["completion_tokens"] += answer.tokens
            counts["stopped" if answer.finish_reason == "stop" else "cut"] += 1
        file.flush()
        os.fsync(file.fileno())
    result = GenerationResult(
        output=order.output, sha256=digest.hexdigest(), batches=len(record.answered), shrunk=len(record.failed), **counts
    )
    finished = Finished(identity=work.identity() or {}, result=result)
    replace_text(work.path / SUMMARY, finished.model_dump_json(indent=1))
    return result


def finish(work: WorkFolder, output: Path) -> None:
    """Put a written output in place. Whatever interrupts it, doing it again ends it. Raises OSError."""
    if not (work.path / SUMMARY).exists():
        return
    if (work.path / OUTPUT).exists():
        os.replace(work.path / OUTPUT, output)
    os.replace(work.path / SUMMARY, summary_path(output))
    OsDisk().sync_folder(output.parent)
    work.remove()


def finished_before(output: Path, identity: dict[str, str]) -> GenerationResult | None:
    """The result that stands there, where it is what this order would make; None where nothing does.

    Raises:
        RequestError: something else stands there.
    """
    if not output.exists():
        with suppress(FileNotFoundError):
            summary_path(output).unlink()  # of answers that somebody has removed
        return None
    try:
        before = Finished.model_validate_json(read_regular_text(summary_path(output), RECORD_LIMIT_BYTES))
    except (OSError, ValueError) as exc:
        raise RequestError(
            "a file of this name is there, and nothing says that it holds these answers", field="--output", value=output, remedy=WAY_OUT
        ) from exc
    refuse_changed(before.identity, identity, output)
    with open_regular(output) as file:
        same = hashlib.file_digest(file, "sha256").hexdigest() == before.result.sha256
    if not same:
        raise RequestError("the answers there were changed since they were written", field="--output", value=output, remedy=WAY_OUT)
    return before.result.model_copy(update={"already_complete": True, "output": str(output)})


def refuse_changed(before: dict[str, str], now: dict[str, str], output: Path) -> None:
    """Raises RequestError: what decides the answers is another than it was, named."""
    found = changes(before, now)
    if found:
        raise RequestError(
            f"the answers there are others: {'; '.join(found)}",
            field="--output",
            value=output,
            bound="what it was begun with",
            remedy=WAY_OUT,
        )
