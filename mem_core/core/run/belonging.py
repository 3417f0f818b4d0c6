"""Whose a checkpoint is: held against what the run was born with, and against what its journal said about that step. Pure.

A checkpoint proves that its own bytes are whole; that does not make it this run's. A store that was restored or synced from elsewhere
holds checkpoints of the same run id that prove themselves and carry other weights. Two things tell them apart:

- the birth: the values that decide the weights, carried by every manifest that this version writes (`birth_of`);
- the journal: which manifests it named for a step before they could be seen there (`CheckpointWords`).

Manifests that were written before there was a birth are judged by the journal's digests alone. Where neither can tell, the fingerprint
of the data decides, and whoever takes such a checkpoint up says so.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from mem_core.core.run.reconcile import ALLOWED_CHANGES, RESHARD_CHANGES
from mem_core.core.run.record import RunRecord
from mem_core.domain.checkpoint import CheckpointManifest
from mem_core.domain.events import CheckpointCommitted, CheckpointJudged, CheckpointRemoved, CheckpointSealed, Event

Birth = Mapping[str, Any]
MOST_NAMED = 3
_SHOWN = 16
# Names of the run and of places; `auto` values, of which the answers are taken; and sources, which their fingerprints stand for.
_NOT_BORN_WITH = ("run_id", "schema_version", "device", "model.dtype", "model.source", "data.train", "data.validation")
_FREE = "deepspeed"  # its keys are the user's: one that is missing says something


def birth_of(record: RunRecord) -> dict[str, Any]:
    """Dotted name -> plain value of everything that decides the weights and may not change while the run lives."""
    request = record.request.model_dump(mode="json")
    left_out = (*ALLOWED_CHANGES, *RESHARD_CHANGES, *_NOT_BORN_WITH)
    values = {name: value for name, value in _fields(request) if not any(name == path or name.startswith(f"{path}.") for path in left_out)}
    facts = {"device": record.device, "dtype": record.dtype, "data": record.data_fingerprint, "model": record.model_fingerprint}
    return values | facts


def birth_differences(ours: Birth, theirs: Birth) -> tuple[str, ...]:
    """What the two were born with differently, in words. A value that only one of them knows (it is of a newer version) says nothing."""
    names = sorted(name for name in ours.keys() & theirs.keys() if not _same(ours[name], theirs[name], strict=name == _FREE))
    return tuple(f"{name} {_shown(theirs[name])} there and {_shown(ours[name])} here" for name in names)


@dataclass(frozen=True)
class Word:
    """What the journal said about the checkpoint of a step. Without a manifest's digest it is of an older version."""

    weights_digest: str
    trajectory_digest: str
    manifest_sha256: str = ""

    def difference(self, manifest: CheckpointManifest, manifest_sha256: str) -> str:
        """How a manifest differs from it, in words; empty where it does not. Without `manifest_sha256` digests alone are compared."""
        named = (
            ("weights", self.weights_digest, manifest.weights_digest),
            ("a trajectory", self.trajectory_digest, manifest.position.trajectory_digest),
        )
        for what, said, found in named:
            if said and found and said != found:
                return f"the journal names {what} {_shown(said)} for step {manifest.step}, the manifest {_shown(found)}"
        if self.manifest_sha256 and manifest_sha256 and self.manifest_sha256 != manifest_sha256:
            said, found = _shown(self.manifest_sha256), _shown(manifest_sha256)
            return f"the journal names manifest {said} for step {manifest.step}, this is {found}: it was changed since"
        return ""


class CheckpointWords:
    """The journal's standing words by step: what may lie there now. Fed in order; what was removed or condemned is withdrawn."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._standing: dict[int, tuple[Word, ...]] = {}
        self._proven: set[int] = set()
        self.any_said = False
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """Take the next event."""
        match event:
            case CheckpointSealed():  # it is about to take its place; what was there before may still be
                self._say(event.step, (*self._standing.get(event.step, ()), _word(event)))
            case CheckpointCommitted():
                self._say(event.step, (_word(event),))
            case CheckpointJudged():
                if event.verdict.valid:
                    self._proven.add(event.verdict.step)
                else:
                    self._withdraw(event.verdict.step)
            case CheckpointRemoved():
                self._withdraw(event.step)
            case _:
                pass

    def of(self, step: int) -> tuple[Word, ...]:
        """What may lie at a step; empty where the journal says nothing about it."""
        return self._standing.get(step, ())

    def proven_beyond(self, step: int) -> tuple[int, ...]:
        """Steps after `step` whose checkpoints were proven and, as far as the journal knows, are still there; ascending."""
        return tuple(sorted(number for number in self._proven if number > step))

    def _say(self, step: int, words: tuple[Word, ...]) -> None:
        self.any_said = True
        self._standing[step] = words

    def _withdraw(self, step: int) -> None:
        self._standing.pop(step, None)
        self._proven.discard(step)


@dataclass(frozen=True)
class Belonging:
    """`foreign`: why a checkpoint is not this run's; empty where it is. `unheld`: what nobody could hold it against, in words."""

    foreign: tuple[str, ...] = ()
    unheld: str = ""


def belonging_of(manifest: CheckpointManifest, manifest_sha256: str, birth: Birth, words: CheckpointWords) -> Belonging:
    """Whether a manifest of this run id is this run's. `birth` is empty where it is not known: then only the journal is asked."""
    differences = birth_differences(birth, manifest.birth)
    if differences:
        more = f" and {len(differences) - MOST_NAMED} more" if len(differences) > MOST_NAMED else ""
        return Belonging((f"it was born with other values: {', '.join(differences[:MOST_NAMED])}{more}",))
    said = words.of(manifest.step)
    if said:
        against = [difference for word in said if (difference := word.difference(manifest, manifest_sha256))]
        return Belonging((against[-1],) if len(against) == len(said) else ())
    if manifest.birth:
        return Belonging(unheld="" if words.any_said else "the journal names no checkpoint; the values it was born with agree")
    data = birth.get("data", "")
    if data and manifest.data_fingerprint and data != manifest.data_fingerprint:
        return Belonging((f"its data is {_shown(manifest.data_fingerprint)}, that of this run {_shown(data)}",))
    return Belonging(unheld="its manifest is of an older version and the journal does not name it; only the fingerprint of the data agrees")


def _word(event: CheckpointSealed | CheckpointCommitted) -> Word:
    return Word(event.weights_digest, event.trajectory_digest, event.manifest_sha256)


def _fields(request: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """`section.field` of every section, and what stands beside the sections."""
    for key, value in request.items():
        if isinstance(value, dict) and key != _FREE:
            yield from ((f"{key}.{name}", inner) for name, inner in cast("dict[str, Any]", value).items())
        else:
            yield key, value


def _same(ours: Any, theirs: Any, *, strict: bool) -> bool:
    if strict or not (isinstance(ours, dict) and isinstance(theirs, dict)):
        return bool(ours == theirs)
    one, other = cast("dict[str, Any]", ours), cast("dict[str, Any]", theirs)
    return all(_same(one[key], other[key], strict=False) for key in one.keys() & other.keys())


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text[:_SHOWN] if len(text) > 2 * _SHOWN else text
