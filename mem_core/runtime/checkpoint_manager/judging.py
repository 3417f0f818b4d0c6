"""Verdicts: asking the validator, publishing what it says, quarantining what is bad, walking back to the newest that holds."""

import json
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from mem_core.core.run.belonging import Belonging, belonging_of
from mem_core.domain.checkpoint import ASIDE_NAME, VERDICT_NAME, CheckpointExpectation, CheckpointManifest, CheckpointVerdict
from mem_core.domain.errors import InternalError, NoValidCheckpoint
from mem_core.domain.events import CheckpointJudged, CheckpointRemoved, Noted
from mem_core.infrastructure.storage.reading import why
from mem_core.runtime.checkpoint_manager.attempt_area import AttemptArea
from mem_core.runtime.checkpoint_manager.catalog import Catalog
from mem_core.runtime.checkpoint_manager.inspection.file_checks import ManifestOnDisk, check_claims, check_files
from mem_core.runtime.checkpoint_manager.inspection.manifest_codec import ManifestDamaged, SignatureRefused, encode_verdict
from mem_core.runtime.checkpoint_manager.inspection.shards import refuse_other_shape
from mem_core.runtime.checkpoint_manager.inspection.validator import Level, Validator
from mem_core.runtime.checkpoint_manager.ports import CheckpointPorts

QUARANTINE_KEEP = 3
_LEVELS: tuple[Level, ...] = ("integrity", "replay")


@dataclass(frozen=True)
class Judge:
    """The judging half of `CheckpointManager`, which opens the run folder and translates errors around every call."""

    run_id: str
    birth: Mapping[str, Any]
    ports: CheckpointPorts
    area: AttemptArea
    catalog: Catalog
    lock: threading.RLock
    validator: Validator
    initial_weights_digest: str = ""
    told: set[str] = field(default_factory=set[str])

    def validate(self, step: int, wanted: Level) -> CheckpointVerdict:
        """See `CheckpointManager.validate`."""
        try:
            present = self.catalog.read(step)
        except FileNotFoundError as exc:
            raise NoValidCheckpoint(
                f"no complete checkpoint of step {step} in {self.catalog.folder}", remedy="List them with `mem checkpoints list`."
            ) from exc
        except ManifestDamaged as exc:
            return self.condemn(step, (f"manifest: {exc}",), wanted)
        known = self.catalog.verdict(step, present.sha256)
        if known is not None and not known.valid:
            return self._publish(known)  # a crash came between a bad verdict and quarantine
        misplaced = check_claims(present.manifest, step, self.run_id)
        if misplaced:
            return self.condemn(step, misplaced, wanted)
        foreign = self.belonging(present).foreign
        if foreign:
            return self.set_aside(step, foreign, wanted)
        if known is not None and _LEVELS.index(known.level) >= _LEVELS.index(wanted):
            return known
        verdict = self.validator(self.catalog.path(step), present.manifest, self._digest_before(step), wanted)
        if not verdict.manifest_sha256:  # the manifest was damaged under the validator's hands: the verdict is about these bytes
            verdict = verdict.model_copy(update={"manifest_sha256": self.catalog.raw_digest(step)})
        return self._publish(verdict)

    def belonging(self, present: ManifestOnDisk, *, bytes_too: bool = True) -> Belonging:
        """Whether a manifest that names this run's id is this run's; `bytes_too`: also whether it is the very one that was journaled."""
        return belonging_of(present.manifest, present.sha256 if bytes_too else "", self.birth, self.ports.words)

    def newest_valid(
        self, expectation: CheckpointExpectation, level: Level, recheck: bool, leave_out: Collection[int]
    ) -> CheckpointManifest | None:
        """See `CheckpointManager.newest_valid`."""
        self.set_strangers_aside(level)
        skipped: list[str] = []
        for step in reversed(self.catalog.steps()):
            present, reason, counts = self._candidate(step, expectation, level, recheck, leave_out)
            if present is not None:
                self._say_what_nobody_knows(present)
                return present.manifest
            self._say_once(f"checkpoint of step {step} skipped: {reason}", aloud=counts)
            if counts:
                skipped.append(f"step {step}: {reason}")
        quarantined = [info for info in self.catalog.listing() if info.state == "quarantined"]
        if not skipped and not quarantined:
            self.ports.emit(Noted(text="no checkpoint yet: training starts at step 0"))
            return None
        skipped = skipped or [f"step {info.step}: quarantined earlier ({', '.join(info.reasons) or 'damaged'})" for info in quarantined]
        raise NoValidCheckpoint(
            f"checkpoints of run {self.run_id} exist and none is valid ({'; '.join(skipped)[:600]})",
            remedy=f"Restore one from a mirror, or look at {self.catalog.quarantine} and start another run_id.",
        )

    def is_stranger(self, step: int) -> bool:
        """Whether what lies at a step is another run's, or may be good for somebody who has another key: nothing of ours to throw away."""
        try:
            present = self.catalog.read(step)
        except SignatureRefused:
            return True
        except (FileNotFoundError, ManifestDamaged):
            return False
        return present.manifest.run_id != self.run_id or bool(self.belonging(present).foreign)

    def set_aside(self, step: int, reasons: tuple[str, ...], level: Level) -> CheckpointVerdict:
        """Move a checkpoint that is whole out of the way: another run's, or one that cannot be loaded. Its own verdict stays with it."""
        return self._publish(self._bad(step, reasons, level), whole=True)

    def condemn(self, step: int, reasons: tuple[str, ...], level: Level) -> CheckpointVerdict:
        """Publish a bad verdict about the manifest as it lies there."""
        return self._publish(self._bad(step, reasons, level))

    def _bad(self, step: int, reasons: tuple[str, ...], level: Level) -> CheckpointVerdict:
        return CheckpointVerdict(
            step=step,
            level=level,
            valid=False,
            reasons=reasons,
            weights_bad=False,
            manifest_sha256=self.catalog.raw_digest(step),
            judged_unix_s=self.ports.clock(),
        )

    def set_strangers_aside(self, level: Level) -> None:
        """All of them, not only those that are newer than what is resumed from: rotation must never meet another run's."""
        for step, present in self.catalog.complete():
            foreign = self.belonging(present).foreign if present.manifest.run_id == self.run_id else ()
            if foreign and not check_claims(present.manifest, step):
                self._say_once(f"checkpoint of step {step} is not this run's and was set aside: {'; '.join(foreign)}", aloud=True)
                self.set_aside(step, foreign, level)

    def _say_what_nobody_knows(self, present: ManifestOnDisk) -> None:
        unheld = self.belonging(present).unheld
        if unheld and self.birth:
            step = present.manifest.step
            self._say_once(f"the checkpoint of step {step} could not be held against this run's journal: {unheld}", aloud=True)

    def _say_once(self, text: str, *, aloud: bool) -> None:
        """Journal it, and show it to people where it is `aloud`; what was said in this attempt is not said again."""
        if text not in self.told:
            self.told.add(text)
            self.ports.emit(Noted(text=text))
            if aloud:
                self.ports.tell(text)

    def _candidate(
        self, step: int, expectation: CheckpointExpectation, level: Level, recheck: bool, leave_out: Collection[int]
    ) -> tuple[ManifestOnDisk | None, str, bool]:
        """(what to resume from or None, why not, whether it counts as an existing checkpoint)."""
        if step in leave_out:
            return None, "it could not be loaded", True
        try:
            present = self.catalog.read(step)
        except FileNotFoundError:
            return None, "no manifest: it was never completed", self.catalog.was_complete(step)
        except SignatureRefused as exc:
            return None, str(exc), True  # with the right key it may be the best there is: left where it lies
        except ManifestDamaged as exc:
            self.condemn(step, (f"manifest: {exc}",), level)
            return None, f"manifest: {exc}", True
        if present.manifest.run_id != self.run_id:
            return None, f"it belongs to run {present.manifest.run_id}", True
        refuse_other_shape(present.manifest, expectation)
        known = self.catalog.verdict(step, present.sha256)
        verdict = self.validate(step, level)
        if not verdict.valid:
            return None, "; ".join(verdict.reasons) or "judged bad", True
        try:
            reasons = self._recheck(step, present) if recheck and known is not None else ()
        except OSError as exc:  # nothing can be said about it: it stays where it lies, and an older one is tried
            return None, f"it cannot be read ({why(exc)})", True
        if reasons:
            self.condemn(step, reasons, level)
            return None, "; ".join(reasons), True
        return present, "", True

    def _recheck(self, step: int, present: ManifestOnDisk) -> tuple[str, ...]:
        """The paired check of the reader: every byte again, and that no file would run code."""
        folder = self.catalog.path(step)
        reasons = check_files(self.ports.disk, folder, present.manifest)
        files = present.manifest.files
        return reasons or tuple(f"{entry.path}: {reason}" for entry in files for reason in self.ports.scan(folder / entry.path))

    def _digest_before(self, step: int) -> str:
        """Weights digest of the newest validated checkpoint before `step`, else that of the untrained model if it is known."""
        valid = [manifest for number, (manifest, verdict) in self.catalog.own().items() if number < step and verdict and verdict.valid]
        return valid[-1].weights_digest if valid else self.initial_weights_digest

    def _publish(self, verdict: CheckpointVerdict, *, whole: bool = False) -> CheckpointVerdict:
        """Write it beside the manifest that it is about; quarantine what is bad. What is `whole` keeps the verdict that it came with."""
        folder = self.catalog.path(verdict.step)
        self.ports.fence()
        with self.lock:
            if self.catalog.raw_digest(verdict.step) != verdict.manifest_sha256:
                raise InternalError(f"the checkpoint of step {verdict.step} was replaced while it was judged", remedy="Judge it again.")
            if whole:
                self.area.publish_file(json.dumps({"step": verdict.step, "reasons": verdict.reasons}).encode(), folder / ASIDE_NAME)
            else:
                self.area.publish_file(encode_verdict(verdict), folder / VERDICT_NAME)
            if not verdict.valid:
                self.area.to_quarantine(folder, QUARANTINE_KEEP, whole=whole)
        self.ports.emit(CheckpointJudged(verdict=verdict))
        if not verdict.valid:
            self.ports.emit(CheckpointRemoved(step=verdict.step, reason=f"quarantined: {'; '.join(verdict.reasons)}"[:500]))
        return verdict
