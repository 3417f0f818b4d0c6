"""A run folder for tests: attempts with a lease that is a number, a journal in memory, engine files that are text, a judge of bytes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from mem_core.core.run.belonging import CheckpointWords
from mem_core.domain.checkpoint import CheckpointDraft, CheckpointExpectation, CheckpointManifest, CheckpointVerdict, TrainingPosition
from mem_core.domain.errors import RunHeld
from mem_core.domain.events import Event
from mem_core.domain.request import CheckpointSection
from mem_core.infrastructure.storage.disk import OsDisk
from mem_core.runtime.checkpoint_manager import CheckpointManager
from mem_core.runtime.checkpoint_manager.inspection.file_checks import check_files
from mem_core.runtime.checkpoint_manager.inspection.manifest_codec import encode_manifest, sha256_hex
from mem_core.runtime.checkpoint_manager.inspection.validator import Validator
from mem_core.runtime.checkpoint_manager.ports import CheckpointPorts, CheckpointScope

Kind = TypeVar("Kind")
SHARDS = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt")


def judge_bytes(folder: Path, manifest: CheckpointManifest, previous: str, level: Any) -> CheckpointVerdict:
    """A validator that judges sizes and digests, not tensors; `bad` in the weights digest means not finite."""
    reasons = check_files(OsDisk(), folder, manifest)
    if manifest.weights_digest.startswith("bad"):
        reasons = (*reasons, "not finite")
    digest = sha256_hex(encode_manifest(manifest))
    return CheckpointVerdict(step=manifest.step, level=level, valid=not reasons, reasons=reasons, weights_bad=False, manifest_sha256=digest)


class Run:
    """One run folder and its attempts; `newest` plays the lease."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.newest = 0
        self.events: list[Event] = []
        self.words = CheckpointWords()
        self.told: list[str] = []

    def emit(self, event: Event) -> None:
        """The journal of all attempts."""
        self.events.append(event)
        self.words.add(event)

    def attempt(self, number: int = 1, *, validator: Callable[..., CheckpointVerdict] = judge_bytes, **options: Any) -> CheckpointManager:
        """A manager of attempt `number`; older ones are fenced from now on. `options` are the manager's, sections as dictionaries."""
        self.newest = max(self.newest, number)

        def fence() -> None:
            if number < self.newest:
                raise RunHeld("held", remedy="Wait.")

        settings: dict[str, Any] = {"num_ranks": 2, "zero_stage": 2, "parameters": {"w": (2,)}}
        settings |= options.pop("expectation", {})
        section = CheckpointSection(**options.pop("section", {}))
        options.setdefault("scan", lambda path: ())
        scope = CheckpointScope(self.folder, "demo", number, section, CheckpointExpectation(**settings), options.pop("birth", {}))
        ports = {"fence": fence, "emit": self.emit, "words": self.words, "tell": self.told.append}
        return manager_of(scope, validator, **(ports | options))

    def seen(self, kind: type[Kind]) -> list[Kind]:
        """Emitted events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]


def manager_of(scope: CheckpointScope, validator: Validator, **options: Any) -> CheckpointManager:
    """A manager whose ports are given one by one; those that are not given do nothing, or are the real ones."""
    own = {name: options.pop(name) for name in ("signature_key", "initial_weights_digest") if name in options}
    ports: dict[str, Any] = {"fence": lambda: None, "emit": lambda event: None, **options}
    return CheckpointManager(scope, CheckpointPorts(**ports), validator, **own)


def stage(manager: CheckpointManager, step: int, content: str = "") -> Path:
    """Write every rank's file of a step into a new staging folder."""
    staging = manager.new_staging(step)
    for name in SHARDS:
        (staging / name).write_text(f"{name} of step {step} {content}")
    return staging


def draft(step: int, **fields: Any) -> CheckpointDraft:
    """What a trainer would say about a step."""
    fields.setdefault("weights_digest", f"digest-{step}")
    return CheckpointDraft(position=TrainingPosition(applied_steps=step, batch_index=step), **fields)


def save(manager: CheckpointManager, step: int, **fields: Any) -> CheckpointManifest:
    """Stage and commit a step."""
    return manager.commit(step, stage(manager, step), draft(step, **fields))


def proven(manager: CheckpointManager, *steps: int) -> None:
    """Stage, commit and validate steps."""
    for step in steps:
        save(manager, step)
        assert manager.validate(step).valid
