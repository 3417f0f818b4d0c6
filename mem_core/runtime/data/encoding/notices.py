"""What was counted while rows became tokens, in words for people. Pure."""

from collections.abc import Mapping, Sequence
from typing import Literal

from mem_core.domain.environment import DataRemark
from mem_core.domain.request import DataSection
from mem_core.runtime.data.encoding.sequences import RowForm
from mem_core.runtime.data.serving.shards import TokenIndex

_Words = tuple[Literal["notice", "warning"], str, str, str]
_WORDS: dict[str, _Words] = {
    "rows_without_trained_label": ("warning", "sequence holds", "sequences hold", "no token to train on and {were} left out"),
    "truncated_documents": ("notice", "document was", "documents were", "longer than data.sequence_length and cut at the end"),
    "prompts_cut": (
        "notice", "row was", "rows were", "longer than data.sequence_length; the beginning of the prompt gave way, the answer stayed",
    ),
    "answers_cut": ("warning", "conversation lost", "conversations lost", "earlier answers with that beginning"),
    "own_special_tokens": (
        "notice", "row holds", "rows hold",
        "the tokenizer's own beginning or end token in the text; at the edges it was not added a second time",
    ),
    "doubled_special_tokens": (
        "warning", "chat has", "chats have", "the tokenizer's beginning or end token twice in a row, as the template writes it",
    ),
    "answers_without_end": (
        "warning", "chat has", "chats have",
        "an answer that the chat template ends with no end-of-turn token, so that the model is not taught to stop",
    ),
}  # fmt: skip
CHAT_LOSS = DataRemark(
    check="data.chat_loss",
    severity="warning",
    text="the chat template does not mark the assistant's words, so that the loss covers whole conversations",
    remedy="Put {% generation %} and {% endgeneration %} around them in chat_template.jinja, or use data.prompt_field and "
    "data.completion_field.",
)
WHOLE_CHATS = DataRemark(
    check="data.loss",
    severity="warning",
    text="the loss covers whole conversations: what people ask is learned as much as what is answered",
    remedy="Set data.assistant_only to true to train on the assistant's words and end-of-turn tokens alone.",
)
NONE_HELD_OUT = DataRemark(
    check="data.validation",
    severity="notice",
    text="no row was held out for validation: there are too few documents for the fraction",
    remedy="Give a larger data.validation, or a list of files of its own.",
)


def one_a_row(why: str) -> DataRemark:
    """Said where packing was asked for and documents cannot be kept apart."""
    return DataRemark(
        check="data.packing",
        severity="warning",
        text=f"each document is a row of its own, padded: this model cannot keep documents apart that share a row ({why})",
        remedy="Set data.packing to false to say so yourself, or data.document_attention to across to pack them all the same.",
    )


def coverage(data: DataSection, form: RowForm, index: TokenIndex, rules: int) -> tuple[DataRemark, ...]:
    """What the loss of rows with answers covers, and whether documents see each other. Runs of earlier rules had other words for it."""
    if rules < 3 or not (data.prompt_field or data.messages_field) or not index.num_tokens:
        return ()
    apart = "; documents that share a row do not see each other" if form.apart else ""
    if not form.masked and data.messages_field:
        return (WHOLE_CHATS.model_copy(update={"text": WHOLE_CHATS.text + apart}),)
    what = "prompts and completions"
    if form.masked:
        answers = "the assistant's words and end-of-turn tokens" if data.messages_field else "the completions"
        what = f"{answers}: {index.trained_tokens / index.num_tokens:.0%} of the tokens"
    return (DataRemark(check="data.loss", severity="notice", text=f"the loss covers {what}{apart}"),)


def notices(dropped: Mapping[str, int], remarks: Mapping[str, int], bad_rows: Sequence[str], num_bad_rows: int) -> list[DataRemark]:
    """One remark for each kind that was met; bad rows are named by the first of them."""
    counts = {**dropped, **remarks}
    found = [_remark(counts[kind], *words) for kind, words in _WORDS.items() if counts.get(kind)]
    if num_bad_rows:
        text = f"{num_bad_rows} bad {'row was' if num_bad_rows == 1 else 'rows were'} skipped, first {bad_rows[0]}"
        found.insert(0, DataRemark(check="data.bad_rows", severity="warning", text=text, remedy="Repair the rows to train on them too."))
    return found


def _remark(count: int, severity: Literal["notice", "warning"], one: str, many: str, rest: str) -> DataRemark:
    text = f"{count:,} {one if count == 1 else many} {rest}".replace("{were}", "was" if count == 1 else "were")
    return DataRemark(check="data.rows", severity=severity, text=text)
