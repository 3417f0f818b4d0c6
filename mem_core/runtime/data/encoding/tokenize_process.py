"""The tokenising process: `python -m mem_core.runtime.data.encoding.tokenize_process`, one PrepareJob as a JSON line on standard input."""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mem_core.domain.errors import DataError, StoreUnavailable
from mem_core.domain.request import DataSection
from mem_core.domain.secrets import unsigned
from mem_core.runtime.data.child import Say, answer_parent
from mem_core.runtime.data.encoding.acceptance import check_prepared
from mem_core.runtime.data.encoding.cache import HashCache, asked_for, fingerprint, load_prepared, publish
from mem_core.runtime.data.encoding.forms import remember_apart
from mem_core.runtime.data.encoding.making.making import tokenize_files
from mem_core.runtime.data.encoding.making.reporter import Reporter
from mem_core.runtime.data.encoding.marks.ledger import Marks
from mem_core.runtime.data.encoding.marks.staging import MARKS, staging_folder
from mem_core.runtime.data.reading.sources import SourceFile, each_once, resolve_files, unchanged
from mem_core.runtime.data.reading.units import Readable, hash_file
from mem_core.runtime.data.values import OnProgress, PreparedData, PrepareJob

_REMEMBER_EVERY_S = 5.0
_ROWS = "rows"


def prepare_here(job: PrepareJob, on_progress: OnProgress) -> PreparedData:
    """Prepare in this process; the result is published in `job.cache_dir` whole or not at all.

    Raises:
        DataError, RequestError: see `prepare_data`.
    """
    train, validation, _ = resolve_job(job.data, job.rules)
    report = Reporter(on_progress, sum(file.size_bytes for file in (*train, *validation)))
    asked = asked_for(job.data, train, validation, job.tokenizer_source, job.rules)
    with staging_folder(job.cache_dir, asked) as (folder, can_go_on):
        readable = _hashed((*train, *validation), folder, HashCache(job.cache_dir), report)
        pairs = [(file.source, file.sha256) for file in readable]
        name = fingerprint(job.data, pairs[: len(train)], pairs[len(train) :], job.tokenizer_source, job.rules)
        cached = load_prepared(job.cache_dir, name)
        if cached is not None:
            return cached
        remember_apart(job)
        marks = Marks(folder / MARKS, _whose(name, pairs), job.mark_every_s) if can_go_on else None
        prepared = tokenize_files(job, readable[: len(train)], readable[len(train) :], folder / _ROWS, name, report, marks)
        changed = [file.source.path for file in readable if not unchanged(file.source)]
        if changed:
            raise DataError("changed while it was read", field="data", value=changed[0], remedy="Run again once nothing writes to it")
        check_prepared(prepared, job.data, job.vocab_size)  # before publishing: rows after too many bad ones were not tokenised
        report.begin("writing", sum(path.stat().st_size for path in (folder / _ROWS).rglob("*.*") if path.suffix != ".json"))
        publish(folder / _ROWS, job.cache_dir, prepared)
    made = load_prepared(job.cache_dir, name, lambda size_bytes: report.advance("writing", size_bytes))
    report.finish("writing")
    if made is None:
        raise StoreUnavailable(f"prepared data {name} vanished from the cache", remedy="Let nothing else clean the cache folder; run again")
    return made.model_copy(update={"from_cache": False})


def _whose(name: str, pairs: Sequence[tuple[SourceFile, str]]) -> str:
    """All that decides what a preparation does in its middle: what decides its rows, and the names that it has for their files."""
    named = [[unsigned(file.path), digest] for file, digest in pairs]
    return hashlib.sha256(json.dumps([name, named]).encode()).hexdigest()


def resolve_job(data: DataSection, rules: int) -> tuple[tuple[SourceFile, ...], tuple[SourceFile, ...], tuple[str, ...]]:
    """Training and validation files of a data section, each real file once in its list, and notes. The first rules took them as named."""
    own = data.validation if isinstance(data.validation, tuple) else ()
    train, validation = train_files(data, rules), resolve_files(own, data, "data.validation", rules)
    if rules == 1:
        return train, validation, ()
    (train, notes), (validation, more) = each_once(train), each_once(validation)
    return train, validation, (*notes, *more)


def numbered_sources(data: DataSection) -> Iterator[tuple[int, str]]:
    """The sources of data.train; without weights they are one, whose files are packed together."""
    for number, path in enumerate(data.train_paths):
        yield (number if data.is_weighted else 0), path


def train_files(data: DataSection, rules: int) -> tuple[SourceFile, ...]:
    """The files of data.train; those of weighted sources know theirs. Raises DataError, RequestError."""
    found = ((number, resolve_files([path], data, "data.train", rules)) for number, path in numbered_sources(data))
    return tuple(file.model_copy(update={"source": number}) for number, files in found for file in files)


def _hashed(files: Sequence[SourceFile], folder: Path, hashes: HashCache, report: Reporter) -> list[Readable]:
    """Every file with its hash. What was hashed is remembered now and then, so that whoever is killed at it need not begin again."""
    readable: list[Readable] = []
    fresh: list[Readable] = []
    due_s = time.monotonic() + _REMEMBER_EVERY_S
    for number, file in enumerate(files):
        readable.append(_readable(file, number, folder, hashes, report))
        fresh += [readable[-1]] if readable[-1].hashed_unix_ns else []
        if fresh and time.monotonic() > due_s:
            hashes.remember((file.source, file.sha256, file.hashed_unix_ns) for file in fresh)
            fresh, due_s = [], time.monotonic() + _REMEMBER_EVERY_S
    if fresh:
        hashes.remember((file.source, file.sha256, file.hashed_unix_ns) for file in fresh)
    return readable


def _readable(file: SourceFile, number: int, folder: Path, hashes: HashCache, report: Reporter) -> Readable:
    """The file with its hash. What lies elsewhere is copied here, so that what was hashed is what is tokenised."""
    began_ns = time.time_ns()
    known = None if file.is_remote else hashes.get(file)
    if known is not None:
        report.advance("hashing", file.size_bytes)
        return Readable(file, file.path, known)
    copy = folder / f"source-{number:06d}" if file.is_remote else None
    digest = hash_file(file, lambda size_bytes: report.advance("hashing", size_bytes), copy)
    if copy is not None and copy.stat().st_size != file.size_bytes:
        file = file.model_copy(update={"size_bytes": copy.stat().st_size, "stamp": ""})
    return Readable(file, str(copy or file.path), digest, began_ns)


def _work(line: bytes, say: Say) -> dict[str, Any]:
    job = PrepareJob.model_validate_json(line)
    try:
        return prepare_here(job, lambda progress: say(progress.model_dump(mode="json"))).model_dump(mode="json")
    except OSError as error:  # sources raise DataError by themselves
        raise StoreUnavailable(
            f"prepared data cannot be written: {error.strerror}",
            field="cache",
            value=job.cache_dir,
            remedy="Free disk space or allow writing",
        ) from error


def main() -> None:
    """Answer the parent."""
    answer_parent(_work)


if __name__ == "__main__":
    main()
