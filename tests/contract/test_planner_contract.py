"""What every planner promises: no exception, an answer within its limit, and nothing but bytes, a refusal or None."""

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mem_core.core.directive_parser import parse_directive
from mem_core.domain.advice import Planner, TelemetrySummary
from mem_core.domain.directive import ExecutiveDirective, Refusal
from mem_core.domain.plan import Hyperparams
from mem_core.domain.policy import BUILT_IN_BOUNDS
from mem_core.infrastructure.planner.http import HttpPlanner
from mem_core.infrastructure.planner.none import NoPlanner
from mem_core.infrastructure.planner.rules import RulesPlanner

TIME_LIMIT_S = 0.3
TINY = Hyperparams(lr_multiplier=1e-6, gradient_clip_norm=1e-6, loss_scale_initial_power=0)


@pytest.fixture(params=["none", "rules", "http to nobody", "http to silence"])
def planner(request: pytest.FixtureRequest) -> Iterator[Planner]:
    """Each adapter; the HTTP one at a port where nobody listens, and at one that takes the connection and says nothing."""
    if request.param in ("none", "rules"):
        yield NoPlanner() if request.param == "none" else RulesPlanner()
        return
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if request.param == "http to silence":
            server.listen()
        yield HttpPlanner(f"http://127.0.0.1:{server.getsockname()[1]}", "some-model", "sk-canary", time_limit_s=TIME_LIMIT_S)


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
