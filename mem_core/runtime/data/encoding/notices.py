"""What was counted while rows became tokens, in words for people. Pure."""

from collections.abc import Mapping, Sequence

_WORDS = {
    "rows_without_trained_label": ("sequence holds", "sequences hold", "no token to train on and {were} left out"),
    "truncated_documents": ("document was", "documents were", "longer than data.sequence_length and cut at the end"),
    "prompts_cut": (
        "row was",
        "rows were",
        "longer than data.sequence_length; the beginning of the prompt gave way, the answer stayed",
    ),
    "answers_cut": ("conversation lost", "conversations lost", "earlier answers with that beginning"),
    "own_special_tokens": (
        "row holds",
        "rows hold",
        "the tokenizer's own beginning or end token in the text; at the edges it was not added a second time",
    ),
    "doubled_special_tokens": (
        "chat has",
        "chats have",
        "the tokenizer's beginning or end token twice in a row, as the template writes it",
    ),
}


def notices(dropped: Mapping[str, int], remarks: Mapping[str, int], bad_rows: Sequence[str], num_bad_rows: int) -> list[str]:
    """One sentence for each kind that was met; bad rows are named by the first of them."""
    counts = {**dropped, **remarks}
    found = [_sentence(counts[kind], kind) for kind in _WORDS if counts.get(kind)]
    if num_bad_rows:
        found.insert(0, f"{num_bad_rows} bad {'row was' if num_bad_rows == 1 else 'rows were'} skipped, first {bad_rows[0]}")
    return found


def _sentence(count: int, kind: str) -> str:
    one, many, rest = _WORDS[kind]
    return f"{count:,} {one if count == 1 else many} {rest}".replace("{were}", "was" if count == 1 else "were")
