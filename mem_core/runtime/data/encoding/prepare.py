"""Prepare data: from the request's files to token shards in the cache, in a process of its own."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from mem_core.domain.environment import DataRemark
from mem_core.domain.request import DataSection
from mem_core.domain.run import SourceShare
from mem_core.domain.secrets import unsigned
from mem_core.runtime.data.child import ask_child
from mem_core.runtime.data.encoding.acceptance import check_prepared
from mem_core.runtime.data.encoding.cache import HashCache, fingerprint, load_prepared, told
from mem_core.runtime.data.encoding.tokenize_process import resolve_job
from mem_core.runtime.data.reading.columns import with_fields
from mem_core.runtime.data.reading.sources import SourceFile
from mem_core.runtime.data.reading.units import reading_of
from mem_core.runtime.data.serving.mixing import draws_of
from mem_core.runtime.data.values import PreparedData, PrepareJob, PrepareProgress
from mem_core.runtime.models.encoding import CURRENT_RULES

PROGRAM = "mem_core.runtime.data.encoding.tokenize_process"


def prepare_data(
    data: DataSection,
    seed: int,
    tokenizer_source: str,
    vocab_size: int | None,
    cache_dir: Path,
    on_progress: Callable[[PrepareProgress], None] | None = None,
    rules: int = CURRENT_RULES,
) -> PreparedData:
    """Token shards of the data section, made once per fingerprint and found again at once.

    The work happens in a child process that dies with this one. A preparation that is killed leaves marks; the next one of the same
    goes on from the last that proves itself (`encoding.marks`), and makes the same to the bit. `seed` changes nothing here (order is
    drawn per batch, held-out rows go by content), so that runs with different seeds share one cache entry. `vocab_size` is the number
    of embeddings of the model, None where it is not known.

    Raises:
        DataError: files missing, empty, unreadable or compressed; bad rows beyond what the request allows, the first ten by
            file, line and reason; no row left to train on.
        RequestError: rows that can be read in several ways, an unknown preset, no tokenizer, token ids beyond `vocab_size`.
        StoreUnavailable: the cache cannot be written.
        EnvironmentUnfit: the tokenising process was killed from outside.
    """
    del seed
    cache_dir = cache_dir.absolute()
    job = PrepareJob(
        data=data, tokenizer_source=tokenizer_source, vocab_size=vocab_size, cache_dir=cache_dir, parent_pid=os.getpid(), rules=rules
    )
    train, validation, notes = resolve_job(data, rules)
    data, said = with_columns(data, train, rules)
    job = job.model_copy(update={"data": data})
    prepared = _from_cache(job, train, validation)
    if prepared is None:
        show = on_progress or (lambda progress: None)
        answer = ask_child(PROGRAM, job.model_dump_json(), lambda raw: show(PrepareProgress.model_validate(raw)))
        prepared = PreparedData.model_validate(answer)
    told = {"notes": (*notes, *(remark.text for remark in said), *prepared.notes), "remarks": (*said, *prepared.remarks)}
    prepared = prepared.model_copy(update=told)  # names are no part of what is cached
    check_prepared(prepared, data, vocab_size)
    return with_shares(prepared, data)


def with_shares(prepared: PreparedData, data: DataSection) -> PreparedData:
    """What each weighted source gives to an epoch. Other weights are other samples, of the same rows."""
    if not data.is_weighted:
        return prepared
    draws = draws_of([source.num_rows for source in prepared.sources], data.train_weights)
    shares = tuple(
        SourceShare(
            path=unsigned(path), weight=weight, num_documents=source.num_documents, num_rows=source.num_rows, num_tokens=source.num_tokens,
            epoch_rows=drawn, epoch_tokens=round(source.num_tokens * drawn / source.num_rows),
        )
        for path, weight, source, drawn in zip(data.train_paths, data.train_weights, prepared.sources, draws, strict=True)
    )  # fmt: skip
    named = json.dumps([prepared.fingerprint, list(data.train_weights)])
    return prepared.model_copy(update={"shares": shares, "fingerprint": hashlib.sha256(named.encode()).hexdigest()})


def with_columns(data: DataSection, train: Sequence[SourceFile], rules: int) -> tuple[DataSection, tuple[DataRemark, ...]]:
    """The data section with the fields that were recognised where the request names none, and what to say of it and of its weights.

    Raises:
        RequestError: the rows can be read in several ways.
    """
    reading = reading_of(train, data) if rules > 3 else None
    weights = _weights_remark(data)
    if reading is None:
        return data, weights
    text = f"the rows are read as {reading.what}, by the names of their fields: {reading.settings}"
    return with_fields(data, reading), (DataRemark(check="data.columns", severity="notice", text=text), *weights)


def _weights_remark(data: DataSection) -> tuple[DataRemark, ...]:
    if not data.is_weighted:
        return ()
    named = ", ".join(f"{unsigned(path)} × {weight:g}" for path, weight in zip(data.train_paths, data.train_weights, strict=True))
    text = f"an epoch sees the rows of its sources so many times: {named}; each source is packed by itself"
    return (DataRemark(check="data.weights", severity="notice", text=text),)


def _from_cache(job: PrepareJob, train: Sequence[SourceFile], validation: Sequence[SourceFile]) -> PreparedData | None:
    """What an earlier call made of the same files."""
    name = _known_name(job, train, validation)
    return None if name is None else load_prepared(job.cache_dir, name)


def told_before(job: PrepareJob, train: Sequence[SourceFile], validation: Sequence[SourceFile]) -> PreparedData | None:
    """What an earlier preparation of the same files said of them, without looking whether its shards are still whole."""
    name = _known_name(job, train, validation)
    return None if name is None else told(job.cache_dir, name)


def _known_name(job: PrepareJob, train: Sequence[SourceFile], validation: Sequence[SourceFile]) -> str | None:
    """The fingerprint, where the stamps of all files are known, so that none has to be read."""
    if not job.cache_dir.is_dir():
        return None
    hashes = HashCache(job.cache_dir)
    pairs = [(file, hashes.get(file)) for file in (*train, *validation)]
    known: list[tuple[SourceFile, str]] = [(file, digest) for file, digest in pairs if digest is not None]
    if len(known) < len(pairs):
        return None
    return fingerprint(job.data, known[: len(train)], known[len(train) :], job.tokenizer_source, job.rules)
