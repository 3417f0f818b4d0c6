"""The restore drill's own process: `python -m flows.commands.restore_probe RUN_FOLDER OWNER_PID LEVEL`
prints what it proved as one JSON object.

Level `integrity` reads, hashes and judges every file of the newest checkpoint. Level `replay` also restores it in fresh processes and
takes steps. What comes after the newest one is not recorded yet, so those steps must only be finite; the newest checkpoint that the
run has gone on from is replayed as well, and there losses and gradient norms must come out as they were recorded.
"""

import json
import sys
from pathlib import Path
from typing import Any

from flows.commands.checkpoints import UNCHECKED, open_catalog, signature_key
from mem_core.core.run.identity import read_identity
from mem_core.domain.checkpoint import SIGNATURE_NAME, CheckpointManifest, CheckpointVerdict
from mem_core.domain.errors import InternalError, MemError, NoValidCheckpoint
from mem_core.infrastructure.machine.process_ties import die_with_parent
from mem_core.infrastructure.settings import Settings
from mem_core.runtime.checkpoint_manager.catalog import Catalog
from mem_core.runtime.checkpoint_manager.inspection.validator import IntegrityValidator, Level, Replay
from mem_core.runtime.ranks.local.processes import ForkServer

ROTATION_TRIES = 5


def prove(folder: Path, level: Level, settings: Settings, server: ForkServer | None = None) -> list[dict[str, Any]]:
    """Verdicts as plain values, the newest checkpoint's first. Changes nothing; the run may train meanwhile.

    `server`: somebody's fork server for level replay; otherwise one is started for as long as it takes.

    Raises:
        NoValidCheckpoint: there is no checkpoint. RequestError: no such run. DataError: its data has changed since it was born.
    """
    catalog = open_catalog(folder, signature_key(settings))
    if level == "integrity":
        return _prove_newest(catalog, settings, None, level)
    from mem_core.runtime.proof.deep_verify import stepping

    with stepping(folder, settings, lambda text: print(text, file=sys.stderr, flush=True), server) as replay:
        return _prove_newest(catalog, settings, replay, level)


def _prove_newest(catalog: Catalog, settings: Settings, replay: Replay | None, level: Level) -> list[dict[str, Any]]:
    """A run that trains meanwhile may rotate away what is being judged; then the next newest is judged."""
    for _ in range(ROTATION_TRIES):
        damaged = _damaged_newest(catalog)
        if damaged:
            return damaged
        own = {step: manifest for step, (manifest, _) in catalog.own().items()}
        if not own:
            raise NoValidCheckpoint(
                "there is no committed checkpoint", value=catalog.folder.parent, remedy="Give the store and id of a run that has one."
            )
        steps = [max(own), *(_gone_on_from(catalog.folder.parent, own, settings) if replay is not None else ())]
        try:
            verdicts = [_judge(catalog.path(step), own[step], settings, replay, level) for step in steps]
        except OSError:
            if all(catalog.path(step).is_dir() for step in steps):
                raise
            continue
        if all(catalog.path(step).is_dir() for step in steps):
            return [_row(verdict, recorded=index > 0) for index, verdict in enumerate(verdicts)]
    raise InternalError(
        f"{ROTATION_TRIES} checkpoints in turn were rotated away while they were judged",
        remedy="Raise checkpoint.keep_last or training.segment_steps, or drill while the run rests.",
    )


def _damaged_newest(catalog: Catalog) -> list[dict[str, Any]]:
    """The verdict about a newest checkpoint whose very manifest cannot be believed; empty where it can."""
    states = [info for info in catalog.listing() if info.state in ("valid", "unvalidated", "invalid")]
    newest = max(states, key=lambda info: info.step, default=None)
    if newest is None or newest.step in catalog.own():
        return []
    return [{"step": newest.step, "level": "integrity", "valid": False, "steps": "", "reasons": "; ".join(newest.reasons)}]


def _gone_on_from(folder: Path, own: dict[int, CheckpointManifest], settings: Settings) -> list[int]:
    """The newest checkpoint whose next steps are on record, in the shape that the run has now; at most one."""
    from mem_core.core.run.record import record_of
    from mem_core.core.run.reshard import shape_of
    from mem_core.infrastructure.telemetry.metrics import read_metrics
    from mem_core.runtime.proof.deep_verify import newest_position, recorded_steps

    shape = shape_of(record_of(folder).request)
    columns, newest = read_metrics(folder / "metrics"), newest_position(folder, settings)
    for step in sorted(own, reverse=True)[1:]:
        manifest = own[step]
        if (manifest.num_ranks, manifest.zero_stage) == shape and recorded_steps(columns, newest, manifest) is not None:
            return [step]
    return []


def _judge(path: Path, manifest: CheckpointManifest, settings: Settings, replay: Replay | None, level: Level) -> CheckpointVerdict:
    key = signature_key(settings)
    verdict = IntegrityValidator(signature_key=key, replay=replay)(path, manifest, "", level)
    against = read_identity(path.parent.parent).foreign(manifest, verdict.manifest_sha256)
    if key is None and (path / SIGNATURE_NAME).exists():
        against = (UNCHECKED, *against)
    return verdict.model_copy(update={"valid": False, "reasons": (*against, *verdict.reasons)}) if against else verdict


def _row(verdict: CheckpointVerdict, recorded: bool) -> dict[str, Any]:
    """One line of the table that people see."""
    steps = {"integrity": "", "replay": "as recorded" if recorded else "finite (nothing is recorded after it yet)"}[verdict.level]
    shown = verdict.model_dump(mode="json", include={"step", "level", "valid", "weights_digest"})
    reasons = "; ".join(verdict.reasons)
    return {**shown, "steps": steps if verdict.valid else "", "duration_s": round(verdict.duration_s, 2), "reasons": reasons}


def main(argv: list[str]) -> int:
    """0 with verdicts, else the exit code of the error, which is printed as JSON too."""
    die_with_parent(int(argv[1]))
    try:
        answer: Any = prove(Path(argv[0]), "replay" if argv[2] == "replay" else "integrity", Settings.from_environment())
        code = 0
    except MemError as exc:
        answer = {"error": type(exc).__name__, **{name: getattr(exc, name) for name in ("problem", "remedy", "field", "value", "bound")}}
        code = exc.exit_code
    print(json.dumps(answer))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
