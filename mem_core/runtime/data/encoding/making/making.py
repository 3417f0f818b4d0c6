"""Files to token shards, from the beginning or from the last mark of whoever was killed at it."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mem_core.domain.units import format_bytes
from mem_core.runtime.data.encoding.earlier_rules import FirstRules, SecondRules, ThirdRules
from mem_core.runtime.data.encoding.encoders import make_encoder
from mem_core.runtime.data.encoding.forms import row_form
from mem_core.runtime.data.encoding.making.reporter import Reporter
from mem_core.runtime.data.encoding.making.result import result_of
from mem_core.runtime.data.encoding.marks.ledger import Marks
from mem_core.runtime.data.encoding.marks.place import Place
from mem_core.runtime.data.encoding.marks.waiting import Target
from mem_core.runtime.data.encoding.notices import coverage
from mem_core.runtime.data.encoding.sequences import Rows, rows_for
from mem_core.runtime.data.encoding.tokenizing import Tokenizing
from mem_core.runtime.data.reading.units import Readable
from mem_core.runtime.data.serving.shards import ShardWriter
from mem_core.runtime.data.values import PreparedData, PrepareJob, SourceRows

_SIDES = ("train", "validation")
_NOT_WHOLE = (OSError, ValueError, KeyError, TypeError, IndexError)


def tokenize_files(
    job: PrepareJob,
    train: Sequence[Readable],
    validation: Sequence[Readable],
    folder: Path,
    name: str,
    report: Reporter,
    marks: Marks | None = None,
) -> PreparedData:
    """Token shards of the files in `folder`, under the fingerprint `name`; nothing is published and nothing is refused for its rows.

    With `marks` it goes on from the last one, and what it makes is the same to the bit.

    Raises:
        DataError, RequestError: see `prepare_data`.
    """
    making = _Making(job, train, validation, folder, report)
    try:
        place = making.begin() if marks is None else making.go_on(marks)
        making.run(marks, place)
        return making.finish(name)
    finally:
        making.close()
        if marks is not None:
            marks.close()


class _Making:
    """One preparation. Rows of a side are made one after another; of weighted sources each has rows of its own."""

    def __init__(self, job: PrepareJob, train: Sequence[Readable], validation: Sequence[Readable], folder: Path, report: Reporter) -> None:
        self._job = job
        self._files = (*train, *validation)
        self._num_train = len(train)
        self._folder = folder
        self._report = report
        self._encoder = make_encoder(job.tokenizer_source, job.rules)
        self._data, self._form, self._told = row_form(job, self._encoder)
        self._writers: list[ShardWriter] = []

    def begin(self) -> None:
        """At the beginning, in an empty folder. Raises OSError."""
        self.close()
        for side in _SIDES:
            shutil.rmtree(self._folder / side, ignore_errors=True)
        self._open([None, None])

    def _open(self, standing: Sequence[dict[str, Any] | None]) -> None:
        """Raises OSError; ValueError where a folder does not hold what `standing` says."""
        job, form = self._job, self._form
        work = {1: FirstRules, 2: SecondRules, 3: ThirdRules}.get(job.rules, Tokenizing)
        self._work: Tokenizing = work(self._encoder, self._data, form, job.vocab_size)
        self._writers = []
        for side, state in zip(_SIDES, standing, strict=True):
            self._writers.append(
                ShardWriter(self._folder / side, self._encoder.vocab_size, form.has_mask, documents_apart=form.apart, standing=state)
            )
        self._makers: list[Rows] = [rows_for(writer, self._data, form) for writer in self._writers]
        self._sources: list[list[int]] = []  # rows, tokens and documents up to the end of each source
        self._next_file = 0

    def run(self, marks: Marks | None, place: Place | None) -> None:
        """Every file to rows, the first of them from `place` on. Raises DataError, RequestError."""
        for number in range(self._next_file, len(self._files)):
            self._next_file = number
            file, target = self._files[number], self._target(number)
            for size_bytes in self._work.read(file, target, place):
                self._report.advance("tokenizing", size_bytes, self._counts)
                if marks is not None and marks.due() and not self._work.is_failing:
                    marks.put(self._state(), self._work.seen.counts.fresh_keys())
            place = None
        self._work.flush()
        self._end_sources(self._num_sources())

    def go_on(self, marks: Marks) -> Place | None:
        """The place that the last mark tells, with everything as it was there; None where the work begins at its beginning.

        Raises:
            OSError: the folder cannot be written.
        """
        found = marks.latest()
        if found is not None:
            try:
                return self._taken_up(*found)
            except _NOT_WHOLE:
                self._report.note("what a preparation of these rows had kept when it was cut short is not whole: it begins anew")
        elif marks.are_of_others:
            self._report.note("the files or the tokenizer have changed since a preparation of them was cut short: it begins anew")
        self.begin()
        marks.begin()
        self._work.seen.counts.fresh_keys()
        return None

    def _taken_up(self, state: dict[str, Any], keys: Sequence[bytes]) -> Place:
        self.close()
        self._open(state["writers"])
        for maker, kept in zip(self._makers, state["makers"], strict=True):
            maker.restore(kept)
        place = self._work.restore(state["work"], self._makers, keys)
        self._sources = [[int(number) for number in ends] for ends in state["sources"]]
        self._next_file = int(state["file"])
        done = sum(file.source.size_bytes for file in self._files[: self._next_file]) + place.size_bytes
        total = sum(file.source.size_bytes for file in self._files)
        self._report.advance("tokenizing", done, self._counts)
        self._report.note(
            f"a preparation of these rows was cut short: it goes on after {format_bytes(done)} of {format_bytes(total)}, "
            f"with the {self._counts()['tokens']:,} tokens that it had made"
        )
        return place

    def _state(self) -> dict[str, Any]:
        work = self._work.state(self._makers)  # first: it hands what waits to the makers, and they to the writers
        return {
            "work": work, "makers": [maker.state() for maker in self._makers], "writers": [writer.state() for writer in self._writers],
            "sources": [list(ends) for ends in self._sources], "file": self._next_file,
        }  # fmt: skip

    def _target(self, number: int) -> Target:
        """Where the rows of a file go; where a source ends before it, so do its rows."""
        if number >= self._num_train:
            return Target(self._makers[1])
        self._end_sources(self._files[number].source.source)
        held_out = self._data.validation if isinstance(self._data.validation, float) else 0.0
        return Target(self._makers[0], self._makers[1] if held_out else None, held_out)

    def _num_sources(self) -> int:
        return len(self._data.train) if self._data.is_weighted else 0

    def _end_sources(self, up_to: int) -> None:
        while len(self._sources) < min(up_to, self._num_sources()):
            self._work.flush()
            self._end_maker(self._makers[0])
            writer = self._writers[0]
            self._sources.append([writer.num_rows, writer.num_tokens, self._work.seen.num_documents])
            self._makers[0] = rows_for(writer, self._data, self._form)

    def _end_maker(self, maker: Rows) -> None:
        maker.finish()
        self._work.seen.dropped += maker.dropped

    def _counts(self) -> dict[str, int]:
        seen = self._work.seen
        return {"rows": seen.num_documents, "tokens": sum(maker.num_tokens for maker in self._makers), "bad_rows": seen.num_bad_rows}

    def finish(self, name: str) -> PreparedData:
        """Durable rows with their indexes, and what there is to say of them."""
        for maker in self._makers:
            self._end_maker(maker)
        self._report.finish("tokenizing", self._counts)
        of_sources = self._of_sources()
        indexes = [self._writers[0].finish(tuple(source.num_rows for source in of_sources)), self._writers[1].finish()]
        told = (*self._told, *coverage(self._job.data, self._form, indexes[0], self._job.rules))
        files = [file.source for file in self._files]
        prepared = result_of(self._job, name, self._work.seen, indexes, self._encoder, told, files)
        return prepared.model_copy(update={"sources": of_sources})

    def _of_sources(self) -> tuple[SourceRows, ...]:
        starts = [[0, 0, 0], *self._sources[:-1]] if self._sources else []
        differences = ([end - start for start, end in zip(*both, strict=True)] for both in zip(starts, self._sources, strict=True))
        return tuple(SourceRows(num_rows=rows, num_tokens=tokens, num_documents=documents) for rows, tokens, documents in differences)

    def close(self) -> None:
        """Let go of the files."""
        for writer in self._writers:
            writer.close()
