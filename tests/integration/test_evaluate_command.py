"""`mem evaluate` and MODEL_OR_RUN: the figures of a run's own evaluation, of any of its steps and of its exports."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.commands.inference.evaluate import figures_of
from flows.commands.inference.generate import answered, order_of
from flows.commands.inference.sources import find_model
from mem_core.core.run.state_manager import read_journal
from mem_core.domain.errors import RequestError
from mem_core.domain.events import Evaluated
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.telemetry.progress import NoProgress

pytestmark = pytest.mark.integration
TRAINING = {"max_steps": 8, "segment_steps": 4, "global_batch_size": 4, "warmup_steps": 0, "learning_rate": 3e-3}


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, Any]:
    for name, numbers in {"train": range(60), "held": range(60, 71)}.items():
        lines = [json.dumps({"question": f"{row:>3} ?", "answer": "abcdefgh" * (1 + row % 3)}) for row in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return {"train": [str(tmp_path / "train.jsonl")], "validation": [str(tmp_path / "held.jsonl")], "sequence_length": 48, "packing": False}


@pytest.mark.parametrize(
    ("lora", "which"),
    [(None, ("",)), pytest.param(None, ("@4", "@best"), marks=pytest.mark.slow), pytest.param({"rank": 2}, ("",), marks=pytest.mark.slow)],
)
def test_the_figures_are_those_of_the_run(
    nano: Callable[..., RuntimeRequest],
    drive: Callable[..., RunResult],
    rows: dict[str, Any],
    lora: dict[str, int] | None,
    which: tuple[str, ...],
) -> None:
    evaluation = {"every_steps": 4, "keep_best": True}
    result = drive(nano("figures", data=rows, training=TRAINING, evaluation=evaluation, model={"lora": lora}))
    events = [line.event for line in read_journal(Path(result.run_folder) / "journal")]
    told = {event.step: event.sets["validation"] for event in events if isinstance(event, Evaluated)}
    settings, held = Settings.from_environment(), rows["validation"][0]
    steps = {"": 8, "@4": 4, "@best": min(told, key=lambda at: told[at].loss)}
    for name in which:
        text, step = f"{result.run_folder}{name}", steps[name]
        found = find_model(text, "./runs", settings, NoProgress())
        assert found.step == step
        figures = figures_of(found, held, {"device": "cpu"}, settings, NoProgress())
        assert figures.loss == pytest.approx(told[step].loss, rel=1e-6)
        assert (figures.tokens, figures.rows, figures.token_accuracy) == (told[step].tokens, told[step].rows, told[step].token_accuracy)
    again = find_model(f"{result.run_folder}{which[-1]}", "./runs", settings, NoProgress())
    assert [path.name for path in (Path(result.run_folder) / "export").iterdir()].count(Path(again.model).name) == 1


def test_what_is_no_model_and_no_run_is_told_what_would_be(tmp_path: Path) -> None:
    settings = Settings.from_environment()
    with pytest.raises(RequestError, match=r"neither a model nor a run.*RUN@best"):
        find_model("nothing", str(tmp_path), settings, NoProgress())
    with pytest.raises(RequestError, match=r"sampling\.temperature"):
        order_of("m", {"prompts": "p", "output": "o", "temperature": -1.0})
    with pytest.raises(RequestError, match="--memory"):
        answered("m", str(tmp_path), {"prompts": "p", "output": "o", "memory": "much"}, settings, NoProgress())
