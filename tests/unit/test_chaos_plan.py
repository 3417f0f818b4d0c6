"""Chaos is a value: the plan of faults, the table of kinds, the verdicts. Pure."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mem_core.domain.errors import RequestError
from mem_core.domain.fault_kinds import FAULT_KINDS, offered_kinds
from mem_core.domain.request import ChaosSection
from mem_core.runtime.chaos.drill.report import DrillReport, FaultScore, InvariantScore, html_report, passed, same, score_fault, text_report
from mem_core.runtime.chaos.faults.injectors import INJECTORS
from mem_core.runtime.chaos.plan.plan import kinds_that_fit, plan_faults, spread_steps
from mem_core.runtime.chaos.real_chaos import MetFault

KINDS = tuple(FAULT_KINDS)


def met(number: int = 1, *, fired: bool = True, recovered_s: float | None = 0.7) -> MetFault:
    return MetFault(number, "kill_rank", "SIGKILL of one rank", "step 40", fired, "gone", 40, 0.0, recovered_s, 0.0, 12)


def report(faults: tuple[FaultScore, ...], invariants: tuple[InvariantScore, ...]) -> DrillReport:
    return DrillReport(
        passed=passed(faults, invariants), run_id="r", run_folder="/r", twin_run_id="t", twin_folder="/t", seed=1, max_steps=100,
        num_ranks=1, faults=faults, invariants=invariants, kinds_fired=("kill_rank",),
    )  # fmt: skip


def test_every_kind_has_what_carries_it_out_and_there_are_more_than_fifteen() -> None:
    """The table and the injectors are one list."""
    assert INJECTORS.keys() == FAULT_KINDS.keys()
    assert len(FAULT_KINDS) >= 15


@given(seed=st.integers(0, 2**40), steps=st.integers(100, 1_000_000), count=st.integers(1, 60))
def test_the_same_seed_gives_the_same_plan_and_every_step_is_inside_the_run(seed: int, steps: int, count: int) -> None:
    """Steps ascend, numbers count from 1, and the same call gives the same value."""
    section = ChaosSection(at_steps=spread_steps(seed, count, steps))
    plan = plan_faults(seed, section, steps, KINDS)
    assert plan == plan_faults(seed, section, steps, KINDS)
    assert [fault.number for fault in plan] == list(range(1, count + 1))
    moments = [fault.at_step for fault in plan]
    assert moments == sorted(moments)  # type: ignore[type-var]
    assert all(0 <= moment < steps for moment in moments)  # type: ignore[operator]


@given(seed=st.integers(0, 2**40), rounds=st.integers(1, 4))
def test_every_kind_is_met_before_any_is_met_twice(seed: int, rounds: int) -> None:
    """Kinds come in shuffled rounds."""
    plan = plan_faults(seed, ChaosSection(at_steps=tuple(range(len(KINDS) * rounds))), 10_000, KINDS)
    for start in range(0, len(plan), len(KINDS)):
        assert {fault.kind for fault in plan[start : start + len(KINDS)]} == set(KINDS)


def test_seeds_differ() -> None:
    """Another seed is another drill."""
    plans = {plan_faults(seed, ChaosSection(), 10_000, KINDS) for seed in range(20)}
    assert len(plans) == 20


def test_without_moments_one_of_each_kind_is_spread_over_the_run() -> None:
    """The default drill of a request without a chaos section."""
    plan = plan_faults(3, ChaosSection(), 10_000, KINDS)
    steps = [fault.at_step or 0 for fault in plan]
    assert {fault.kind for fault in plan} == set(KINDS)
    assert max(after - before for before, after in itertools.pairwise(steps)) < 10_000 / len(KINDS) * 2


def test_a_rate_gives_moments_with_that_mean() -> None:
    """Independent faults every 120 s on average."""
    plan = plan_faults(5, ChaosSection(every_s=120.0), 10_000, KINDS)
    gaps = [plan[0].at_s or 0.0, *((b.at_s or 0) - (a.at_s or 0) for a, b in itertools.pairwise(plan))]
    assert 110 < sum(gaps) / len(gaps) < 130
    assert min(gaps) >= 0


@pytest.mark.parametrize(
    ("section", "kinds", "words"),
    [
        (ChaosSection(), ("kill_rank", "meteor"), "meteor"),
        (ChaosSection(), (), "no kind of fault is left"),
        (ChaosSection(at_steps=(5, 100)), KINDS, "after the end of the run"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_by_name(section: ChaosSection, kinds: tuple[str, ...], words: str) -> None:
    """Exit 64, before anything is started."""
    with pytest.raises(RequestError, match=words):
        plan_faults(0, section, 100, kinds)


def test_a_run_is_not_given_more_faults_than_it_has_room_for() -> None:
    """20 segments hold 10; which ones depends on the seed alone; by name all or a refusal that says what would do."""
    few = kinds_that_fit(1, KINDS, 20, asked=False)
    assert len(few) == 10
    assert few == kinds_that_fit(1, KINDS, 20, asked=False) != kinds_that_fit(2, KINDS, 20, asked=False)
    assert few == tuple(kind for kind in KINDS if kind in few)
    assert kinds_that_fit(1, KINDS, 1_000, asked=False) == KINDS
    assert len(kinds_that_fit(1, KINDS, 1, asked=False)) == 1
    with pytest.raises(RequestError, match=r"chaos.kinds: .*got 4.*allowed: 3 in 7 segments"):
        kinds_that_fit(1, KINDS[:4], 7, asked=True)


def test_kinds_follow_what_machine_and_request_offer() -> None:
    """Nothing is planned that could not fire."""
    everything = offered_kinds(root=True, own_disk=True, planner=True, prefect=True, relay=True)
    assert set(everything) == set(KINDS)
    little = offered_kinds(root=False, own_disk=False, planner=False, prefect=False, relay=False, cpu=False)
    needy = {
        "full_disk",
        "read_only_store",
        "hostile_planner",
        "prefect_away",
        "prefect_killed",
        "kill_writer",
        "store_errors",
        "store_resets",
    }
    assert not needy & set(little)
    assert len(little) >= 15


def test_a_fault_is_survived_only_if_it_fired_and_was_recovered_from() -> None:
    """Three verdicts."""
    assert score_fault(met()).verdict == "survived"
    assert score_fault(met(recovered_s=None)).verdict == "not_recovered"
    assert score_fault(met(fired=False, recovered_s=None)).verdict == "not_fired"


def test_a_drill_passes_only_if_everything_held_and_everything_fired() -> None:
    """Exit 0 hangs on this."""
    good, bad = score_fault(met()), score_fault(met(fired=False, recovered_s=None))
    held, broken = same("weights", "aa", "aa"), same("weights", "aa", "bb")
    assert passed((good,), (held,))
    assert not passed((good, bad), (held,))
    assert not passed((good,), (held, broken))
    assert not same("weights", "", "").held


def test_the_report_names_verdict_promises_and_every_fault_and_escapes_what_it_shows() -> None:
    """The same content as text and as a page."""
    fault = score_fault(met()).model_copy(update={"proof": "<b>gone</b>"})
    value = report((fault,), (same("same weights", "aa", "bb"),))
    for words in ("FAILED", "BROKEN", "same weights", "kill_rank", "0.70 s", "12 steps redone"):
        assert words in text_report(value)
    page = html_report(value)
    assert "&lt;b&gt;gone&lt;/b&gt;" in page
    assert "<b>gone</b>" not in page
