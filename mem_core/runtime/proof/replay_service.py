"""The replay verdict: fresh processes restore a checkpoint and redo the steps that the live run did after it.

Equal losses and gradient norms, to the bit on a CPU, show that weights, optimizer state, counters and data order are all there:
the second step's loss depends on the update that the restored optimizer made in the first.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mem_core.domain.checkpoint import CheckpointManifest, TrainingPosition
from mem_core.domain.plan import Hyperparams
from mem_core.domain.segment import Evidence, WorkerLost, describe_failure
from mem_core.runtime.ranks.port import GroupFailed, Ranks, Watch
from mem_core.runtime.ranks.worker.protocol import ReplayEvidence, Train, WorkerSpec

CUDA_RELATIVE_TOLERANCE = 1e-3  # kernels may reduce in another order there
UNRECORDED_STEPS = 2
EVIDENCE_DEADLINE_S = 600.0


@dataclass
class ReplayService:
    """`Replay` for the validator: (folder, manifest) -> reasons, empty if it came out the same.

    `evidence_of(step)` gives what the live run did next; None where it never did (it died before), and then the restored state
    must at least make finite steps. `skips()`: batches that the run leaves out for good; the redone steps leave them out too.
    A batch among `failed_batches()` failed in the live run as well: that it fails again says nothing against the checkpoint.
    """

    ranks: Ranks
    spec: WorkerSpec
    evidence_of: Callable[[int, float], ReplayEvidence | None]
    skips: Callable[[], tuple[int, ...]] = tuple
    failed_batches: Callable[[], frozenset[int]] = frozenset

    def __call__(self, folder: Path, manifest: CheckpointManifest) -> tuple[str, ...]:
        """Restore in fresh processes, step, compare. The processes are gone afterwards."""
        evidence = self.evidence_of(manifest.step, EVIDENCE_DEADLINE_S)
        num_steps = len(evidence.losses) if evidence is not None else UNRECORDED_STEPS
        hyperparams = evidence.hyperparams if evidence is not None else None
        try:
            redone = take_steps(self.ranks, self.spec, folder, manifest.position, num_steps, hyperparams, self.skips())
        except GroupFailed as exc:
            if evidence is None and exc.failure.evidence.batch_index in self.failed_batches():
                return ()
            return (f"could not be restored and stepped in fresh processes: {describe_failure(exc.failure)}",)
        return compare(evidence, redone, exact=self.spec.device == "cpu")


def take_steps(
    ranks: Ranks,
    spec: WorkerSpec,
    folder: Path,
    position: TrainingPosition,
    num_steps: int,
    hyperparams: Hyperparams | None = None,
    skip_batches: tuple[int, ...] = (),
) -> ReplayEvidence:
    """Restore a checkpoint folder in fresh processes of `spec`'s shape and take 1 or 2 steps; nothing is saved, the processes are gone.

    Raises:
        GroupFailed: with the classified cause.
    """
    step = position.applied_steps
    group = ranks.start(spec, Watch(purpose="replay"))
    try:
        last = batch_after(position.batch_index, num_steps, skip_batches)
        group.restore(str(folder), position, last)
        order = Train(step + num_steps, hyperparams or position.hyperparams, staging=None, skip_batches=skip_batches, replay_of=step)
        group.train(order, lambda beats: None, lambda: False)
        redone = group.wait_evidence(step, 1.0)
    finally:
        group.stop()
    if redone is None:
        raise GroupFailed(WorkerLost(cause="the fresh processes reported no steps", evidence=Evidence()))
    return redone


def batch_after(first: int, num_steps: int, skip_batches: tuple[int, ...]) -> int:
    """Index after the last of `num_steps` batches from `first` on, those left out not counted."""
    left_out, index, done = frozenset(skip_batches), first, 0
    while done < num_steps:
        done += index not in left_out
        index += 1
    return index


def compare(recorded: ReplayEvidence | None, redone: ReplayEvidence, *, exact: bool) -> tuple[str, ...]:
    """What differs between the recorded steps and the redone ones; without a record, what is not finite."""
    if recorded is None:
        return tuple(f"loss {loss} is not finite" for loss in redone.losses if not math.isfinite(loss))
    reasons: list[str] = []
    for name, before, after in (("loss", recorded.losses, redone.losses), ("gradient norm", recorded.grad_norms, redone.grad_norms)):
        if len(before) != len(after):
            reasons.append(f"{len(after)} steps were redone instead of {len(before)}")
            continue
        for number, (old, new) in enumerate(zip(before, after, strict=True), start=1):
            if not _same(old, new, exact):
                reasons.append(f"{name} of step {recorded.step + number} is {new!r}, recorded {old!r}")
    return tuple(reasons)


def _same(old: float | None, new: float | None, exact: bool) -> bool:
    if old is None or new is None:
        return old is new
    return old == new if exact else math.isclose(old, new, rel_tol=CUDA_RELATIVE_TOLERANCE)
