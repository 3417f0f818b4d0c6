"""A model folder tried in a process of its own, before any rank is started: what it is made of is only known when it is built.

The doctor's static look answers within a second and finds what configuration and headers say. Whether transformers builds that
architecture from these files, whether the tokenizer loads, and whether the weights are numbers at all shows here: once, with a
refusal, instead of in rank after rank. A small model is built as ranks build it; of a large one the skeleton is built. Every weight
is looked at.
"""

import json
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mem_core.domain.errors import MemError, RequestError
from mem_core.domain.request import ModelSection
from mem_core.domain.units import Value
from mem_core.runtime.models.build import build_model, build_skeleton, load_tokenizer
from mem_core.runtime.models.configuration import refused
from mem_core.runtime.models.facts import describe_model
from mem_core.runtime.models.folders import local_model_folder
from mem_core.runtime.models.weights import weight_files

ENTRY = "mem_core.runtime.models.trial:trial_main"
BUILT_WHOLE_BYTES = 2 * 2**30
_GENERATION_NAME = "generation_config.json"
_REMEDY = "Download the model again, or take another one."


class Trial(Value):
    """What is tried."""

    model: ModelSection
    sequence_length: int
    dtype: str
    activation_checkpointing: bool = False
    cache_dir: Path | None = None


def try_model(trial: Trial) -> None:
    """Load what training and export will load.

    Raises:
        RequestError: something of the folder cannot be used, in the library's words.
    """
    source, cache_dir = trial.model.source, trial.cache_dir
    facts = describe_model(source, cache_dir)
    folder = local_model_folder(source, cache_dir)
    load_tokenizer(source, cache_dir)
    generation_settings(folder, source)
    for path in weight_files(folder, source):
        _refuse_other_than_numbers(path, source)
    if facts.stored_bytes <= BUILT_WHOLE_BYTES:
        build_model(trial.model, trial.sequence_length, 0, trial.dtype, trial.activation_checkpointing, cache_dir)
    else:
        build_skeleton(source, cache_dir)


def generation_settings(folder: Path, source: str) -> Any:
    """What generation_config.json says, as transformers reads it; None where the folder has none. Not used in training, and read by
    everything that is made with the exported model.

    Raises:
        RequestError: it cannot be used.
    """
    from transformers import GenerationConfig

    if not (folder / _GENERATION_NAME).exists():
        return None
    try:
        return GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception as exc:  # whatever the library makes of other people's files
        words = " ".join(str(exc).split())[:300]
        raise refused(f"{_GENERATION_NAME} cannot be used: {type(exc).__name__}: {words}", source, "Mend or remove that file") from exc


def _refuse_other_than_numbers(path: Path, source: str) -> None:
    """Read every weight once: one that is not finite makes every loss so from the first step on."""
    import torch
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - it is no mapping
            tensor = tensors.get_tensor(name)
            if tensor.is_floating_point() and tensor.dtype.itemsize > 1 and not bool(torch.isfinite(tensor).all()):
                raise refused(f"the weight {name} in {path.name} holds what is no finite number", source)


def trial_main(connection: Connection) -> None:
    """Entry of the process: takes a `Trial` as JSON, answers with None or the error."""
    try:
        try_model(Trial.model_validate(json.loads(connection.recv())))
    except MemError as exc:
        connection.send(exc)
    except Exception as exc:  # noqa: BLE001 - the last edge of a process: the owner is told
        connection.send(RequestError(f"the model cannot be used: {type(exc).__name__}: {exc}"[:500], field="model.source", remedy=_REMEDY))
    else:
        connection.send(None)


def answer_of(connection: Connection, deadline_s: float) -> Any:
    """What a trial came to. Raises EOFError where its process died, TimeoutError where it never answered."""
    if not connection.poll(deadline_s):
        raise TimeoutError
    return connection.recv()
