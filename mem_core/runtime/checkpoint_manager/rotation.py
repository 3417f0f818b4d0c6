"""Which checkpoints stay: a pure plan over proven ones."""

from collections.abc import Collection, Mapping

from mem_core.domain.checkpoint import CheckpointVerdict, RotationPlan
from mem_core.domain.request import CheckpointSection


def plan_rotation(
    steps: Collection[int], verdicts: Mapping[int, CheckpointVerdict], section: CheckpointSection, pinned: Collection[int] = ()
) -> RotationPlan:
    """keep = last `keep_last` validated, every multiple of `keep_every_steps` that is validated, pinned, newest valid, and whatever
    is newer than the newest valid one (not yet proven). The rest goes. With nothing validated nothing goes (I4).

    `steps` are the complete checkpoints of this run; order by number, never by name.
    """
    present = sorted(set(steps))
    valid = [step for step in present if (verdict := verdicts.get(step)) is not None and verdict.valid]
    keep: dict[int, tuple[str, ...]] = {}
    for step in present:
        reasons = _reasons_to_keep(step, valid, section, pinned)
        if reasons:
            keep[step] = reasons
    return RotationPlan(keep=keep, remove=tuple(step for step in present if step not in keep))


def _reasons_to_keep(step: int, valid: list[int], section: CheckpointSection, pinned: Collection[int]) -> tuple[str, ...]:
    if not valid:
        return ("nothing is validated yet",)
    proven = step in valid
    rules = (
        (step == valid[-1], "newest validated"),
        (proven and step in valid[-section.keep_last :], f"among the last {section.keep_last} validated"),
        (
            proven and bool(section.keep_every_steps) and step % (section.keep_every_steps or 1) == 0,
            f"multiple of {section.keep_every_steps}",
        ),
        (step in pinned, "pinned"),
        (step > valid[-1], "newer than the newest validated"),
    )
    return tuple(reason for holds, reason in rules if holds)
