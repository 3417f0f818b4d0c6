"""Laws of rotation, for any set of checkpoints and verdicts."""

from hypothesis import given
from hypothesis import strategies as st

from mem_core.domain.checkpoint import CheckpointVerdict
from mem_core.domain.request import CheckpointSection
from mem_core.runtime.checkpoint_manager import plan_rotation


def verdict(step: int, valid: bool) -> CheckpointVerdict:
    return CheckpointVerdict(step=step, level="integrity", valid=valid, weights_bad=False, manifest_sha256="0" * 64)


STEPS = st.dictionaries(st.integers(0, 1_000_000), st.sampled_from([True, False, None]), max_size=30)
SECTIONS = st.builds(CheckpointSection, keep_last=st.integers(1, 10), keep_every_steps=st.one_of(st.none(), st.integers(1, 50_000)))


@given(STEPS, SECTIONS, st.frozensets(st.integers(0, 1_000_000), max_size=5))
def test_laws(steps: dict[int, bool | None], section: CheckpointSection, extra_pins: frozenset[int]) -> None:
    """Each line is one law of DESIGN I4 and issue 3."""
    pinned = extra_pins | frozenset(list(steps)[:1])
    verdicts = {step: verdict(step, valid) for step, valid in steps.items() if valid is not None}
    plan = plan_rotation(tuple(steps), verdicts, section, pinned)
    valid = sorted(step for step, good in steps.items() if good)
    assert sorted((*plan.keep, *plan.remove)) == sorted(steps), "each checkpoint has exactly one fate"
    assert not (set(plan.keep) & set(plan.remove))
    if not valid:
        assert plan.remove == (), "nothing goes before something is validated"
        return
    assert valid[-1] in plan.keep, "the newest validated stays"
    assert set(valid[-section.keep_last :]) <= set(plan.keep), "the count is of validated ones"
    assert pinned & set(steps) <= set(plan.keep), "pinned ones stay"
    assert all(step < valid[-1] for step in plan.remove), "something newer was validated"
    if section.keep_every_steps:
        assert all(step % section.keep_every_steps or not steps[step] for step in plan.remove), "multiples stay"
    assert all(reasons for reasons in plan.keep.values()), "each has a reason"


@given(STEPS, SECTIONS)
def test_rotating_twice_is_rotating_once(steps: dict[int, bool | None], section: CheckpointSection) -> None:
    verdicts = {step: verdict(step, valid) for step, valid in steps.items() if valid is not None}
    once = plan_rotation(tuple(steps), verdicts, section)
    assert plan_rotation(tuple(once.keep), verdicts, section).remove == ()


def test_order_is_by_number() -> None:
    verdicts = {step: verdict(step, True) for step in (9, 10, 100)}
    assert plan_rotation((9, 10, 100), verdicts, CheckpointSection(keep_last=1)).remove == (9, 10)
