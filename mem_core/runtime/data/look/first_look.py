"""The doctor's look at the data: are the files there, and what will preparation say of their first rows."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from mem_core.domain.environment import DataFile, DataNumbers, DataRemark
from mem_core.domain.errors import MemError
from mem_core.domain.request import DataSection
from mem_core.runtime.data.child import NoAnswer, ask_child
from mem_core.runtime.data.encoding.cache import encoding_for
from mem_core.runtime.data.encoding.prepare import told_before, with_columns
from mem_core.runtime.data.encoding.tokenize_process import numbered_sources
from mem_core.runtime.data.look.rows import Look, LookJob, judged, look_here, refusal_of
from mem_core.runtime.data.reading.sources import SourceFile, each_once, resolve_files
from mem_core.runtime.data.values import PrepareJob
from mem_core.runtime.models.encoding import CURRENT_RULES
from mem_core.runtime.models.folders import is_preset

PROGRAM = "mem_core.runtime.data.look.look_process"
LIMIT_S = 120.0
REMEMBERED_S = 300.0
Ask = Callable[..., Any]


def look_at_data(
    data: DataSection,
    tokenizer_source: str,
    vocab_size: int | None = None,
    cache_dir: Path | None = None,
    rules: int = CURRENT_RULES,
    ask: Ask = ask_child,
) -> DataNumbers:
    """Resolve the files, then read, check and encode the first rows of each, as preparation will.

    `tokenizer_source` is a preset or a local folder, whose tokenizer is loaded in a process of its own; a model that is not there is
    for others to say. What `cache_dir` already holds of these files is not looked at again. Changes nothing.
    """
    found = _Found(data, rules)
    numbers = DataNumbers(files=tuple(found.files), problems=tuple(found.problems), refusal=found.refusal)
    sources = [*found.train, *found.validation]
    if found.problems or found.refusal is not None or not any(source.size_bytes for source in sources):
        return numbers
    (train, notes), (validation, more) = each_once(found.train), each_once(found.validation)
    try:
        data, said = with_columns(data, train, rules)
    except MemError as error:
        return numbers.model_copy(update={"refusal": refusal_of(error)})
    job = PrepareJob(
        data=data, tokenizer_source=tokenizer_source, vocab_size=vocab_size, cache_dir=(cache_dir or Path()).absolute(),
        parent_pid=os.getpid(), rules=rules,
    )  # fmt: skip
    look = _look(LookJob(prepare=job, train=train, validation=validation, parent_pid=os.getpid()), cache_dir is not None, ask)
    named = tuple(DataRemark(check="data.names", severity="notice", text=note) for note in (*notes, *more) if rules > 1)
    return numbers.model_copy(update={"refusal": look.refusal, "remarks": (*named, *said, *look.remarks)})


class _Found:
    """What each source of both lists resolves to; every problem names its source."""

    def __init__(self, data: DataSection, rules: int) -> None:
        self.train: list[SourceFile] = []
        self.validation: list[SourceFile] = []
        self.files: list[DataFile] = []
        self.problems: list[str] = []
        self.refusal = None
        for field, number, source, into in self._sources(data):
            try:
                files = resolve_files([source], data, field, rules)
            except MemError as exc:
                self._refused(field, source, exc)
                continue
            into.extend(file.model_copy(update={"source": number}) for file in files)
            self.files.extend(DataFile(path=file.path, size_bytes=file.size_bytes) for file in files)

    def _sources(self, data: DataSection) -> Iterator[tuple[str, int, str, list[SourceFile]]]:
        own: Iterable[str] = data.validation if isinstance(data.validation, tuple) else ()
        yield from (("data.train", number, source, self.train) for number, source in numbered_sources(data))
        yield from (("data.validation", 0, source, self.validation) for source in own)

    def _refused(self, field: str, source: str, error: MemError) -> None:
        if error.exit_code == 64:
            self.refusal = refusal_of(error)
        else:
            self.problems.append(f"{field} {error.value or source}: {error.problem}")


def _look(job: LookJob, may_be_cached: bool, ask: Ask) -> Look:
    source = job.prepare.tokenizer_source
    if is_preset(source):
        return look_here(job)
    try:
        cached = told_before(job.prepare, job.train, job.validation) if may_be_cached else None
        if cached is not None:
            return judged(cached, job.prepare, whole=True)
        encoding = encoding_for(job.prepare.data, source, job.prepare.rules)
        return Look.model_validate_json(_asked(ask, job.model_dump_json(), json.dumps(encoding), int(time.monotonic() // REMEMBERED_S)))
    except NoAnswer:
        text = f"the tokenizer did not answer within {LIMIT_S:.0f} s, so that no row could be looked at"
        return Look(
            remarks=(DataRemark(check="data.rows", severity="warning", text=text, remedy="See whether the machine is overloaded."),)
        )
    except MemError as error:
        return Look(refusal=refusal_of(error))


@lru_cache(maxsize=8)
def _asked(ask: Ask, job: str, encoding: str, period: int) -> str:
    """A start looks twice within seconds, before and inside the flow; files and tokenizer are in the key by stamp and digest. An answer
    counts for as long as a start takes; that there was none is not remembered."""
    del encoding, period
    return json.dumps(ask(PROGRAM, job, limit_s=LIMIT_S))
