"""`OUTPUT.partial`: what is known of answers that are not finished, so that whoever comes next goes on with them.

`order.json` says what decides the answers, `composed.jsonl` which rows stand together, `answers.jsonl` holds the answers in the order in
which they came. Both grow by whole lines that are on the disk before anything follows from them; what a crash left half-written at the
end is cut off. One process at a time holds the folder: the lock goes with the descriptor, which the answering process inherits.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from mem_core.core.inference.recorded import Composed, DidNotFit, Recorded, recorded
from mem_core.domain.errors import RunHeld, StoreUnavailable
from mem_core.domain.results.generation import FinishReason
from mem_core.domain.units import Value
from mem_core.infrastructure.storage.journal_file import append_line
from mem_core.infrastructure.storage.reading import RECORD_LIMIT_BYTES, open_descriptor, open_regular, read_regular_text
from mem_core.infrastructure.storage.writing import SHARED, open_append, replace_text

LOCK_PATIENCE_S = 15.0  # the answering process of an owner that was killed has ended by then
_POLL_S = 0.1
_ORDER, _COMPOSED, _ANSWERS, OUTPUT, SUMMARY = "order.json", "composed.jsonl", "answers.jsonl", "output.jsonl", "summary.json"
_LINES: TypeAdapter[Composed | DidNotFit] = TypeAdapter(Composed | DidNotFit)


class Answer(Value):
    """What came to one row. `tokens` counts the stop token too."""

    row: int
    completion: str
    prompt_tokens: int
    tokens: int
    finish_reason: FinishReason


class WorkFolder:
    """The folder of one output. Reading it changes nothing but the half-written ends of its files."""

    def __init__(self, output: Path) -> None:
        self.path = output.with_name(f"{output.name}.partial")
        self._offsets: dict[int, int] = {}
        self._answered: list[int] = []

    @contextmanager
    def held(self, patience_s: float = LOCK_PATIENCE_S) -> Iterator[int]:
        """Hold the folder; gives the descriptor that holds it, for a child to hold it too.

        Raises:
            RunHeld: another process holds it. StoreUnavailable: it cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, SHARED)
        except OSError as exc:
            raise StoreUnavailable(
                "cannot write", field="--output", value=f"{self.path}: {exc.strerror}", remedy="Free space or give another --output."
            ) from exc
        try:
            self._lock(descriptor, time.monotonic() + patience_s)
            yield descriptor
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int, until_s: float) -> None:
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                if time.monotonic() > until_s:
                    raise RunHeld(
                        "another process writes these answers", field="--output", value=self.path, remedy="Wait for it, or end it."
                    ) from exc
                time.sleep(_POLL_S)

    def identity(self) -> dict[str, str] | None:
        """What decides the answers that are in the folder; None where there are none yet. Raises OSError, ValueError: it is damaged."""
        try:
            return json.loads(read_regular_text(self.path / _ORDER, RECORD_LIMIT_BYTES))
        except FileNotFoundError:
            return None

    def has_batches(self) -> bool:
        """Whether a batch was written down."""
        composed = self.path / _COMPOSED
        return composed.exists() and composed.stat().st_size > 0

    def begin(self, identity: dict[str, str]) -> None:
        """Say what decides the answers, before the first."""
        replace_text(self.path / _ORDER, json.dumps(identity, indent=1))

    def read(self) -> Recorded:
        """The record so far; remembers where each answer stands. Raises OSError."""
        self._offsets, self._answered = {}, []
        waiting: dict[int, int] = {}
        whole = 0
        for start, line in self._whole_lines(self.path / _ANSWERS):
            if "end" in line:
                self._offsets |= waiting
                self._answered.append(int(line["end"]))
                waiting, whole = {}, start + int(line["size"])
            else:
                waiting[int(line["row"])] = start
        self._cut(self.path / _ANSWERS, whole)
        lines, whole = [], 0
        for start, line in self._whole_lines(self.path / _COMPOSED):
            size = int(line.pop("size"))
            lines.append(_LINES.validate_python(line))
            whole = start + size
        self._cut(self.path / _COMPOSED, whole)
        return recorded(lines, self._answered)

    @staticmethod
    def _whole_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
        """(where it begins, what it says and its size) of each line until the first that is not whole."""
        if not path.exists():
            return
        start = 0
        with open_regular(path) as file:
            for raw in file:
                try:
                    line = json.loads(raw) if raw.endswith(b"\n") else None
                except ValueError:
                    line = None
                if not isinstance(line, dict):
                    return
                yield start, {**line, "size": len(raw)}
                start += len(raw)

    @staticmethod
    def _cut(path: Path, size_bytes: int) -> None:
        if path.exists() and path.stat().st_size > size_bytes:
            os.truncate(path, size_bytes)

    def record(self, line: Composed | DidNotFit) -> None:
        """Write down, durably, before anything follows from it. Raises OSError."""
        append_line(self.path / _COMPOSED, line.model_dump_json().encode())

    def keep(self, batch: int, answers: Sequence[Answer]) -> None:
        """The answers of a batch, all of them on the disk when this returns, or none believed. Raises OSError."""
        lines = [answer.model_dump_json() for answer in answers]
        append_line(self.path / _ANSWERS, "\n".join([*lines, json.dumps({"end": batch})]).encode())

    def answers(self, rows: Iterable[int]) -> Iterator[Answer]:
        """The answers of rows, in that order, as the last `read` found them."""
        descriptor = open_descriptor(self.path / _ANSWERS)
        try:
            with os.fdopen(os.dup(descriptor), "rb") as file:
                for row in rows:
                    file.seek(self._offsets[row])
                    yield Answer.model_validate_json(file.readline())
        finally:
            os.close(descriptor)

    def open_output(self) -> Any:
        """The file that becomes the output, empty."""
        (self.path / OUTPUT).unlink(missing_ok=True)
        return open_append(self.path / OUTPUT, SHARED)

    def remove(self) -> None:
        """Nothing of it is needed any more."""
        shutil.rmtree(self.path, ignore_errors=True)
