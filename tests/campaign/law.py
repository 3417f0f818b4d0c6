"""The law of every case: success, or a refusal that is documented. No other exception, no exit 70, no hang, no secret in any word."""

import contextlib
import io
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from mutations import SECRET

from mem_core.domain.errors import MemError

LIMIT_S = 30
DOCUMENTED = frozenset({64, 66, 69, 73, 74, 75, 76, 78, 79, 80})


class Hang(BaseException):
    """The case did not end in time. No Exception, so that nothing under test swallows it."""


class Broken(Exception):
    """The case ended, and its outcome is none of the allowed ones: the text says how."""


@dataclass(frozen=True)
class Case:
    """One case. `replay` is the command that does it again."""

    name: str
    kind: str
    replay: str
    run: Callable[[], str]
    """Returns a word for the outcome; raises MemError for a refusal, Broken where a success was none."""
    limit_s: float | None = None


@dataclass
class Tally:
    """How many cases of which kind ended how, and every one that broke the law."""

    ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    @property
    def cases(self) -> int:
        """How many were tried."""
        return sum(self.ended.values())

    def table(self) -> str:
        """Kinds by outcomes, for people."""
        outcomes = sorted({outcome for _, outcome in self.ended})
        kinds = sorted({kind for kind, _ in self.ended})
        width = max((len(kind) for kind in kinds), default=4) + 2
        rows = ["".join((kind.ljust(width), *(str(self.ended[kind, outcome] or ".").rjust(14) for outcome in outcomes))) for kind in kinds]
        head = "".join(("".ljust(width), *(outcome[:13].rjust(14) for outcome in outcomes)))
        return "\n".join((head, *rows, f"{self.cases} cases, {len(self.broken)} broke the law", *self.broken))


def try_cases(cases: Iterable[Case]) -> Tally:
    """Try each; never raises for what a case does."""
    tally = Tally()
    for case in cases:
        outcome, problem = judged(case)
        tally.ended[case.kind, outcome] += 1
        if problem:
            tally.broken.append(f"{case.name}: {problem}\n    again: {case.replay}")
    return tally


def judged(case: Case) -> tuple[str, str]:
    """(how it ended, what is wrong with that or "")."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said), time_limit(case.limit_s or LIMIT_S):
            outcome = case.run()
            problem = ""
    except MemError as exc:
        outcome = f"refused {exc.exit_code}"
        said.write(f"{exc} {vars(exc)}")
        problem = "" if exc.exit_code in DOCUMENTED and exc.remedy else f"exit {exc.exit_code}: {exc}"
    except Hang:
        outcome, problem = "HANG", f"no end within {case.limit_s or LIMIT_S} s"
    except Broken as exc:
        outcome, problem = "WRONG", str(exc)
    except Exception:  # noqa: BLE001 - that there is none of them is what is tested
        outcome, problem = "TRACEBACK", traceback.format_exc(limit=-6)
    words = said.getvalue()
    if SECRET in words:
        problem = f"{problem} the secret was said: {words[:300]}"
    if "Traceback (most recent call last)" in words:
        problem = f"{problem} a traceback was printed: {words[-800:]}"
    return outcome, problem


@contextlib.contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """Raises Hang in the main thread when the block takes longer."""

    def expired(number: int, frame: FrameType | None) -> Any:
        raise Hang

    before, began_s = signal.signal(signal.SIGALRM, expired), time.monotonic()
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, limit_s)  # somebody else's timer, such as that of a test around this
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, max(0.1, left_s - (time.monotonic() - began_s)) if left_s else 0)
        signal.signal(signal.SIGALRM, before)
