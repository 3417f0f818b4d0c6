"""Prepare data: from the request's files to token shards in the cache, in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from mem_core.domain import errors
from mem_core.domain.errors import EnvironmentUnfit, InternalError, MemError
from mem_core.domain.request import DataSection
from mem_core.runtime.data.encoding.acceptance import check_prepared
from mem_core.runtime.data.encoding.cache import HashCache, fingerprint, load_prepared
from mem_core.runtime.data.encoding.tokenize_process import resolve_job
from mem_core.runtime.data.reading.sources import SourceFile
from mem_core.runtime.data.values import PreparedData, PrepareJob, PrepareProgress
from mem_core.runtime.models.encoding import CURRENT_RULES

_STDERR_LINES = 15


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

    The work happens in a child process that dies with this one. A preparation that is killed leaves nothing that is ever
    trusted. `seed` changes nothing here (order is drawn per batch, held-out rows go by content), so that runs with different
    seeds share one cache entry. `vocab_size` is the number of embeddings of the model, None where it is not known.

    Raises:
        DataError: files missing, empty, unreadable or compressed; bad rows beyond what the request allows, the first ten by
            file, line and reason; no row left to train on.
        RequestError: parquet, an unknown preset, no tokenizer, token ids beyond `vocab_size`.
        StoreUnavailable: the cache cannot be written.
        EnvironmentUnfit: the tokenising process was killed from outside.
    """
    del seed
    cache_dir = cache_dir.absolute()
    job = PrepareJob(
        data=data, tokenizer_source=tokenizer_source, vocab_size=vocab_size, cache_dir=cache_dir, parent_pid=os.getpid(), rules=rules
    )
    train, validation, notes = resolve_job(data, rules)
    prepared = _from_cache(job, train, validation)
    if prepared is None:
        prepared = _run(job, on_progress or (lambda progress: None))
    prepared = prepared.model_copy(update={"notes": (*notes, *prepared.notes)})  # names are no part of what is cached
    check_prepared(prepared, data, vocab_size)
    return prepared


def _from_cache(job: PrepareJob, train: Sequence[SourceFile], validation: Sequence[SourceFile]) -> PreparedData | None:
    """What an earlier call made of the same files, known by their stamps without reading them."""
    if not job.cache_dir.is_dir():
        return None
    hashes = HashCache(job.cache_dir)
    pairs = [(file, hashes.get(file)) for file in (*train, *validation)]
    known: list[tuple[SourceFile, str]] = [(file, digest) for file, digest in pairs if digest is not None]
    if len(known) < len(pairs):
        return None
    return load_prepared(job.cache_dir, fingerprint(job.data, known[: len(train)], known[len(train) :], job.tokenizer_source, job.rules))


def _run(job: PrepareJob, on_progress: Callable[[PrepareProgress], None]) -> PreparedData:
    with tempfile.TemporaryFile() as complaints:
        child = subprocess.Popen(
            [sys.executable, "-P", "-X", "utf8", "-m", "mem_core.runtime.data.encoding.tokenize_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            start_new_session=True,
        )
        try:
            return _converse(child, job, on_progress, complaints)
        finally:
            child.kill()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()
            child.wait()


def _converse(
    child: "subprocess.Popen[bytes]", job: PrepareJob, on_progress: Callable[[PrepareProgress], None], complaints: IO[bytes]
) -> PreparedData:
    assert child.stdin is not None
    try:
        child.stdin.write(job.model_dump_json().encode() + b"\n")
        child.stdin.flush()
    except BrokenPipeError:
        raise _died(child, complaints) from None
    for message in _messages(child):
        if "progress" in message:
            on_progress(PrepareProgress.model_validate(message["progress"]))
        elif "error" in message:
            raise error_from_json(message["error"])
        else:
            return PreparedData.model_validate(message["prepared"])
    raise _died(child, complaints)


def _messages(child: "subprocess.Popen[bytes]") -> Iterator[dict[str, Any]]:
    assert child.stdout is not None
    for line in child.stdout:
        if line.endswith(b"\n"):
            yield json.loads(line)


def _died(child: "subprocess.Popen[bytes]", complaints: IO[bytes]) -> MemError:
    code = child.wait()
    complaints.seek(0)
    last = "\n".join(complaints.read().decode(errors="replace").splitlines()[-_STDERR_LINES:])
    if code < 0:
        name = signal.Signals(-code).name
        return EnvironmentUnfit(
            f"the tokenising process was killed by {name}",
            remedy="If memory ran out, free some or give smaller files; run again, nothing half-made is used",
        )
    return InternalError(f"the tokenising process ended with code {code}:\n{last}\n", remedy="Report this with the lines above")


def error_from_json(raw: dict[str, Any]) -> MemError:
    """The error that the tokenising process met."""
    kind = getattr(errors, str(raw["kind"]), InternalError)
    return kind(raw["problem"], remedy=raw["remedy"], field=raw["field"], value=raw["value"], bound=raw["bound"])
