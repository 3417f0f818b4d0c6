"""What every planner promises: no exception, an answer within its limit, and nothing but bytes, a refusal or None."""

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mem_core.core.policy.directive_parser import parse_directive
from mem_core.domain.advice import Planner, TelemetrySummary
from mem_core.domain.directive import ExecutiveDirective, Refusal
from mem_core.domain.errors import RequestError
from mem_core.domain.plan import Hyperparams
from mem_core.domain.policy import BUILT_IN_BOUNDS
from mem_core.domain.request import PlannerSection
from mem_core.infrastructure.planner.build import build_planner
from mem_core.infrastructure.planner.http import HttpPlanner

TIME_LIMIT_S = 0.3
TINY = Hyperparams(lr_multiplier=1e-6, gradient_clip_norm=1e-6, loss_scale_initial_power=0)


@pytest.fixture(params=["none", "rules", "http to nobody", "http to silence", "https to silence"])
def planner(request: pytest.FixtureRequest) -> Iterator[Planner]:
    """Each adapter; the HTTP one where nobody listens, and where the connection is taken and nothing is said."""
    if request.param in ("none", "rules"):
        yield build_planner(PlannerSection(kind=request.param))
        return
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if "silence" in request.param:
            server.listen()
        url = f"{request.param.split()[0]}://127.0.0.1:{server.getsockname()[1]}/v1"
        section = PlannerSection(kind="openai", base_url=url, model="some-model", time_limit_s=TIME_LIMIT_S)
        yield build_planner(section, api_key="sk-canary")


@pytest.mark.parametrize(
    "seen",
    [
        {},
        {"losses": (float("nan"),), "gradient_norms": (float("inf"),)},
        {"losses": (0.0,) * 99, "gradient_norms": (1e300,) * 99, "skipped_steps": 9, "current": TINY, "base": TINY},
        {"losses": (-1e308, 1e308), "non_finite": True, "tokens_per_s": float("nan"), "segments_since_change": 0},
    ],
)
def test_planner(planner: Planner, seen: dict[str, Any]) -> None:
    start = {"segment_index": 0, "applied_steps": 0, "max_steps": 1, "current": Hyperparams(), "base": Hyperparams()}
    summary = TelemetrySummary.model_validate({**start, "bounds": BUILT_IN_BOUNDS.cpu, **seen})
    started = time.monotonic()
    answer = planner.advise(summary)
    assert time.monotonic() - started < TIME_LIMIT_S + 3.0
    assert answer is None or isinstance(answer, bytes | Refusal)
    if isinstance(answer, bytes):
        assert isinstance(parse_directive(answer), ExecutiveDirective)


@pytest.mark.parametrize(("values", "field"), [({"model": "m"}, "base_url"), ({"base_url": "http://h/v1"}, "model")])
def test_an_endpoint_needs_a_url_and_a_model(values: dict[str, str], field: str) -> None:
    with pytest.raises(RequestError, match=rf"policy\.planner\.{field}"):
        build_planner(PlannerSection(kind="openai", **values))


def test_the_environments_base_url_stands_in() -> None:
    assert isinstance(build_planner(PlannerSection(kind="openai", model="m"), default_base_url="http://h/v1"), HttpPlanner)
