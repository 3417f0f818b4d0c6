"""Whether prepared data is what the request allows. Pure."""

from mem_core.domain.errors import DataError, RequestError
from mem_core.domain.request import DataSection
from mem_core.runtime.data.values import PreparedData

_SHOWN_BAD_ROWS = 10


def check_prepared(prepared: PreparedData, data: DataSection, vocab_size: int | None) -> None:
    """Hold prepared data against what the request allows.

    Raises:
        DataError: too many bad rows, or nothing to train on.
        RequestError: token ids beyond the model's embeddings.
    """
    allowed = data.max_bad_rows if data.on_bad_row == "skip" else 0
    if prepared.num_bad_rows > allowed:
        raise _bad_rows(prepared, data)
    if not prepared.num_samples:
        why = f" ({'; '.join(prepared.notes)})" if prepared.notes else ""
        raise DataError(
            f"no row to train on in {prepared.num_files} files with {prepared.num_documents} documents{why}",
            field="data.train",
            value=", ".join(data.train_paths),
            remedy="Give files that hold text",
        )
    empty = [number for number, source in enumerate(prepared.sources) if not source.num_rows]
    if empty:
        raise DataError(
            "no row to train on in this source, which has a weight or stands beside one that has",
            field=f"data.train.{empty[0]}",
            value=data.train_paths[empty[0]],
            remedy="Give it files that hold text and that no source before it names, or leave it out",
        )
    if vocab_size is not None and prepared.max_token_id >= vocab_size:
        raise RequestError(
            f"the tokenizer gives token {prepared.max_token_id}, the model has {vocab_size} embeddings",
            field="model.source",
            bound=f"token ids below {vocab_size}",
            remedy="Use the tokenizer that belongs to the model",
        )


def _bad_rows(prepared: PreparedData, data: DataSection) -> DataError:
    total = prepared.num_bad_rows
    shown = "".join(f"\n  {row}" for row in prepared.bad_rows[:_SHOWN_BAD_ROWS])
    more = f"\n  and {total - _SHOWN_BAD_ROWS} more" if total > _SHOWN_BAD_ROWS else ""
    skipping = data.on_bad_row == "skip"
    repair = "Repair the rows, or raise data.max_bad_rows" if skipping else "Repair the rows, or set data.on_bad_row to skip"
    return DataError(
        f"{total} bad {'row' if total == 1 else 'rows'}:{shown}{more}",
        field="data.train",
        bound=f"{data.max_bad_rows} with data.max_bad_rows" if skipping else "none with data.on_bad_row: fail",
        remedy=prepared.hint or repair,
    )
