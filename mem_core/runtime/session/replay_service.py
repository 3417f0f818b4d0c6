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
from mem_core.runtime.worker.protocol import ReplayEvidence, Train, WorkerSpec
from mem_core.runtime.worker_group.group import GroupFailed, WorkerGroup
from mem_core.runtime.worker_group.processes import ForkServer

CUDA_RELATIVE_TOLERANCE = 1e-3  # kernels may reduce in another order there
UNRECORDED_STEPS = 2
EVIDENCE_DEADLINE_S = 600.0


@dataclass
class ReplayService:
    """`Replay` for the validator: (folder, manifest) -> reasons, empty if it came out the same.

    `evidence_of(step)` gives what the live run did next; None where it never did (it died before), and then the restored state
    must at least make finite steps.
    """

    server: ForkServer
    spec: WorkerSpec
    live_folder: Path
    evidence_of: Callable[[int, float], ReplayEvidence | None]
    _tries: int = 0

    def __call__(self, folder: Path, manifest: CheckpointManifest) -> tuple[str, ...]:
        """Restore in fresh processes, step, compare. The processes are gone afterwards."""
        evidence = self.evidence_of(manifest.step, EVIDENCE_DEADLINE_S)
        self._tries += 1
        num_steps = len(evidence.losses) if evidence is not None else UNRECORDED_STEPS
        hyperparams = evidence.hyperparams if evidence is not None else None
        try:
            redone = take_steps(self.server, self.spec, self.live_folder, self._tries, folder, manifest.position, num_steps, hyperparams)
        except GroupFailed as exc:
            return (f"could not be restored and stepped in fresh processes: {describe_failure(exc.failure)}",)
        return compare(evidence, redone, exact=self.spec.device == "cpu")


def take_steps(
    server: ForkServer,
    spec: WorkerSpec,
    live_folder: Path,
    try_number: int,
    folder: Path,
    position: TrainingPosition,
    num_steps: int,
    hyperparams: Hyperparams | None = None,
) -> ReplayEvidence:
    """Restore a checkpoint folder in fresh processes of `spec`'s shape and take 1 or 2 steps; nothing is saved, the processes are gone.

    Raises:
        GroupFailed: with the classified cause.
    """
    step = position.applied_steps
    group = WorkerGroup(server, spec, live_folder, try_number, spec.request.resilience.hang_factor)
    try:
        group.restore(str(folder), position, position.batch_index + num_steps)
        order = Train(step + num_steps, hyperparams or position.hyperparams, staging=None, replay_of=step)
        group.train(order, lambda beats: None, lambda: False)
        redone = group.wait_evidence(step, 1.0)
    finally:
        group.stop()
    if redone is None:
        raise GroupFailed(WorkerLost(cause="the fresh processes reported no steps", evidence=Evidence()))
    return redone


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
