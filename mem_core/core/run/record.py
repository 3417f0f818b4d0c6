"""What a run is: run.json for people, beside a sealed copy of it, so that one damaged byte neither ends a run nor bends it."""

import contextlib
import hashlib
import json
import os
from pathlib import Path

from pydantic import Field, ValidationError

from mem_core.core.results.length import RunLength
from mem_core.domain.errors import NoValidCheckpoint, RequestError
from mem_core.domain.plan import MemoryPlan
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.results.origin import ForkOrigin
from mem_core.domain.units import Value
from mem_core.infrastructure.storage.reading import RECORD_LIMIT_BYTES, read_json, read_regular_text

RECORD_NAME = "run.json"
SEAL_NAME = "run.sealed.json"
_REMEDY = f"Restore {RECORD_NAME} or {SEAL_NAME} (a mirror keeps {RECORD_NAME}), or start another run_id."


class RunRecord(Value):
    """run.json: what this run is. Frozen at birth but for the changes named as allowed."""

    run_id: str
    request: RuntimeRequest = Field(description="In steps, whatever it was asked in.")
    length: RunLength = Field(default=RunLength(), description="What its steps follow from.")
    device: str
    dtype: str
    default_plan: MemoryPlan
    threads_per_rank: int = 1
    data_fingerprint: str
    model_fingerprint: str
    versions: dict[str, str] = {}
    encoding: dict[str, str] = Field(default={}, description="All that decides token ids, part by part; empty where it was not kept.")
    router_loss: bool = Field(default=False, description="Whether what the model adds to its own loss is trained on.")
    compiled: bool | None = Field(default=None, description="Whether passes are compiled; None in runs that no rule was asked about.")
    born_unix_s: float = 0.0
    origin: ForkOrigin | None = Field(default=None, description="Of a run that began with another one's checkpoint.")


def seal(text: str) -> str:
    """`text` with its own SHA-256."""
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "text": text})


def sealed_text(folder: Path) -> str | None:
    """The record's text from the sealed copy; None where there is none or its digest does not hold."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        sealed = read_json(folder / SEAL_NAME)
        if hashlib.sha256(sealed["text"].encode()).hexdigest() == sealed["sha256"]:
            return str(sealed["text"])
    return None


def plain_text(folder: Path) -> str | None:
    """The text of run.json as it lies there; None where there is none, it cannot be read, or it is no text."""
    try:
        return read_regular_text(folder / RECORD_NAME, RECORD_LIMIT_BYTES)
    except (OSError, UnicodeDecodeError):
        return None


def has_record(folder: Path) -> bool:
    """Whether a run was born in `folder`, whatever became of its record."""
    return os.path.lexists(folder / RECORD_NAME) or os.path.lexists(folder / SEAL_NAME)


def read_record(folder: Path) -> RunRecord | None:
    """What the run in `folder` is, by the sealed copy where that is whole, else by run.json. None where there is neither. Reads only.

    Raises:
        NoValidCheckpoint: a record is there and cannot be read: nothing says what the checkpoints are checkpoints of.
    """
    if not has_record(folder):
        return None
    text = sealed_text(folder) or plain_text(folder)
    if text is None:
        raise NoValidCheckpoint(f"the record of the run in {folder} cannot be read", remedy=_REMEDY)
    try:
        return RunRecord.model_validate_json(text)
    except (ValidationError, RequestError) as exc:
        reason = exc.errors()[0]["msg"] if isinstance(exc, ValidationError) else exc
        raise NoValidCheckpoint(f"the record of the run in {folder} is damaged ({reason})", remedy=_REMEDY) from exc


def record_of(folder: Path) -> RunRecord:
    """The record of a run that must be there.

    Raises:
        RequestError: no run was ever born in `folder`. NoValidCheckpoint: its record is damaged beyond its copy.
    """
    record = read_record(folder)
    if record is None:
        raise RequestError("there is no such run", field="RUN", value=folder, remedy="Give a run id with --store, or a run folder.")
    return record


def refuse_lost_record(folder: Path) -> NoValidCheckpoint:
    """The error of a run that has trained and has no record any more: born anew it would mix two runs."""
    return NoValidCheckpoint(f"the run in {folder} has trained already and its {RECORD_NAME} is gone", remedy=_REMEDY)
