"""Which form the rows of a request take: which labels count, and whether documents that share a row see each other."""

from mem_core.domain.environment import DataRemark
from mem_core.domain.request import DataSection
from mem_core.runtime.data.encoding.cache import wants_apart
from mem_core.runtime.data.encoding.encoder import Encoder
from mem_core.runtime.data.encoding.notices import one_a_row
from mem_core.runtime.data.encoding.sequences import RowForm
from mem_core.runtime.data.values import PrepareJob
from mem_core.runtime.models.folders import is_preset


def row_form(job: PrepareJob, encoder: Encoder) -> tuple[DataSection, RowForm, tuple[DataRemark, ...]]:
    """The data section as it is followed, the form of its rows, and what a person should be told.

    A model that cannot keep documents apart gets one document a row, padded: the same training, slower.
    """
    data = job.data
    masked = _is_masked(data, encoder, job.rules)
    if not wants_apart(data, job.rules):
        return data, RowForm(masked=masked), ()
    why = _why_not_apart(job.tokenizer_source)
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


def _why_not_apart(source: str) -> str:
    if is_preset(source):
        return ""
    from mem_core.runtime.models.apart import why_not_apart

    return why_not_apart(source)
