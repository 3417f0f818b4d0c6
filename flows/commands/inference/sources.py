"""MODEL_OR_RUN as people write it: a preset, a model or adapter folder, a URL, RUN, RUN@best or RUN@STEP. Always a folder in the end."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from flows.commands.export import Form, Wanted, export_step, wanted_step
from flows.commands.output import run_folder, split_run
from mem_core.core.run.record import RunRecord, has_record, record_of
from mem_core.domain.checkpoint import checkpoint_name
from mem_core.domain.errors import RequestError
from mem_core.domain.results.exports import EXPORT_FOLDER
from mem_core.domain.results.generation import InferenceDtype
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.storage.reading import local_name
from mem_core.infrastructure.telemetry.progress import Progress
from mem_core.runtime.models.folders import at_hand, is_preset
from mem_core.runtime.session.results.export_service import standing_in

FIELD = "MODEL_OR_RUN"
DTYPE: InferenceDtype = "float32"  # of an export that is used here: whatever the run's own model folder was, its weights are not rounded
_MODEL_FILES = ("config.json", "adapter_config.json")


@dataclass(frozen=True)
class Found:
    """A model that can be opened. `record` and `step` are those of the run that made it; `dtype` is what `auto` means for it."""

    model: str
    record: RunRecord | None = None
    step: int | None = None
    dtype: InferenceDtype = "auto"


def find_model(text: str, store: str, settings: Settings, progress: Progress) -> Found:
    """The folder of a model; of a run that of a proven checkpoint, exported now where it is not yet.

    Raises:
        RequestError: it is none of these. NoValidCheckpoint: the run has no such checkpoint.
    """
    if is_preset(text):
        return Found(text)
    path = local_name(text)
    if "://" in text and not text.startswith("file://"):
        return Found(at_hand(text, settings.model_cache_dir))
    if os.path.isdir(path) and any((Path(path) / name).is_file() for name in _MODEL_FILES):
        return Found(os.path.abspath(path))
    name, which = split_run(text, store, FIELD)
    folder = run_folder(name, store)
    if not has_record(folder):
        raise RequestError(
            "this is neither a model nor a run", field=FIELD, value=text,
            bound=f"a folder with {' or '.join(_MODEL_FILES)}, or a run of {store}: RUN, RUN@best, RUN@STEP",
            remedy="Check the path, or give the store of the run with --store.",
        )  # fmt: skip
    record = record_of(folder)
    step, digest = wanted_step(folder, Wanted(which if isinstance(which, int) else None, best=which == "best"), settings)
    model = _exported(folder.absolute(), step, digest, settings, progress)
    return Found(str(model), record, step, cast(InferenceDtype, record.dtype))


def _exported(folder: Path, step: int, digest: str, settings: Settings, progress: Progress) -> Path:
    """An export of these weights in `DTYPE`: one that stands there, or one that is made."""
    own = folder / EXPORT_FOLDER
    named = own / f"{checkpoint_name(step)}-{DTYPE}"
    for candidate in (named, own / checkpoint_name(step), own):
        mark = standing_in(candidate, step, digest)
        if mark is not None and mark.dtype == DTYPE:
            return candidate
    progress.note(f"writing the model of step {step:,} to {named}")
    export_step(folder, step, named, Form(DTYPE, merge=False), settings)
    return named


def budget_of(text: Any) -> int | None:
    """`--memory`: bytes, or text such as 6GiB. Raises RequestError."""
    from mem_core.domain.units import parse_bytes

    try:
        return None if text is None else parse_bytes(text)
    except ValueError as exc:
        raise RequestError(f"{exc}", field="--memory", remedy="Write a size such as 6GiB, or leave it out.") from exc
