"""How a run ended, for people first: words, figures and curves; the result for programs lies beside them, unseen. Pure."""

import json

from flows.prefect_view.board import RunBoard
from flows.prefect_view.curves import value_words
from flows.prefect_view.markdown import bullets, code, inline, table
from flows.prefect_view.page import Places, links, loss_picture, memory_picture
from mem_core.domain.run import RunResult
from mem_core.infrastructure.telemetry.notebook import result_facts

RESULT_MARK = "```json"
_ELSEWHERE = {"loss", "message", "report", "run folder", "trajectory digest", "weights digest"}


def render_summary(result: RunResult, board: RunBoard, places: Places) -> str:
    """The page of a run that ended. `submit` finds the result again behind RESULT_MARK."""
    facts = [(name, value) for name, value in result_facts(result) if name not in _ELSEWHERE]
    named = (("trajectory", result.trajectory_digest), ("weights", result.weights_digest))
    digests = [f"{name} {code(digest)}" for name, digest in named if digest]
    parts = [
        f"# Run {inline(result.run_id)}: {result.status}",
        inline(_sentence(result)),
        loss_picture(board),
        table(("result", ""), [*_losses(result, board), *facts]),
        memory_picture(board),
        f"## Digests\n\n{bullets(digests)}" if digests else "",
        links(places, board),
        for_programs(result),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def for_programs(result: RunResult) -> str:
    """The result as JSON in a comment that pages do not show; `>` is written so that no text can end the comment."""
    text = json.dumps(result.model_dump(mode="json"), indent=1).replace(">", "\\u003e")
    return f"<!-- the same for programs:\n{RESULT_MARK}\n{text}\n```\n-->"


def _sentence(result: RunResult) -> str:
    steps = f"{result.applied_steps:,} step{'' if result.applied_steps == 1 else 's'}"
    beginning = f"Ended {result.status} after {steps}" if result.status != "completed" else f"Completed {steps}"
    return f"{beginning}: {result.message}" if result.message else f"{beginning}."


def _losses(result: RunResult, board: RunBoard) -> list[tuple[str, str]]:
    """Held-out rows first; the training loss as a mean, since the last batch alone says little."""
    means = board.loss.smoothed() or board.loss.drawn
    rows = [("validation loss", f"{result.validation_loss:.4f}" if result.validation_loss is not None else "")]
    rows.append(("training loss", f"{value_words(means[0][1])} → {value_words(means[-1][1])}, smoothed" if means else ""))
    return [row for row in rows if row[1]]
