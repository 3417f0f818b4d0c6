"""The rules planner: a pure function of the committed trajectory, blind to timing and memory."""

from typing import Any

import pytest

from mem_core.core.policy.directive_parser import parse_directive
from mem_core.domain.advice import SUMMARY_SEGMENTS, TelemetrySummary
from mem_core.domain.directive import ExecutiveDirective
from mem_core.domain.plan import Hyperparams
from mem_core.domain.policy import BUILT_IN_BOUNDS
from mem_core.infrastructure.planner.none import NoPlanner
from mem_core.infrastructure.planner.prompt import SYSTEM_PROMPT, chat_request
from mem_core.infrastructure.planner.rules import RulesPlanner, propose

FALLING = (4.0, 3.5, 3.1, 2.8, 2.6, 2.4, 2.3)
FLAT = (2.5, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0)


def summary(**values: Any) -> TelemetrySummary:
    start = {"segment_index": 7, "applied_steps": 700, "max_steps": 1_000, "current": Hyperparams(), "base": Hyperparams()}
    return TelemetrySummary.model_validate({**start, "bounds": BUILT_IN_BOUNDS.cpu, **values})


def changed(**values: Any) -> Hyperparams:
    return Hyperparams.model_validate(values)


@pytest.mark.parametrize(
    ("seen", "directive"),
    [
        ({"losses": FALLING}, None),
        ({"losses": ()}, None),
        ({"losses": (2.0,)}, None),
        ({"losses": FLAT}, ExecutiveDirective(lr_multiplier=0.5)),
        ({"losses": FLAT[:-1]}, None),
        ({"losses": FLAT, "segments_since_change": 2, "current": changed(lr_multiplier=0.5)}, ExecutiveDirective(lr_multiplier=0.5)),
        ({"losses": FLAT, "segments_since_change": 5, "current": changed(lr_multiplier=0.5)}, ExecutiveDirective(lr_multiplier=0.25)),
        ({"losses": FLAT, "segments_since_change": 9, "current": changed(lr_multiplier=0.06)}, ExecutiveDirective(lr_multiplier=0.05)),
        ({"losses": (2.0, 2.5)}, ExecutiveDirective(lr_multiplier=0.5)),
        ({"losses": (2.0, float("nan"))}, ExecutiveDirective(lr_multiplier=0.5)),
        ({"losses": FALLING, "non_finite": True}, ExecutiveDirective(lr_multiplier=0.5)),
        ({"losses": FALLING, "skipped_steps": 1}, ExecutiveDirective(lr_multiplier=0.5, loss_scale_initial_power=8)),
        ({"losses": FALLING, "gradient_norms": (3.0, 3.0, 3.0, 3.0)}, ExecutiveDirective(lr_multiplier=0.75)),
        ({"losses": FALLING, "gradient_norms": (3.0, 3.0, 3.0, 1.5)}, None),
        ({"losses": FALLING, "gradient_norms": (None, None, None, None)}, None),
        (
            {"losses": FALLING, "current": changed(lr_multiplier=0.5, gradient_clip_norm=0.8)},
            ExecutiveDirective(lr_multiplier=0.5, gradient_clip_norm=0.8),
        ),
    ],
)
def test_rules(seen: dict[str, Any], directive: ExecutiveDirective | None) -> None:
    assert propose(summary(**seen).trajectory()) == directive
    reply = RulesPlanner().advise(summary(**seen))
    assert (parse_directive(reply) if reply is not None else None) == directive


def test_neither_timing_nor_memory_changes_the_advice() -> None:
    """A killed, slow or starved run gets the same advice as one left in peace, else it would end in other weights."""
    calm = summary(losses=FLAT, tokens_per_s=1e6, memory_headroom_fraction=0.9)
    starved = summary(losses=FLAT, tokens_per_s=1.0, memory_headroom_fraction=0.0, ooms_absorbed=9)
    assert RulesPlanner().advise(calm) == RulesPlanner().advise(starved)
    assert "tokens_per_s" not in type(calm.trajectory()).model_fields


def test_the_summary_is_bounded_and_finite() -> None:
    seen = summary(losses=[float(number) for number in range(500)], gradient_norms=[float("inf")] * 500, tokens_per_s=float("nan"))
    assert seen.losses == tuple(float(number) for number in range(500 - SUMMARY_SEGMENTS, 500))
    assert set(seen.gradient_norms) == {None}
    assert seen.tokens_per_s is None
    assert len(seen.model_dump_json()) < 4_000


def test_no_planner_has_no_advice() -> None:
    assert NoPlanner().advise(summary()) is None


def test_the_prompt_is_the_same_for_the_same_summary_and_names_every_field() -> None:
    assert chat_request("model", summary(losses=FLAT)) == chat_request("model", summary(losses=FLAT))
    assert all(name in SYSTEM_PROMPT for name in ExecutiveDirective.model_fields)
    assert '"losses":[2.5,2.0,2.0,2.0,2.0,2.0,2.0]' in chat_request("model", summary(losses=FLAT))["messages"][1]["content"]
