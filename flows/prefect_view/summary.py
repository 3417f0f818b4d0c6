"""How a run ended, for people first: words, figures and curves; the result for programs lies beside them, unseen. Pure."""

import json
from typing import Any

from flows.prefect_view.board import RunBoard
from flows.prefect_view.curves import value_words
from flows.prefect_view.markdown import bullets, code, inline, table
from flows.prefect_view.page import Places, links, loss_picture, memory_picture, samples
from mem_core.domain.results.evaluation import rows_words
from mem_core.domain.run import RunResult
from mem_core.infrastructure.telemetry.notebook import result_facts

RESULT_MARK = "```json"
_ELSEWHERE = {"loss", "held out", "samples", "message", "report", "run folder", "trajectory digest", "weights digest"}
_DIGEST_CHARACTERS = 16  # tell any two runs apart, and fit on a telephone


def render_summary(result: RunResult, board: RunBoard, places: Places) -> str:
    """The page of a run that ended. `submit` finds the result again by `result_in`."""
    facts = [(name, value) for name, value in result_facts(result) if name not in _ELSEWHERE]
    named = (("trajectory", result.trajectory_digest), ("weights", result.weights_digest))
    digests = [f"{name} {code(digest[:_DIGEST_CHARACTERS])}" for name, digest in named if digest]
    parts = [
        f"# Run {inline(result.run_id)}: {result.status}",
        inline(_sentence(result)),
        loss_picture(board),
        table(("result", ""), [*_losses(result, board), *facts, *_data(result)]),
        memory_picture(board),
        samples(result.samples),
        f"## Digests, first {_DIGEST_CHARACTERS} digits\n\n{bullets(digests)}" if digests else "",
        links(places, board),
        for_programs(result),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def for_programs(result: RunResult) -> str:
    """The result as JSON in a comment that pages do not show; `>` is written so that no text can end the comment."""
    text = json.dumps(result.model_dump(mode="json"), indent=1).replace(">", "\\u003e")
    return f"<!-- the same for programs:\n{RESULT_MARK}\n{text}\n```\n-->"


def result_in(page: str) -> dict[str, Any] | None:
    """What `for_programs` wrote into a page; None where it is not there. It comes last: what stands before it a model may have written,
    and within it no line ends in the middle of a text."""
    _, found, rest = page.rpartition(f"{RESULT_MARK}\n{{")
    text, end, _ = rest.partition("\n```\n-->")
    return json.loads(f"{{{text}") if found and end else None


def _sentence(result: RunResult) -> str:
    steps = f"{result.applied_steps:,} step{'' if result.applied_steps == 1 else 's'}"
    beginning = f"Ended {result.status} after {steps}" if result.status != "completed" else f"Completed {steps}"
    return f"{beginning}: {result.message}" if result.message else f"{beginning}."


def _losses(result: RunResult, board: RunBoard) -> list[tuple[str, str]]:
    """Held-out rows first; the training loss as a mean, since the last batch alone says little."""
    means = board.loss.smoothed() or board.loss.drawn
    rows: list[tuple[str, str]] = []
    if result.validation_loss is not None:
        over = rows_words(result.validation_rows, result.validation_rows_total)
        rows.append(("validation loss", f"{result.validation_loss:.4f}{f' over {over}' if over else ''}"))
    if len(result.evaluation) == 1:
        figures = next(iter(result.evaluation.values()))
        right = f", {figures.token_accuracy:.1%} of tokens right" if figures.token_accuracy is not None else ""
        rows.append(("perplexity", f"{figures.perplexity:.4g}{right}"))
    return rows + ([("training loss", f"{value_words(means[0][1])} → {value_words(means[-1][1])}, smoothed")] if means else [])


def _data(result: RunResult) -> list[tuple[str, str]]:
    seen = result.data
    if seen is None:
        return []
    rows = [("data", f"{seen.num_documents:,} documents, {seen.num_tokens:,} tokens")]
    dropped = sum(seen.dropped_rows.values())
    return [*rows, ("rows left out", f"{dropped:,} dropped or cut, {seen.num_bad_rows:,} bad")]
