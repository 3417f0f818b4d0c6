"""The one error tree. Every error of MEM has an exit code, a Prefect state and a remedy.

MemError
├── RequestError        64  the request is wrong in itself
├── DataError           66  data missing, empty, unreadable or with bad rows
├── EnvironmentUnfit    69  the machine cannot run it, for a reason that the doctor names
├── InternalError       70  a bug of ours
├── StoreUnavailable    73  store full or not writable
├── NoValidCheckpoint   74  checkpoints exist and none is valid
├── Interrupted         75  stopped on purpose, resumable by the same command
├── RunHeld             76  another writer holds the run
├── MemoryExhausted     78  the memory ladder has no rung left
├── NoProgress          79  no validated progress after the allowed restarts
└── PolicyRefused       80  the policy engine said no
"""

import traceback
from typing import ClassVar

from mem_core.domain.printable import printable
from mem_core.domain.secrets import clean_text


def _shown(text: str) -> str:
    return printable(clean_text(text))


class MemError(Exception):
    """An ending that MEM foresaw. `str(error)` is one message: what, which value, which bound, the way out.

    `field`, `value` and `bound` name the offender where there is one; `remedy` is a sentence that says what to do. It is empty only
    where `problem` is the whole message of an error that was written down before.
    Survives pickling, since it crosses process boundaries. No part of it holds a secret of a URL, and all of it can be printed and
    stored: whatever a name or a library's words brought in is hidden or written out when the error is made.
    """

    exit_code: ClassVar[int] = 70
    prefect_state: ClassVar[str] = "Failed"

    def __init__(self, problem: str, *, remedy: str, field: str = "", value: object = None, bound: str = "") -> None:
        self.problem = _shown(problem)
        self.remedy = _shown(remedy)
        self.field = _shown(field)
        self.value = None if value is None else _shown(str(value))[:200]
        self.bound = _shown(bound)
        super().__init__(self._message())

    def _message(self) -> str:
        if not self.remedy:
            return self.problem
        where = f"{self.field}: " if self.field else ""
        got = f" (got {self.value})" if self.value is not None else ""
        bound = f"; allowed: {self.bound}" if self.bound else ""
        return f"{where}{self.problem}{got}{bound}. {self.remedy}"

    def lines(self) -> list[str]:
        """The same in three lines at most: the kind with what is wrong, what is allowed, the way out."""
        where = f"{self.field}: " if self.field else ""
        got = f" (got {self.value})" if self.value is not None else ""
        more = [f"  allowed: {self.bound}" if self.bound else "", f"  {self.remedy}" if self.remedy else ""]
        return [f"{type(self).__name__}: {where}{self.problem}{got}", *(line for line in more if line)]

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback: none of MEM's or Prefect's frames says anything about what was asked."""
        return self.lines()

    def __reduce__(self) -> tuple[object, ...]:
        keywords = {"remedy": self.remedy, "field": self.field, "value": self.value, "bound": self.bound}
        return (_rebuild, (type(self), self.problem, keywords))


def _rebuild(kind: type[MemError], problem: str, keywords: dict[str, str]) -> MemError:
    return kind(problem, remedy=keywords["remedy"], field=keywords["field"], value=keywords["value"], bound=keywords["bound"])


class RequestError(MemError):
    """The request is wrong in itself."""

    exit_code = 64


class DataError(MemError):
    """Data missing, empty, unreadable or with bad rows."""

    exit_code = 66


class EnvironmentUnfit(MemError):
    """The machine cannot run the request, for a reason that the doctor names."""

    exit_code = 69


class InternalError(MemError):
    """A bug of ours."""

    exit_code = 70

    def _render_traceback_(self) -> list[str]:
        """A bug is found by its traceback."""
        return "".join(traceback.format_exception(self)).splitlines()


class StoreUnavailable(MemError):
    """The store is full, read-only or away."""

    exit_code = 73


class NoValidCheckpoint(MemError):
    """Checkpoints exist and none of them is valid; MEM never starts at 0 in silence."""

    exit_code = 74


class Interrupted(MemError):
    """Stopped on purpose; the same command goes on."""

    exit_code = 75
    prefect_state = "Cancelled"


class RunHeld(MemError):
    """Another writer holds the run."""

    exit_code = 76


class MemoryExhausted(MemError):
    """No rung of the memory ladder is left."""

    exit_code = 78


class NoProgress(MemError):
    """The validated step has not advanced over the allowed restarts."""

    exit_code = 79


class PolicyRefused(MemError):
    """The policy engine refused the request."""

    exit_code = 80


EXIT_CODE_COMPLETED = 0
