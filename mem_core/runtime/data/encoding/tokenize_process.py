"""The tokenising process: `python -m mem_core.runtime.data.encoding.tokenize_process`, one PrepareJob as a JSON line on standard input."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from mem_core.domain.environment import DataRemark
from mem_core.domain.errors import DataError, StoreUnavailable
from mem_core.domain.request import DataSection
from mem_core.runtime.data.child import Say, answer_parent
from mem_core.runtime.data.encoding.acceptance import check_prepared
from mem_core.runtime.data.encoding.cache import HashCache, encoding_for, fingerprint, load_prepared, publish, staging_folder
from mem_core.runtime.data.encoding.earlier_rules import FirstRules, SecondRules, ThirdRules
from mem_core.runtime.data.encoding.encoder import Encoder
from mem_core.runtime.data.encoding.encoders import make_encoder
from mem_core.runtime.data.encoding.forms import remember_apart, row_form
from mem_core.runtime.data.encoding.notices import CHAT_LOSS, NONE_HELD_OUT, coverage, notices
from mem_core.runtime.data.encoding.sequences import rows_for
from mem_core.runtime.data.encoding.tokenizing import Target, Tokenizing
from mem_core.runtime.data.reading.sources import SourceFile, each_once, resolve_files, unchanged
from mem_core.runtime.data.reading.units import Readable, hash_file
from mem_core.runtime.data.serving.shards import ShardWriter, TokenIndex
from mem_core.runtime.data.values import OnProgress, PreparedData, PrepareJob, PrepareProgress

_PROGRESS_EVERY_S = 0.2
Phase = Literal["hashing", "tokenizing"]


def prepare_here(job: PrepareJob, on_progress: OnProgress) -> PreparedData:
    """Prepare in this process; the result is published in `job.cache_dir` whole or not at all.

    Raises:
        DataError, RequestError: see `prepare_data`.
    """
    with staging_folder(job.cache_dir) as folder:
        train, validation, _ = resolve_job(job.data, job.rules)
        report = Reporter(on_progress, sum(file.size_bytes for file in (*train, *validation)))
        hashes = HashCache(job.cache_dir)
        readable = [_readable(file, number, folder, hashes, report) for number, file in enumerate((*train, *validation))]
        hashes.remember((file.source, file.sha256, file.hashed_unix_ns) for file in readable if file.hashed_unix_ns)
        pairs = [(file.source, file.sha256) for file in readable]
        name = fingerprint(job.data, pairs[: len(train)], pairs[len(train) :], job.tokenizer_source, job.rules)
        cached = load_prepared(job.cache_dir, name)
        if cached is not None:
            return cached
        remember_apart(job)
        prepared = tokenize_files(job, readable[: len(train)], readable[len(train) :], folder, name, report)
        changed = [file.source.path for file in readable if not unchanged(file.source)]
        if changed:
            raise DataError("changed while it was read", field="data", value=changed[0], remedy="Run again once nothing writes to it")
        check_prepared(prepared, job.data, job.vocab_size)  # before publishing: rows after too many bad ones were not tokenised
        for spooled in folder.glob("source-*"):
            spooled.unlink()
        publish(folder, job.cache_dir, prepared)
    made = load_prepared(job.cache_dir, name)
    if made is None:
        raise StoreUnavailable(f"prepared data {name} vanished from the cache", remedy="Let nothing else clean the cache folder; run again")
    return made.model_copy(update={"from_cache": False})


def resolve_job(data: DataSection, rules: int) -> tuple[tuple[SourceFile, ...], tuple[SourceFile, ...], tuple[str, ...]]:
    """Training and validation files of a data section, each real file once in its list, and notes. The first rules took them as named."""
    own = data.validation if isinstance(data.validation, tuple) else ()
    train, validation = resolve_files(data.train, data, "data.train", rules), resolve_files(own, data, "data.validation", rules)
    if rules == 1:
        return train, validation, ()
    (train, notes), (validation, more) = each_once(train), each_once(validation)
    return train, validation, (*notes, *more)


class Reporter:
    """Progress at most a few times a second."""

    def __init__(self, on_progress: OnProgress, bytes_total: int) -> None:
        self._on_progress = on_progress
        self._total = bytes_total
        self._done = 0
        self._next_s = 0.0
        self._phase = ""

    def advance(self, phase: Phase, size_bytes: int, counts: Callable[[], dict[str, int]] = dict) -> None:
        """Count bytes of a phase; a new phase starts from zero. `counts` is asked only when there is something to say."""
        fresh = phase != self._phase
        self._done = size_bytes if fresh else self._done + size_bytes
        self._phase = phase
        now_s = time.monotonic()
        if fresh or now_s >= self._next_s:
            self._next_s = now_s + _PROGRESS_EVERY_S
            self._on_progress(PrepareProgress(phase=phase, bytes_done=min(self._done, self._total), bytes_total=self._total, **counts()))

    def finish(self, counts: Callable[[], dict[str, int]]) -> None:
        """The last word: all bytes done."""
        self._on_progress(PrepareProgress(phase="tokenizing", bytes_done=self._total, bytes_total=self._total, **counts()))


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


def tokenize_files(
    job: PrepareJob, train: Sequence[Readable], validation: Sequence[Readable], folder: Path, name: str, report: "Reporter"
) -> PreparedData:
    """Token shards of the files in `folder`, under the fingerprint `name`; nothing is published and nothing is refused for its rows.

    Raises:
        DataError, RequestError: see `prepare_data`.
    """
    encoder = make_encoder(job.tokenizer_source, job.rules)
    data, form, told = row_form(job, encoder)
    work = {1: FirstRules, 2: SecondRules, 3: ThirdRules}.get(job.rules, Tokenizing)(encoder, data, form, job.vocab_size)
    writers = [
        ShardWriter(folder / part, encoder.vocab_size, form.has_mask, documents_apart=form.apart) for part in ("train", "validation")
    ]
    makers = [rows_for(writer, data, form) for writer in writers]
    held_out = data.validation if isinstance(data.validation, float) else 0.0
    targets = [Target(makers[0], makers[1] if held_out else None, held_out)] * len(train) + [Target(makers[1])] * len(validation)

    def counts() -> dict[str, int]:
        return {"rows": work.num_documents, "tokens": sum(maker.num_tokens for maker in makers), "bad_rows": work.num_bad_rows}

    try:
        for file, target in zip((*train, *validation), targets, strict=True):
            for size_bytes in work.read(file, target):
                report.advance("tokenizing", size_bytes, counts)
        work.flush()
        for maker in makers:
            maker.finish()
            work.dropped += maker.dropped
        report.finish(counts)
        indexes = [writer.finish() for writer in writers]
    finally:
        for writer in writers:
            writer.close()
    told = (*told, *coverage(job.data, form, indexes[0], job.rules))
    return _result(job, name, work, indexes, encoder, told, [file.source for file in (*train, *validation)])


def _result(
    job: PrepareJob,
    name: str,
    work: Tokenizing,
    indexes: Sequence[TokenIndex],
    encoder: Encoder,
    told: Sequence[DataRemark],
    sources: Sequence[SourceFile],
) -> PreparedData:
    train, validation = indexes
    remarks = [*encoder.notes, *notices(work.dropped, work.remarks, work.bad_rows, work.num_bad_rows), *told]
    if job.rules < 3 and job.data.messages_field is not None and not encoder.chat_has_assistant_mask:
        remarks.append(CHAT_LOSS)
    if job.data.validation is not None and not validation.num_rows:
        remarks.append(NONE_HELD_OUT)
    notes = [*work.notes, *(remark.text for remark in remarks)]
    return PreparedData(
        fingerprint=name,
        train_dir="",
        validation_dir=None,
        num_samples=train.num_rows,
        num_tokens=train.num_tokens,
        trained_tokens=train.trained_tokens,
        num_documents=work.num_documents,
        longest_tokens=train.longest_tokens,
        bad_rows=tuple(work.bad_rows),
        num_bad_rows=work.num_bad_rows,
        hint=work.hint,
        dropped_rows=dict(work.dropped),
        document_tokens=work.counts.percentiles(),
        num_copies=work.counts.num_copies,
        pad_token_id=encoder.pad_token_id,
        eos_token_id=encoder.eos_token_id,
        vocab_size=encoder.vocab_size,
        num_validation_samples=validation.num_rows,
        max_token_id=max(train.max_token_id, validation.max_token_id),
        num_files=len(sources),
        size_bytes=sum(file.size_bytes for file in sources),
        encoding=_encoding(job, encoder),
        remarks=tuple(remarks),
        notes=tuple(notes[:20]) + ((f"and {len(notes) - 20} notes more",) if len(notes) > 20 else ()),
    )


def _encoding(job: PrepareJob, encoder: Encoder) -> dict[str, str]:
    """What the record of a run keeps, to know a changed encoding from changed data; the first rules kept nothing."""
    if job.rules == 1:
        return {}
    return {**encoding_for(job.data, job.tokenizer_source, job.rules), **encoder.identity}


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
