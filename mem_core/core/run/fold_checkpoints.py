"""The part of the run fold that is about checkpoints: written, proven, rejected, removed. Small, total and linear."""

from mem_core.domain.events import CheckpointCommitted, CheckpointJudged, CheckpointMirrored
from mem_core.domain.run import CheckpointCounts, MirrorSummary


class _Steps:
    """A set of steps that knows its newest one without a search, except after that one was taken out."""

    def __init__(self) -> None:
        self._steps: set[int] = set()
        self.newest: int | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def beyond(self, step: int) -> tuple[int, ...]:
        """Those after `step`, ascending."""
        return tuple(sorted(number for number in self._steps if number > step))

    def add(self, step: int) -> None:
        self._steps.add(step)
        self.newest = step if self.newest is None else max(self.newest, step)

    def discard(self, step: int) -> None:
        self._steps.discard(step)
        if step == self.newest:
            self.newest = max(self._steps, default=None)


class Checkpoints:
    """Checkpoints by fate: committed, then proven or rejected, then perhaps removed."""

    def __init__(self) -> None:
        self._digests: dict[int, tuple[str, str]] = {}
        self._sound = _Steps()
        self._valid = _Steps()
        self._proven: set[tuple[int, str]] = set()
        self._rejected: set[tuple[int, str]] = set()
        self._num_written = 0
        self._highest_validated_step = -1
        self._mirrored_step: int | None = None
        self._mirror_url: str | None = None
        self._mirror_problem = ""

    @property
    def newest_validated_step(self) -> int | None:
        """Newest step that was proven and is still there."""
        return self._valid.newest

    @property
    def newest_committed_step(self) -> int | None:
        """Newest step that is there and was not rejected."""
        return self._sound.newest

    def counts(self) -> CheckpointCounts:
        """Written counts commits; validated and rejected count distinct manifests; kept is what is there and not rejected."""
        return CheckpointCounts(written=self._num_written, validated=len(self._proven), rejected=len(self._rejected), kept=len(self._sound))

    def digests_at(self, step: int) -> tuple[str, str]:
        """(trajectory digest, weights digest) of the commit at `step`, empty where there is none."""
        return self._digests.get(step, ("", ""))

    def mirror(self) -> MirrorSummary | None:
        """How far the remote copies are; None where none was ever tried."""
        if self._mirror_url is None:
            return None
        at = self._mirrored_step
        return MirrorSummary(
            url=self._mirror_url,
            at_step=at,
            of_step=self._valid.newest,
            missing_steps=self._valid.beyond(-1 if at is None else at),
            problem=self._mirror_problem,
        )

    def mirrored(self, event: CheckpointMirrored) -> None:
        """A copy was made, or could not be."""
        self._mirror_url, self._mirror_problem = event.url, event.problem
        if not event.problem:
            self._mirrored_step = max(event.step, self._mirrored_step or 0)

    def committed(self, event: CheckpointCommitted) -> None:
        """Files and manifest are durable."""
        self._num_written += 1
        self._sound.add(event.step)
        self._valid.discard(event.step)
        self._digests[event.step] = (event.trajectory_digest, event.weights_digest)

    def judged(self, event: CheckpointJudged) -> bool:
        """Take a verdict; True where the validated step rose above every earlier one."""
        verdict = event.verdict
        key = (verdict.step, verdict.manifest_sha256)
        if not verdict.valid:
            self._rejected.add(key)
            self.removed(verdict.step)
            return False
        self._proven.add(key)
        self._sound.add(verdict.step)
        self._valid.add(verdict.step)
        rose = verdict.step > self._highest_validated_step
        self._highest_validated_step = max(self._highest_validated_step, verdict.step)
        return rose

    def removed(self, step: int) -> None:
        """Rotation or quarantine took it away."""
        self._sound.discard(step)
        self._valid.discard(step)
