"""At which steps prompts were answered, and what: folded from events, pure."""

from collections.abc import Iterable

from mem_core.domain.events import Event, JournalLine, Sampled, SegmentStarted
from mem_core.domain.results.samples import StepSamples


class SampleBook:
    """Events in order through `add`. What was answered beyond the step that work goes on from is forgotten: it is done again."""

    def __init__(self, lines: Iterable[JournalLine] = ()) -> None:
        self._found: dict[int, StepSamples] = {}
        for line in lines:
            self.add(line.event)

    def add(self, event: Event) -> None:
        """Take the next event."""
        match event:
            case Sampled():
                self._found[event.found.step] = event.found
            case SegmentStarted():
                self._found = {step: found for step, found in self._found.items() if step <= event.from_step}
            case _:
                pass

    def is_sampled(self, step: int) -> bool:
        """Whether the answers of a step are known."""
        return step in self._found

    @property
    def in_order(self) -> tuple[StepSamples, ...]:
        """Those that count, ascending by step."""
        return tuple(self._found[step] for step in sorted(self._found))

    @property
    def newest(self) -> StepSamples | None:
        """The last ones."""
        return self._found[max(self._found)] if self._found else None
