"""The audit: does the journal's hash chain hold, and does every recorded decision follow from what was recorded with it?"""

import hashlib
from collections.abc import Iterable, Iterator

from pydantic import ValidationError

from mem_core.core.directive_parser import parse_directive
from mem_core.core.local_policy_engine import recompute
from mem_core.core.policy_history import history_for
from mem_core.domain.directive import ExecutiveDirective
from mem_core.domain.events import GENESIS_SHA256, Event, JournalLine, PolicyDecided
from mem_core.domain.policy import PolicyDecision, PolicyHistory, PolicyInputs
from mem_core.domain.units import Value


class Difference(Value):
    """One place where the journal does not agree with itself."""

    where: str
    what: str


class Audit(Value):
    """The result of a replay. `notes` are not faults: a last line cut by a crash, or lines of a holder that had been replaced."""

    num_lines: int
    num_decisions: int
    differences: tuple[Difference, ...]
    notes: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        """Whether nothing differs."""
        return not self.differences


class _Chain:
    """Walks raw lines and keeps what the next one has to point back to."""

    def __init__(self) -> None:
        self.known: list[str] = [GENESIS_SHA256]
        self.previous = GENESIS_SHA256
        self.events: list[tuple[str, Event]] = []
        self.differences: list[Difference] = []
        self.notes: list[str] = []

    def begin_file(self, name: str, line: JournalLine) -> None:
        """A new attempt points to the last line that it saw; a replaced holder may have written some after that."""
        if line.previous_sha256 == self.previous or line.previous_sha256 not in self.known:
            return
        late = len(self.known) - 1 - self.known.index(line.previous_sha256)
        self.previous = line.previous_sha256
        if any(isinstance(event, PolicyDecided) for _, event in self.events[-late:]):
            self.differences.append(
                Difference(where=name, what=f"a decision stands among {late} earlier lines that this attempt did not see")
            )
        else:
            self.notes.append(f"{name}: the attempt before wrote {late} more lines after this one had begun")

    def take(self, where: str, raw: bytes, line: JournalLine) -> None:
        """One readable line."""
        if line.previous_sha256 != self.previous:
            self.differences.append(Difference(where=where, what="does not follow the line before it: one of them was changed or removed"))
        self.previous = hashlib.sha256(raw).hexdigest()
        self.known.append(self.previous)
        self.events.append((where, line.event))


def audit_journal(files: Iterable[tuple[str, bytes]]) -> Audit:
    """Check the hash chain over all attempts and recompute every decision.

    `files` are (name, content) of `journal/attempt-*.jsonl` in the order of attempts. Never raises for any content.
    """
    chain = _Chain()
    for name, content in files:
        _walk(chain, name, content)
    decisions = [(where, event) for where, event in chain.events if isinstance(event, PolicyDecided)]
    earlier: list[Event] = []
    for where, event in decisions:
        chain.differences += [Difference(where=where, what=what) for what in decision_differences(event, earlier)]
        earlier.append(event)
    return Audit(num_lines=len(chain.events), num_decisions=len(decisions), differences=tuple(chain.differences), notes=tuple(chain.notes))


def _walk(chain: _Chain, name: str, content: bytes) -> None:
    *lines, rest = content.split(b"\n")
    if rest:
        chain.notes.append(f"{name}: the last line was cut by a crash and does not count")
    for number, raw in enumerate(lines, start=1):
        where = f"{name}:{number}"
        try:
            line = JournalLine.model_validate_json(raw)
        except ValidationError:
            chain.differences.append(Difference(where=where, what="is not a journal line"))
            continue
        if number == 1:
            chain.begin_file(name, line)
        chain.take(where, raw, line)


def decision_differences(event: PolicyDecided, earlier: Iterable[Event] = ()) -> Iterator[str]:
    """What in a recorded decision does not follow from its record: the decision, the reply's reading, the history."""
    try:
        inputs = PolicyInputs.model_validate(event.inputs)
        again = recompute(event)
    except ValidationError as exc:
        yield f"the recorded inputs are not complete ({exc.error_count()} problems), so nothing can be recomputed"
        return
    yield from _decision_changes(event.decision, again)
    if event.directive_text is not None and inputs.directive is not None and _read(event, inputs) != inputs.directive:
        yield "the recorded directive is not what the recorded reply says"
    if event.plan.segment_index != event.segment_index:
        yield "the recorded plan is that of another segment"
    if inputs.history != _history(earlier, event.segment_index):
        yield "the recorded history is not what the earlier decisions leave"


def _read(event: PolicyDecided, inputs: PolicyInputs) -> ExecutiveDirective | None:
    read = parse_directive(event.directive_text or "", inputs.bounds.of(inputs.device).directive_size_limit_bytes)
    return read if isinstance(read, ExecutiveDirective) else None


def _history(earlier: Iterable[Event], segment_index: int) -> PolicyHistory | None:
    try:
        return history_for(earlier, segment_index)
    except ValidationError:
        return None  # reported where the incomplete record itself stands


def _decision_changes(recorded: PolicyDecision, again: PolicyDecision) -> Iterator[str]:
    for name in PolicyDecision.model_fields:
        before, after = getattr(recorded, name), getattr(again, name)
        if before != after:
            yield f"{name} is recorded as {before!r} and comes out as {after!r}"[:400]
