"""`mem data`: what a request's rows come to, and the first of them as the model will see them. Prepares them where they are not yet."""

import sys
from collections.abc import Iterator

from mem_core.bootstrap import report_on_data
from mem_core.core.results.data_report import DataReport, Segment, ShownRow, mix_words
from mem_core.domain.errors import RequestError
from mem_core.domain.printable import printable
from mem_core.infrastructure.request.file import apply_overrides, build_request, load_mapping
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.telemetry.progress import ProgressDisplay

_TRAINED, _MASKED, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"
_BEGINS = "|"


def show_data(path: str, overrides: list[str], num_rows: int, as_json: bool) -> int:
    """Print the report; JSON holds the rows too.

    Raises:
        DataError and its kin: what training would refuse, in the same words.
    """
    if num_rows < 0:
        raise RequestError(
            "there is no such number of rows", field="--rows", value=num_rows, bound="0 or more", remedy="Leave it out for 3."
        )
    request = build_request(apply_overrides(load_mapping(path), overrides))
    settings = Settings.from_environment()
    with ProgressDisplay() as progress:
        report = report_on_data(request, settings, num_rows, progress)
    if as_json:
        print(report.model_dump_json())
        return 0
    for line in (*rendered_rows(report, coloured=sys.stdout.isatty() and not settings.no_color), "", *rendered_numbers(report)):
        print(line)
    return 0


def rendered_rows(report: DataReport, *, coloured: bool) -> Iterator[str]:
    """The first rows. Trained tokens are green, or between brackets where there are no colours."""
    if not report.rows:
        return
    marks = "trained tokens green, others dim" if coloured else "trained tokens between [[ and ]]"
    yield f"The first {len(report.rows):,} of {report.summary.num_sequences:,} training rows ({marks}; {_BEGINS} begins a document):"
    for number, row in enumerate(report.rows):
        yield f"--- row {number}: {row.num_tokens:,} tokens, {row.trained_tokens:,} trained"
        yield _text_of(row, coloured)


def _text_of(row: ShownRow, coloured: bool) -> str:
    return "".join(_marked(segment, coloured) for segment in row.segments)


def _marked(segment: Segment, coloured: bool) -> str:
    text = "\n".join(printable(line) for line in segment.text.split("\n"))
    text = f"{_BEGINS}{text}" if segment.begins else text
    if coloured:
        return f"{_TRAINED if segment.trained else _MASKED}{text}{_PLAIN}"
    return f"[[{text}]]" if segment.trained else text


def rendered_numbers(report: DataReport) -> Iterator[str]:
    """The numbers, a line each."""
    summary = report.summary
    yield f"files            {summary.num_files:,}"
    yield f"documents        {summary.num_documents:,}{_copies(report)}"
    if summary.document_tokens:
        named = ", ".join(f"{name} {length:,}" for name, length in summary.document_tokens.items())
        yield f"their tokens     {named}; a row holds {report.sequence_length:,}"
    yield f"training rows    {summary.num_sequences:,} with {summary.num_tokens:,} tokens"
    share = summary.trained_tokens / summary.num_tokens if summary.num_tokens else 0.0
    yield f"trained          {summary.trained_tokens:,} tokens, {share:.1%}; {1 - share:.1%} are masked or begin a row"
    yield from (f"  of an epoch    {line}" for line in mix_words(summary.sources))
    yield f"held-out rows    {summary.num_validation_sequences:,}"
    yield f"token ids        up to {report.max_token_id:,}; the tokenizer has {report.vocab_size:,}, the model {report.num_embeddings:,}"
    yield f"the run          {report.steps:,} steps, {report.epochs:.3g} epochs"
    dropped = {kind.replace("_", " "): count for kind, count in summary.dropped_rows.items() if count}
    counts = {"bad rows": summary.num_bad_rows, **dropped}
    if any(counts.values()):
        yield f"left out         {', '.join(f'{count:,} {kind}' for kind, count in counts.items() if count)}"
    for row in summary.bad_rows:
        yield f"  bad            {printable(row)}"
    for note in summary.notes:
        yield f"note             {printable(note)}"


def _copies(report: DataReport) -> str:
    count = report.summary.num_copies
    return f", {count:,} of them {'a copy' if count == 1 else 'copies'} of others" if count else ", no two alike"
