"""The audit: does the journal's hash chain hold, and does every recorded decision follow from what was recorded with it?"""

from collections.abc import Iterable, Iterator

from pydantic import ValidationError

from mem_core.core.policy.directive_parser import parse_directive
from mem_core.core.policy.history import history_for
from mem_core.core.policy.local_policy_engine import recompute
from mem_core.core.run.journal_check import Difference, walk_journal
from mem_core.domain.directive import ExecutiveDirective
from mem_core.domain.events import Event, PolicyDecided
from mem_core.domain.policy import PolicyDecision, PolicyHistory, PolicyInputs
from mem_core.domain.units import Value


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


def audit_journal(files: Iterable[tuple[str, bytes]]) -> Audit:
    """Check the hash chain over all attempts and recompute every decision.

    `files` are (name, content) of `journal/attempt-*.jsonl` in the order of attempts. Never raises for any content.
    """
    chain = walk_journal(files)
    differences = list(chain.differences)
    notes = [f"{name}: the last line was cut by a crash and does not count" for name in chain.cut]
    for late in chain.late:
        count = len(late.events)
        if any(isinstance(event, PolicyDecided) for event in late.events):
            what = f"a decision stands among {count} earlier lines that this attempt did not see"
            differences.append(Difference(where=late.next_file, what=what))
        else:
            notes.append(f"{late.next_file}: the attempt before wrote {count} more lines after this one had begun")
    decisions = [(where, event) for where, event in chain.events if isinstance(event, PolicyDecided)]
    earlier: list[Event] = []
    for where, event in decisions:
        differences += [Difference(where=where, what=what) for what in decision_differences(event, earlier)]
        earlier.append(event)
    return Audit(num_lines=len(chain.events), num_decisions=len(decisions), differences=tuple(differences), notes=tuple(notes))


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
