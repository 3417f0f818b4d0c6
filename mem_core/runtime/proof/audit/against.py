"""What was trained again, held against what was recorded: digests, every step's numbers, and the distance where bits differ."""

from dataclasses import dataclass
from pathlib import Path

from mem_core.core.audit.comparison import compare_steps
from mem_core.core.audit.course import Course
from mem_core.core.audit.line import key_of
from mem_core.core.audit.stretches import Stretch
from mem_core.domain.results.audit import AuditedSegment, DigestPair
from mem_core.runtime.checkpoint_manager.inspection.distance import weights_distance
from mem_core.runtime.proof.audit.examined import ExaminedRun
from mem_core.runtime.proof.audit.redo import Redone

WEIGHTS, TRAJECTORY = "weights after its last step", "trajectory: splits, losses and gradient norms of every step"


@dataclass(frozen=True)
class Ends:
    """Folders of the two checkpoints at the end of a stretch, one trained again and one as the run left it; None where that is gone."""

    redone: Path
    recorded: Path | None


def held_against(segment: AuditedSegment, run: ExaminedRun, stretch: Stretch, course: Course, redone: Redone, ends: Ends) -> AuditedSegment:
    """`segment` with its verdict. Files are looked into only where the digests of the weights differ."""
    weights = DigestPair(recorded=stretch.commit.weights_digest, redone=redone.weights_digest)
    trajectory = DigestPair(recorded=stretch.commit.trajectory_digest, redone=redone.position.trajectory_digest)
    committed = {step: loss for step, loss in run.told.losses.items() if stretch.from_step < step <= stretch.to_step}
    steps = compare_steps(run.columns, redone.columns, committed)
    pairs = ((WEIGHTS, weights), (TRAJECTORY, trajectory))
    reasons = [f"{what}: {pair.redone[:16]}, the journal names {pair.recorded[:16]}" for what, pair in pairs if pair.differs]
    reasons += [*steps.reasons, *_not_decided(run, course)]
    nothing_named = not weights.recorded and not trajectory.recorded
    return segment.model_copy(
        update={
            "status": "different" if reasons else "not_redone" if nothing_named else "equal",
            "reasons": tuple(reasons) or (("the journal names no digest for its end",) if nothing_named else ()),
            "weights_digest": weights,
            "trajectory_digest": trajectory,
            "steps_compared": steps.num_steps,
            "distance": steps.distance.model_copy(update={"weights": _apart(segment, weights, ends)}),
        }
    )


def _not_decided(run: ExaminedRun, course: Course) -> list[str]:
    """Values that no recorded decision let through, where the journal has any decision at all."""
    used = {key_of(piece.hyperparams) for piece in course.pieces}
    strange = sorted(used - run.told.decided) if run.told.decided else []
    return [f"it ran under {values}, which no decision in the journal allows" for values in strange]


def _apart(segment: AuditedSegment, weights: DigestPair, ends: Ends) -> float | None:
    if not weights.differs:
        return 0.0 if weights.recorded and weights.redone else None
    if ends.recorded is None:
        return None
    return weights_distance(ends.redone, ends.recorded, segment.num_ranks, segment.zero_stage)
