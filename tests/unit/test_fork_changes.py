"""What a fork may change, what it may not, and in which words; and what of the origin's journal it takes along."""

from typing import Any

import pytest

from flows.commands.output import split_run
from mem_core.core.fork.carrying import carried_events
from mem_core.core.fork.changes import Branch, branched, horizon_words, values_to_change
from mem_core.core.results.length import RunLength
from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.errors import RequestError
from mem_core.domain.events import BatchSkipped, Evaluated, MemoryPlanChanged, Sampled
from mem_core.domain.plan import MemoryPlan, MemoryPlanChange
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.results.samples import StepSamples
from mem_core.infrastructure.request.file import apply_overrides, build_request
from mem_core.testing.synthetic_run import JournalBuilder

STORED = RuntimeRequest.model_validate({"run_id": "origin", "training": {"max_steps": 100, "schedule_steps": 100, "warmup_steps": 7}})


def fork(*overrides: str, step: int = 40, stored: RuntimeRequest = STORED, num_rows: int | None = 800) -> Branch:
    named = [override.partition("=")[0] for override in overrides]
    asked = build_request(apply_overrides(values_to_change(stored, "branch", named), overrides))
    return branched(stored, asked, RunLength(num_rows=num_rows), step)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.learning_rate=1e-4", "training.learning_rate 0.0003 -> 0.0001"),
        ("training.schedule=constant", "training.schedule cosine -> constant"),
        ("training.schedule_steps=50", "training.schedule_steps 100 -> 50"),
        ("training.schedule_steps=null", ""),
        ("training.weight_decay=0", "training.weight_decay 0.1 -> 0.0"),
        ("training.betas=[0.8, 0.9]", "training.betas [0.9, 0.95] -> [0.8, 0.9]"),
        ("training.gradient_clip_norm=2", "training.gradient_clip_norm 1.0 -> 2.0"),
        ("training.max_steps=200", "training.max_steps 100 -> 200"),
        ("training.epochs=3", "training.max_steps 100 -> 300"),
        ("training.warmup_ratio=0.1", "training.warmup_steps 7 -> 10"),
        ("evaluation.every_steps=5", "evaluation.every_steps None -> 5"),
        ("checkpoint.keep_last=9", "checkpoint.keep_last 3 -> 9"),
        ("store=/elsewhere", ""),
        ("training.seed=0", ""),
    ],
)
def test_what_may_change_is_said_by_field(override: str, words: str) -> None:
    branch = fork(override)
    assert "; ".join(change.words() for change in branch.changes) == words
    assert branch.request.run_id == "branch"


@pytest.mark.parametrize(
    ("override", "way_out"),
    [
        ("training.seed=1", "export"),
        ("training.global_batch_size=4", "export"),
        ("data.sequence_length=64", "export"),
        ("data.train=other.txt", "export"),
        ("model.source=preset:llama-tiny", "export"),
        ("model.lora={rank: 4}", "export"),
        ("parallel.num_ranks=2", "--allow-reshard"),
        ("parallel.zero_stage=3", "--allow-reshard"),
        ("memory.micro_batch_size=2", "memory.budget"),
        ("training.loss_scale_initial_power=4", "Leave it out"),
        ("training.max_steps=39", "earlier step"),
        ("device=cpu", "Leave it out"),
        ("deepspeed={dump_state: true}", "export"),
    ],
)
def test_what_would_give_the_state_another_meaning_is_refused_with_the_way_out(override: str, way_out: str) -> None:
    with pytest.raises(RequestError) as refused:
        fork(override)
    assert refused.value.field == override.partition("=")[0] or str(refused.value.field).startswith(override.partition("=")[0])
    assert way_out in str(refused.value.remedy)
    assert refused.value.value
    assert "origin" in refused.value.problem


def test_epochs_need_a_record_that_knows_its_rows() -> None:
    with pytest.raises(RequestError, match="max_steps"):
        fork("training.epochs=3", num_rows=None)


def test_a_schedule_that_ends_where_it_did_is_said() -> None:
    assert "step 100" in horizon_words(fork("training.max_steps=200"))
    for changes in (("training.max_steps=200", "training.schedule_steps=200"), ("training.learning_rate=1e-4",)):
        assert horizon_words(fork(*changes)) == ""


@pytest.mark.parametrize(("run", "name", "which"), [("a", "a", "newest"), ("a@12", "a", 12), ("./x@y/a@best", "./x@y/a", "best")])
def test_a_run_is_named_with_its_checkpoint(run: str, name: str, which: Any) -> None:
    assert split_run(run, "./runs") == (name, which)


@pytest.mark.parametrize("run", ["a@last", "a@-1", "a@"])
def test_another_word_behind_the_at_is_refused(run: str) -> None:
    with pytest.raises(RequestError, match="best"):
        split_run(run, "./runs")


def journal() -> JournalBuilder:
    """40 steps with a fork in mind at 20: before it and after it an evaluation, a batch left out, another plan."""
    builder = JournalBuilder().start().segment(0, 0, 20)
    builder.add(*(Sampled(found=StepSamples(step=step, samples=())) for step in (0, 20)))
    for step in (10, 20):
        builder.add(Evaluated(step=step, validation_loss=1.0 / step), BatchSkipped(batch_index=step - 5))
        builder.add(MemoryPlanChanged(change=MemoryPlanChange(batch_index=step, plan=MemoryPlan(micro_batch_rows=step), reason="")))
    builder.segment(1, 20, 40)
    return builder.add(Evaluated(step=40, validation_loss=0.01), BatchSkipped(batch_index=30))


def taken(*overrides: str) -> list[tuple[str, int]]:
    events = carried_events(journal().lines, TrainingPosition(applied_steps=20, batch_index=20), fork(*overrides, step=20))
    numbers = {
        "evaluated": lambda event: event.step, "sampled": lambda event: event.found.step, "batch_skipped": lambda event: event.batch_index,
        "memory_plan_changed": lambda event: event.change.batch_index,
    }  # fmt: skip
    return [(event.event, numbers[event.event](event)) for event in events]


def test_a_fork_that_goes_on_as_its_origin_takes_what_was_decided_for_later_steps() -> None:
    before = [("evaluated", 10), ("evaluated", 20), ("sampled", 0), ("sampled", 20), ("batch_skipped", 5), ("batch_skipped", 15)]
    assert taken("training.max_steps=90") == [*before, ("batch_skipped", 30), ("memory_plan_changed", 20)]
    assert taken("training.learning_rate=1e-4") == before


def test_figures_of_other_rows_are_not_taken() -> None:
    assert not [name for name, _ in taken("evaluation.sets={other: x.txt}") if name == "evaluated"]
    assert not [name for name, _ in taken("evaluation.prompts=[other]") if name == "sampled"]
