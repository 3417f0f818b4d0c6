"""Answers to fixed prompts: when they are due, what a rollback takes back, whose fault a prompt is, and that no text of a model acts."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from markdown import markdown
from pydantic import ValidationError

from flows.prefect_view.board import RunBoard
from flows.prefect_view.page import MOST_SAMPLES, Places, render_page, samples
from mem_core.core.recovery.actions import Action, Evaluate, Finish, Pause, Progress, Train
from mem_core.core.recovery.mem_orchestrator import MemOrchestrator
from mem_core.core.results.samples import SampleBook
from mem_core.core.run.fold import fold_result
from mem_core.core.run.run_report import load_report_data
from mem_core.core.run.state_manager import StateManager
from mem_core.domain.errors import DataError, MemError, RequestError
from mem_core.domain.events import EVENT_ADAPTER, Sampled, SegmentEnded, SegmentStarted
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.results.samples import LONGEST_ANSWER_CHARACTERS, MOST_PROMPTS, Sample, StepSamples
from mem_core.domain.segment import SegmentCompleted
from mem_core.infrastructure.request.file import load_request
from mem_core.infrastructure.telemetry.loggers.files import TensorBoardLogger
from mem_core.infrastructure.telemetry.markdown import fenced
from mem_core.infrastructure.telemetry.metrics import METRIC_DTYPES
from mem_core.infrastructure.telemetry.notebook import result_text
from mem_core.infrastructure.telemetry.report_page.page import render_report
from mem_core.infrastructure.telemetry.tensorboard import TensorBoardWriter
from mem_core.runtime.data.child import NoAnswer
from mem_core.runtime.inference.sample_prompts import prompt_problems, sample_order
from mem_core.runtime.inference.sample_prompts_process import work
from mem_core.testing.synthetic_run import JournalBuilder

HOSTILE = '<script>alert(1)</script>\n```\n# heading ![x](http://a/b) |\x1b[2J\x00 <!-- "'


def asked(prompts: Any, **sections: Any) -> RuntimeRequest:
    return RuntimeRequest.model_validate(
        {"run_id": "run", **sections, "evaluation": {"prompts": prompts, **sections.pop("evaluation", {})}}
    )


def answered(step: int, greedy: str = "a", prompt: str = "p", count: int = 1) -> StepSamples:
    return StepSamples(step=step, samples=tuple(Sample(prompt=f"{prompt}{n or ''}", greedy=greedy, sampled="b") for n in range(count)))


# -- when -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "every_steps", "known", "action"),
    [
        (0, None, {"is_sampled": False, "is_evaluated": False}, Evaluate(0)), (0, 5, {"is_sampled": False}, Evaluate(0)),
        (0, 5, {"is_evaluated": False}, Train(0, 0, 5)), (5, 5, {"is_sampled": False}, Evaluate(5)),
        (5, 5, {"is_evaluated": False}, Evaluate(5)), (5, 5, {}, Train(0, 5, 8)), (3, 5, {"is_sampled": False}, Train(0, 3, 5)),
        (5, None, {"is_sampled": False}, Train(0, 5, 8)), (5, 5, {"is_sampled": False, "stops_early": True}, Evaluate(5)),
        (5, 5, {"stops_early": True}, Finish()), (20, 5, {"is_sampled": False}, Finish()),
        (0, 5, {"is_sampled": False, "stop_by": "SIGINT"}, Pause("SIGINT")),
    ],
)  # fmt: skip
def test_prompts_are_due_before_training_and_at_each_evaluation(
    step: int, every_steps: int | None, known: dict[str, Any], action: Action
) -> None:
    """At the end they are answered by whoever finishes the run."""
    limits = MemOrchestrator(max_steps=20, segment_steps=8, evaluate_every_steps=every_steps, max_failures_without_progress=3)
    assert limits.next_action(Progress(applied_steps=step, validated_step=step or None, **known), None) == action


def test_work_that_goes_on_from_before_forgets_what_came_after() -> None:
    book = SampleBook()
    for step in (0, 10, 20):
        book.add(Sampled(found=answered(step)))
    book.add(SegmentStarted(segment_index=1, from_step=10, until_step=20))
    assert [found.step for found in book.in_order] == [0, 10]
    assert (book.is_sampled(0), book.is_sampled(20)) == (True, False)
    book.add(Sampled(found=answered(20, "again")))
    assert book.newest == answered(20, "again")


def test_the_result_has_the_last_answers_and_older_journals_have_none() -> None:
    builder = JournalBuilder().start().add(Sampled(found=answered(0)))
    assert fold_result(builder.lines).samples == answered(0)
    builder.segment(0, 0, 20).add(Sampled(found=answered(20)))
    assert fold_result(builder.lines).samples == answered(20)
    assert fold_result(JournalBuilder().start().lines).samples is None


# -- what may be asked --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evaluation", "words"),
    [
        ({"prompts": []}, "empty"), ({"prompts": ""}, "empty"), ({"prompts": ["a", ""]}, "one of the prompts is empty"),
        ({"prompts": ["a", []]}, "one of the prompts is empty"), ({"prompts": ["a"] * (MOST_PROMPTS + 1)}, f"at most {MOST_PROMPTS}"),
        ({"prompts": ["a"], "sample_tokens": 0}, "sample_tokens"), ({"prompts": ["a"], "sample_temperature": 0}, "sample_temperature"),
        ({"prompts": ["a"], "every_steps": 5, "keep_best": True}, "keep_best follows the loss"),
        ({"prompts": ["a"], "every_steps": 5, "patience": 2}, "patience follows the loss"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused(evaluation: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        asked(None, data={"validation": None}, evaluation=evaluation)


def test_prompts_alone_are_something_to_look_at() -> None:
    request = asked(["a"], data={"validation": None}, evaluation={"every_steps": 5}, training={"max_steps": 20})
    assert request.effective_evaluation_steps == 5


def test_the_shipped_fine_tune_asks_about_what_it_trains() -> None:
    request = load_request(str(Path(__file__).parents[2] / "deployments" / "models" / "docstrings.yaml"))
    assert request.evaluation.prompts is not None
    assert [prompt[0]["role"] for prompt in request.evaluation.prompts if isinstance(prompt, tuple)] == ["user", "user"]


def ask_here(program: str, job: str, limit_s: float) -> Any:
    """What the process answers, in this one."""
    assert program.endswith("sample_prompts_process")
    assert limit_s > 0
    return work(job.encode(), lambda progress: None)


def order_of(request: RuntimeRequest, cache: Path) -> Any:
    return sample_order(request, cache, ask=ask_here)


def test_prompts_are_encoded_as_training_encodes_them(tmp_path: Path) -> None:
    order = order_of(asked(["ab", "c"], training={"seed": 7}, evaluation={"sample_tokens": 9, "sample_temperature": 0.5}), tmp_path)
    assert [(prompt.shown, prompt.tokens) for prompt in order.prompts] == [("ab", (100, 101)), ("c", (102,))]
    assert (order.max_new_tokens, order.temperature, order.seed, order.source) == (9, 0.5, 7, "preset:llama-nano")
    assert order_of(asked(None), tmp_path) is None


def test_a_file_of_prompts_is_read_as_it_is_now_and_rows_with_completions_will_do(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "ab", "completion": "what training shows"}) + "\n\n" + json.dumps({"prompt": "c"}) + "\n")
    request = asked(str(path))
    assert [prompt.shown for prompt in order_of(request, tmp_path).prompts] == ["ab", "c"]
    path.write_text(json.dumps({"prompt": "another"}) + "\n")
    assert [prompt.shown for prompt in order_of(request, tmp_path).prompts] == ["another"]


@pytest.mark.parametrize(
    ("prompts", "tokens", "said"),
    [
        (["a" * 3_000], 64, ("row 1 has 3,000 tokens", "64 new ones", "2,048", "evaluation.sample_tokens")),
        (["a", "b" * 1_100], 1_000, ("row 2 has 1,100 tokens",)),
        ([[{"role": "assistant", "content": "a"}]], 64, ("prompt 1", "last message")),
        ([[{"content": "a"}]], 64, ("prompt 1", "role")), ([[{"role": "user", "content": "a"}]], 64, ("chat template",)),
    ],
)  # fmt: skip
def test_a_prompt_that_cannot_be_answered_is_named(prompts: Any, tokens: int, said: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises((DataError, RequestError)) as caught:
        order_of(asked(prompts, evaluation={"sample_tokens": tokens}), tmp_path)
    assert caught.value.field == "evaluation.prompts"
    assert "--" not in str(caught.value), "no flag of another command"
    for words in said:
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "A text alone is the path of a file"), ("", "the file has 0 prompts"), ("[]\n", "line 1"),
        ('{"other": "a"}\n', "no field of the rows"), ('{"text": "a"}\n{"text": 1, "prompt": "a"}\n', "line 2"),
        ('{"text": "a"}\n' * (MOST_PROMPTS + 1), f"the file has {MOST_PROMPTS + 1} prompts"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_named(content: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(MemError) as caught:
        order_of(asked(str(path)), tmp_path)
    assert caught.value.field == "evaluation.prompts"
    assert said in str(caught.value)
    assert "--" not in str(caught.value)


def test_the_doctor_says_it_and_a_model_that_is_not_there_is_for_others_to_say(tmp_path: Path) -> None:
    (problem,) = prompt_problems(asked(str(tmp_path / "none.jsonl")), tmp_path)
    assert problem.field == "evaluation.prompts"
    assert prompt_problems(asked(["a"], model={"source": str(tmp_path / "nowhere")}), tmp_path) == ()
    assert prompt_problems(asked(None), tmp_path) == ()


def test_a_tokenizer_that_never_answers_has_a_name(tmp_path: Path) -> None:
    def never(program: str, job: str, limit_s: float) -> Any:
        raise NoAnswer

    with pytest.raises(MemError, match="did not answer within"):
        sample_order(asked(["never"]), tmp_path, ask=never)


# -- text of a model ----------------------------------------------------------------------------------------------------------------------


def test_answers_are_bounded_and_no_control_character_is_kept() -> None:
    sample = Sample(prompt="p" * 10_000, greedy="g" * 10_000, sampled=HOSTILE + "\ud800")
    assert len(sample.greedy) == LONGEST_ANSWER_CHARACTERS
    assert sample.greedy.endswith("g ...")
    assert "\x1b" not in sample.sampled
    assert "\x00" not in sample.sampled
    line = Sampled(found=StepSamples(step=1, samples=(sample,))).model_dump_json()
    assert len(line.encode()) < 10_000
    read = EVENT_ADAPTER.validate_json(line)
    assert read == Sampled(found=StepSamples(step=1, samples=(sample,))), "what is bounded stays as it is when it is read again"


@contextmanager
def run_with(folder: Path, found: list[StepSamples]) -> Iterator[Path]:
    state = StateManager.acquire(folder, "run")
    state.start_attempt(None)
    for index, each in enumerate(found):
        if each.step:
            state.emit(SegmentStarted(segment_index=index, from_step=found[index - 1].step, until_step=each.step))
            values: dict[str, Any] = {"from_step": found[index - 1].step, "to_step": each.step, "loss_first": 1.0, "loss_last": 1.0}
            values |= {"batch_index": each.step, "tokens": 1, "duration_s": 1.0, "trajectory_digest": ""}
            state.emit(SegmentEnded(segment_index=index, outcome=SegmentCompleted(**values)))
        state.emit(Sampled(found=each))
    try:
        yield state.folder
    finally:
        state.release()


def test_the_report_shows_both_answers_side_by_side_escaped_and_folds_older_ones(tmp_path: Path) -> None:
    steps = [answered(step, HOSTILE if step == 90 else f"answer {step}", HOSTILE) for step in range(0, 100, 10)]
    with run_with(tmp_path, steps) as folder:
        page = render_report(load_report_data(folder))
    assert 'id="samples"' in page
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    section = page[page.index('id="samples"') : page.index('id="faults"')]
    assert section.count("&lt;script&gt;") == 2, "the prompt, and the newest answer"
    assert section.index("after step") < section.rindex("&lt;script&gt;") < section.index("answer 80") < section.index("answer 0")
    assert "4 earlier answers" in section
    assert section.index("answer 40") < section.index("<details") < section.index("answer 30")
    with run_with(tmp_path / "other", []) as folder:
        assert 'id="samples"' not in render_report(load_report_data(folder))


def test_no_text_leaves_its_block_in_markdown() -> None:
    shown = markdown(f"before\n\n{fenced(HOSTILE)}\n\nafter", extensions=["fenced_code"])
    assert "<script" not in shown
    assert "<h1>" not in shown
    assert "<img" not in shown
    assert shown.endswith("<p>after</p>")


def test_the_pages_in_prefect_show_the_last_answers() -> None:
    board = RunBoard("run", 100)
    for line in JournalBuilder().start().add(Sampled(found=answered(0, HOSTILE, count=MOST_SAMPLES + 2))).lines:
        board.add_line(line)
    page = render_page(board, Places())
    assert "## Samples before training" in page
    assert "2 more in the report." in page
    assert "````text\n<script>" in page
    assert samples(None) == ""


def test_status_and_result_have_one_line() -> None:
    text = result_text(fold_result(JournalBuilder().start().add(Sampled(found=answered(0, "a\nb", "what\nis"))).lines))
    assert "1 prompt answered before training: 'what is' -> 'a b'" in text


def test_tensorboard_keeps_answers_that_come_before_their_segment_and_drops_those_that_are_done_again(tmp_path: Path) -> None:
    """Prompts are answered beside the save of their step, so that its segment may be written after them."""
    import numpy as np
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    def segment(first: int, last: int) -> dict[str, Any]:
        values = {name: np.ones(last - first + 1, dtype) for name, dtype in METRIC_DTYPES.items()}
        return values | {"step": np.arange(first, last + 1)}

    for began, steps in ((0, (0, 10, 20)), (10, (20,))):
        logger = TensorBoardLogger(TensorBoardWriter(tmp_path))
        logger.rewind(began)
        for step in steps:
            logger.samples([answered(step, f"from {began}")])
            if step:
                logger.segment(step, segment(step - 9, step), 0)
    accumulator = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = accumulator.Tensors("samples/1/text_summary")
    assert [(event.step, b"from 10" in event.tensor_proto.string_val[0]) for event in found] == [(0, False), (10, False), (20, True)]
    assert [event.step for event in accumulator.Tensors("train/loss")] == list(range(1, 21))
    assert len(os.listdir(tmp_path / "tensorboard")) == 2
