"""Which form the rows of a request take: which labels count, and whether documents that share a row see each other."""

import json
from contextlib import suppress
from pathlib import Path

from mem_core.domain.environment import DataRemark
from mem_core.domain.request import DataSection
from mem_core.infrastructure.storage.sealed import read_sealed, sealed
from mem_core.infrastructure.storage.writing import replace_text
from mem_core.runtime.data.encoding.cache import wants_apart
from mem_core.runtime.data.encoding.encoder import Encoder
from mem_core.runtime.data.encoding.notices import one_a_row
from mem_core.runtime.data.encoding.sequences import RowForm
from mem_core.runtime.data.values import PrepareJob
from mem_core.runtime.models.encoding import architecture_identity
from mem_core.runtime.models.folders import is_preset

_MOST_BYTES = 2**16


def row_form(job: PrepareJob, encoder: Encoder) -> tuple[DataSection, RowForm, tuple[DataRemark, ...]]:
    """The data section as it is followed, the form of its rows, and what a person should be told.

    A model that cannot keep documents apart gets one document a row, padded: the same training, slower.
    """
    data = job.data
    masked = _is_masked(data, encoder, job.rules)
    if not wants_apart(data, job.rules):
        return data, RowForm(masked=masked), ()
    why = _why_not_apart(job)
    if why:
        return data.model_copy(update={"packing": False}), RowForm(masked=masked), (one_a_row(why),)
    answered = data.prompt_field is not None or data.messages_field is not None
    return data, RowForm(masked=masked, apart=True, undivided=answered), ()


def _is_masked(data: DataSection, encoder: Encoder, rules: int) -> bool:
    if rules < 3:
        return data.prompt_field is not None or (data.messages_field is not None and encoder.chat_has_assistant_mask)
    if data.prompt_field is not None:
        return data.completion_only or data.assistant_only  # the latter where they are messages, which only the rows tell
    return data.messages_field is not None and data.assistant_only


def remember_apart(job: PrepareJob) -> None:
    """Keep in the cache whether the model keeps documents apart, where that matters: trying it takes seconds. Losing it costs those."""
    if not wants_apart(job.data, job.rules) or is_preset(job.tokenizer_source) or _remembered(job) is not None:
        return
    text = sealed(json.dumps({"why_not": _tried(job.tokenizer_source)}))
    with suppress(OSError):
        replace_text(_memory_of(job), text)


def _why_not_apart(job: PrepareJob) -> str:
    if is_preset(job.tokenizer_source):
        return ""
    known = _remembered(job)
    return _tried(job.tokenizer_source) if known is None else known


def _tried(source: str) -> str:
    from mem_core.runtime.models.apart import why_not_apart

    return why_not_apart(source)


def _memory_of(job: PrepareJob) -> Path:
    return job.cache_dir / f"apart-{architecture_identity(job.tokenizer_source)[:32]}.json"


def _remembered(job: PrepareJob) -> str | None:
    text = read_sealed(_memory_of(job), _MOST_BYTES)
    return None if text is None else str(json.loads(text)["why_not"])
