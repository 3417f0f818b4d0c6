"""The real reader and the real encoder over the first rows of each file: what preparation will say, before anything is started."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mem_core.domain.environment import DataRefusal, DataRemark
from mem_core.domain.errors import MemError
from mem_core.domain.request import DataSection
from mem_core.domain.units import Value
from mem_core.runtime.data.encoding.acceptance import check_prepared
from mem_core.runtime.data.encoding.making.making import tokenize_files
from mem_core.runtime.data.encoding.making.reporter import Reporter
from mem_core.runtime.data.look.heads import Head, read_heads
from mem_core.runtime.data.reading.sources import SourceFile
from mem_core.runtime.data.reading.units import Readable
from mem_core.runtime.data.values import PreparedData, PrepareJob


class LookJob(Value):
    """What to look at; the same as what preparation would be asked to do, with the files already found."""

    prepare: PrepareJob
    train: tuple[SourceFile, ...]
    validation: tuple[SourceFile, ...] = ()
    parent_pid: int


class Look(Value):
    """What preparation would refuse, in its own words, and what it would say."""

    refusal: DataRefusal | None = None
    remarks: tuple[DataRemark, ...] = ()


def look_here(job: LookJob) -> Look:
    """Tokenise the beginnings of the files into a temporary folder that is gone afterwards."""
    try:
        train, validation = (read_heads(files, job.prepare.data) for files in (job.train, job.validation))
        whole = len(train) + len(validation) == len(job.train) + len(job.validation) and all(head.whole for head in (*train, *validation))
        prepared = _tokenized(job.prepare, train, validation, whole)
        return judged(prepared, job.prepare, whole, _read_as_text(train, job.prepare.data))
    except MemError as error:
        return Look(refusal=refusal_of(error))


def _tokenized(job: PrepareJob, train: Sequence[Head], validation: Sequence[Head], whole: bool) -> PreparedData:
    data = job.data
    if not whole and isinstance(data.validation, float):
        data = data.model_copy(update={"validation": None})  # a fraction of a few rows says nothing
    with tempfile.TemporaryDirectory(prefix="mem-look-") as name:
        folder = Path(name)
        readable: list[Readable] = []
        for number, head in enumerate((*train, *validation)):
            if head.num_rows is not None:
                readable.append(Readable(head.source, head.source.path, "0" * 64, most_rows=head.num_rows))
                continue
            path = folder / f"head-{number:06d}"
            path.write_bytes(head.content)
            readable.append(Readable(head.source, str(path), "0" * 64))
        quiet = Reporter(lambda progress: None, 0)
        return tokenize_files(job.model_copy(update={"data": data}), readable[: len(train)], readable[len(train) :], folder, "", quiet)


def judged(prepared: PreparedData, job: PrepareJob, whole: bool, more: tuple[DataRemark, ...] = ()) -> Look:
    """Hold what was seen against what the request allows; where it was not everything, rows may follow that can be trained on."""
    try:
        check_prepared(prepared if whole else prepared.model_copy(update={"num_samples": 1, "sources": ()}), job.data, job.vocab_size)
    except MemError as error:
        return Look(refusal=refusal_of(error), remarks=more)
    seen = "" if whole else f"of the first {prepared.num_documents + prepared.num_bad_rows:,} rows: "
    return Look(remarks=(*more, *(remark.model_copy(update={"text": seen + remark.text}) for remark in prepared.remarks)))


def refusal_of(error: MemError) -> DataRefusal:
    """An error as a finding will show it."""
    where = f"{error.field}: " if error.field else ""
    got = f" (got {error.value})" if error.value is not None else ""
    return DataRefusal(problem=f"{where}{error.problem}{got}", bound=error.bound, remedy=error.remedy, exit_code=error.exit_code)


def _read_as_text(heads: Sequence[Head], data: DataSection) -> tuple[DataRemark, ...]:
    """Rows under a name that says text are trained on as they stand, braces and all."""
    if data.format != "auto":
        return ()
    for head in heads:
        line = head.content.lstrip()[:1] == b"{" and head.source.kind == "text" and head.content.strip().split(b"\n", 1)[0]
        if line and _is_object(line):
            return (
                DataRemark(
                    check="data.format",
                    severity="warning",
                    text=f"{head.source.path} is read as plain text because of its name, and its first line is a JSON object",
                    remedy="Set data.format: jsonl if its lines are rows.",
                ),
            )
    return ()


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
