"""What is counted while rows become tokens."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mem_core.runtime.data.reading.rows import BadRow
from mem_core.runtime.data.statistics import DocumentCounts
from mem_core.runtime.data.values import MAX_BAD_ROWS_KEPT


@dataclass(slots=True)
class Tallies:
    """Documents, bad rows with the first hundred of them, and by kind what was left out or is worth a word."""

    num_documents: int = 0
    num_bad_rows: int = 0
    bad_rows: list[str] = field(default_factory=list[str])
    hint: str = ""
    dropped: Counter[str] = field(default_factory=Counter[str])
    remarks: Counter[str] = field(default_factory=Counter[str])
    notes: list[str] = field(default_factory=list[str])
    counts: DocumentCounts = field(default_factory=DocumentCounts)

    def bad(self, path: str, row: BadRow) -> None:
        """One more bad row of a file."""
        self.num_bad_rows += 1
        self.hint = self.hint or row.hint
        if len(self.bad_rows) < MAX_BAD_ROWS_KEPT:
            self.bad_rows.append(f"{path}:{row.line}: {row.reason}")

    def state(self) -> dict[str, Any]:
        """All but the keys of documents, as plain values."""
        return {
            "numbers": [self.num_documents, self.num_bad_rows], "bad_rows": list(self.bad_rows), "hint": self.hint,
            "dropped": dict(self.dropped), "remarks": dict(self.remarks), "notes": list(self.notes), "counts": self.counts.state(),
        }  # fmt: skip

    def restore(self, state: dict[str, Any], keys: Iterable[bytes]) -> None:
        """Go on from there."""
        self.num_documents, self.num_bad_rows = (int(number) for number in state["numbers"])
        self.bad_rows, self.hint, self.notes = list(state["bad_rows"]), str(state["hint"]), list(state["notes"])
        self.dropped, self.remarks = Counter(state["dropped"]), Counter(state["remarks"])
        self.counts.restore(state["counts"], keys)
