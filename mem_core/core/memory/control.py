"""Watermarks with hysteresis: when the micro-batch shrinks before the limit is met, and when it may grow again. Pure.

`MemoryControl.decide` takes one reading at a time and answers with at most one decision, which carries its numbers. Nothing here
knows where readings come from: the tests drive it with traces of 24 GB and 80 GB devices.
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal

from mem_core.core.memory.diagnosis import WINDOW, Cause, StepReading, diagnose, growth_per_step, is_fragmented
from mem_core.core.memory.ladder import SMALLEST_TOKENS, MicroBatch, PlanBounds, largest_micro_batch, leads_to, shrink_plan
from mem_core.core.memory.model import PeakLine, PeakSample, fit_line
from mem_core.domain.plan import MemoryPlan
from mem_core.domain.units import format_bytes

PATIENCE_STEPS = 50  # calm steps before growth; doubles after a growth that had to be taken back
MOST_PATIENCE_STEPS = 5_000
SETTLE_READINGS = 3  # after a change nothing but pressure is judged: what is freed comes back bit by bit
LEAK_LEAD_STEPS = 16  # a leak is acted on so many steps before it takes memory above the high watermark: a save needs room too
GROWN_SHARE = 0.1  # of the limit: growth of a process from which on a failed allocation is laid to it
CRITICAL = 0.97  # above it every cause is answered with a smaller micro-batch as well
RAISED = 1.1  # a limit that much higher lifts the memory of what failed under it
SLOPE_EVERY = 128  # readings after which the slope is taken again: it costs more than everything else
STEP_DOWN, STEP_UP = 0.75, 4
SETTLED = 0.05  # between what works and what failed, as a part of the latter, below which the search ends
GROWTH_MARGIN = 0.02  # of the limit, that a predicted growth leaves below the high watermark


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do at a step boundary. `plan` is set for "shrink" and "grow"."""

    action: Literal["shrink", "grow", "release", "replace", "note"]
    reason: str
    observed_bytes: int
    limit_bytes: int
    plan: MemoryPlan | None = None
    cause: Cause = "size"


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Parts of the limit: above `high` the micro-batch shrinks, below `low` it may grow again."""

    high: float
    low: float


@dataclass(frozen=True, slots=True)
class _Failed:
    tokens: int
    limit_bytes: int


class MemoryControl:
    """The controller of one run. `plan` is the plan in force; whoever applies another one says so with `changed`."""

    def __init__(
        self, marks: Watermarks, bounds: PlanBounds, first: MemoryPlan, line: PeakLine | None = None, *, patience: int = PATIENCE_STEPS
    ) -> None:
        self._marks, self._bounds, self._first = marks, bounds, first
        self.plan = first
        self._line = line
        self._patience = self._least_patience = patience
        self._calm_since: int | None = None
        self._settle = 0
        self._failed: _Failed | None = None
        self._grown_at: int | None = None
        self._history: deque[StepReading] = deque(maxlen=WINDOW)
        self._said: set[str] = set()
        self._per_token, self._readings, self._seen_tokens = 0.0, 0, 0
        self.worked_tokens = 0
        self._used_first: dict[str, int] = {}  # by the limit's name: some count resident memory, some address space
        self._uniform = True

    @property
    def patience(self) -> int:
        """Calm steps that the next growth waits for."""
        return self._patience

    @property
    def shrunk(self) -> bool:
        """Whether growth is waited for: patience is counted in steps, so that readings must not be far apart."""
        return self.plan != self._first

    def changed(self, plan: MemoryPlan, *, failed_tokens: int = 0, limit_bytes: int = 0) -> None:
        """The plan in force is another one now; `failed_tokens` where a pass of that size really did not fit."""
        if failed_tokens:
            if self._failed is not None and failed_tokens >= self._failed.tokens:
                self._impatient()  # nothing was learnt from it; a failure that halves the search is what the search costs
            tokens = min(failed_tokens, self._failed.tokens) if self._failed else failed_tokens
            self._failed, self._grown_at = _Failed(tokens, limit_bytes), None
        self.plan = plan
        self._settle = SETTLE_READINGS
        self._calm_since = None

    def worked(self, tokens: int, limit_name: str, used_bytes: int) -> None:
        """A pass of that size was done, also where nothing may be decided, as in steps that are done again."""
        self.worked_tokens = max(self.worked_tokens, tokens)
        self._used_first.setdefault(limit_name, used_bytes)

    def decide(self, reading: StepReading) -> Decision | None:
        """What the reading asks for, if anything."""
        self._history.append(reading)
        self.worked(reading.micro_batch.tokens, reading.limit_name, reading.used_bytes)
        self._uniform = self._uniform and reading.micro_batch.length == self._bounds.longest_tokens
        often_at_first = self._readings & (self._readings - 1) == 0  # at 1, 2, 4, 8, ... readings
        if often_at_first or self._readings % SLOPE_EVERY == 0 or reading.micro_batch.tokens > self._seen_tokens:
            self._per_token = self._slope()
            self._seen_tokens = max(self._seen_tokens, reading.micro_batch.tokens)
        self._readings += 1
        if reading.limit_bytes <= 0:
            return None
        high, low = self._levels(reading)
        if self._settle:
            self._settle -= 1
            if reading.peak_bytes <= high or not leads_to(self.plan, self._bounds, reading.micro_batch):
                return None
        if reading.peak_bytes > high:
            self._calm_since = None
            return self._under_pressure(reading, (high + low) / 2)
        if is_fragmented(reading.peak_bytes, reading.reserved_bytes, reading.limit_bytes) and (said := self._fragmented(reading)):
            return said
        if reading.peak_bytes >= low and (said := self._leak_ahead(reading, high)):
            return said
        if reading.peak_bytes < low or self._failed is not None:  # a search goes on between the watermarks, by prediction
            return self._when_calm(reading, high)
        self._calm_since = None
        return None

    # -- levels ---------------------------------------------------------------------------------------------------------

    def _slope(self) -> float:
        """Bytes per padded token: as measured before training, or more where the readings say so; else the one ratio there is."""
        samples = [PeakSample(reading.micro_batch, max(0, reading.peak_bytes - reading.used_bytes)) for reading in self._history]
        seen = fit_line(samples)
        if self._line is not None:
            measured = self._line.per_token + self._line.per_square * self._bounds.longest_tokens
            return max(measured, seen.per_token if seen is not None else 0.0)
        if seen is not None and seen.per_token > 0:
            return seen.per_token
        return max((sample.peak_bytes / max(1, sample.micro_batch.tokens) for sample in samples), default=0.0)

    def _fixed(self, reading: StepReading) -> float:
        """What would be used with no micro-batch at all."""
        return max(0.0, reading.peak_bytes - self._per_token * reading.micro_batch.tokens)

    def _levels(self, reading: StepReading) -> tuple[float, float]:
        """(high, low) in bytes. Where weights and code alone come near the limit, a part of what is left above them counts,
        since no micro-batch could bring memory below the plain watermark."""
        limit, fixed = reading.limit_bytes, min(self._fixed(reading), reading.limit_bytes)
        room = limit - fixed
        return max(self._marks.high * limit, fixed + room / 4), max(self._marks.low * limit, fixed + room / 8)

    # -- down -----------------------------------------------------------------------------------------------------------

    def _under_pressure(self, reading: StepReading, target: float) -> Decision | None:
        cause = diagnose(tuple(self._history))
        critical = reading.peak_bytes > CRITICAL * reading.limit_bytes
        if cause == "leak":
            said = self._leak(reading)
            if said or not critical:
                return said
        plan = self._smaller(reading, target)
        if plan is None:
            return self._once(self._decision("note", reading, cause, "memory is above the high watermark and nothing smaller is left"))
        if self._grown_at is not None:
            self._impatient()
        return self._decision("shrink", reading, cause, f"{_percent(reading)} of {reading.limit_name or 'the limit'} ({cause})", plan)

    def grown(self, failed_tokens: int, limit_name: str, used_bytes: int, limit_bytes: int) -> bool:
        """Whether a pass failed because this process has grown: one of its size worked before, and much more is used now.

        `failed_tokens` 0: it failed outside a pass, as in the update, whose size no plan changes.
        """
        growth = used_bytes - self._used_first.get(limit_name, used_bytes)
        return failed_tokens <= self.worked_tokens and growth >= GROWN_SHARE * limit_bytes > 0

    def _leak_ahead(self, reading: StepReading, high: float) -> Decision | None:
        """Below the high watermark, a leak that will pass it in a few steps: there is room to save now, and later there is not."""
        history = tuple(self._history)
        if reading.peak_bytes + LEAK_LEAD_STEPS * growth_per_step(history) <= high or diagnose(history) != "leak":
            return None
        return self._leak(reading)

    def _leak(self, reading: StepReading) -> Decision | None:
        per_step = format_bytes(growth_per_step(tuple(self._history)))
        text = (
            f"memory grows from step to step, a leak of about {per_step} a step under {reading.limit_name or 'the limit'}: the segment "
            f"ends here and the workers are replaced; passes of {self.worked_tokens} tokens work"
        )
        return self._once(self._decision("replace", reading, "leak", text))

    def _fragmented(self, reading: StepReading) -> Decision | None:
        """Tensors leave room, the allocator fills the limit: said and released at the next boundary; the micro-batch stays."""
        held = f"{format_bytes(reading.reserved_bytes)} reserved, {format_bytes(reading.reserved_bytes - reading.peak_bytes)} of it unused"
        text = f"reserved memory is fragmented ({held}): it is released at the boundary"
        return self._once(self._decision("release", reading, "fragmentation", text))

    def _smaller(self, reading: StepReading, target: float) -> MemoryPlan | None:
        """As many tokens as the line allows below the target; one rung of the ladder where the pass cannot be cut."""
        seen = reading.micro_batch
        if seen.rows <= 1:
            return shrink_plan(self.plan, self._bounds, MicroBatch(1, seen.length))
        fits = (target - self._fixed(reading)) / self._per_token if self._per_token > 0 else seen.tokens / 2
        tokens = max(SMALLEST_TOKENS, int(min(fits, seen.tokens * STEP_DOWN)))
        if self.plan.micro_batch_tokens and tokens >= self.plan.micro_batch_tokens:
            return shrink_plan(self.plan, self._bounds, seen)
        return self.plan.model_copy(update={"micro_batch_tokens": tokens})

    # -- up -------------------------------------------------------------------------------------------------------------

    def _when_calm(self, reading: StepReading, high: float) -> Decision | None:
        if self._calm_since is None:
            self._calm_since = reading.batch_index
        calm = reading.batch_index - self._calm_since
        if self._grown_at is not None and reading.batch_index - self._grown_at > self._patience:
            self._grown_at, self._patience = None, self._least_patience  # the last growth held
        if self.plan == self._first or calm < self._patience:
            return None
        plan = self._larger(reading, high)
        if plan is None:
            return None
        self._grown_at = reading.batch_index
        return self._decision(
            "grow", reading, "size", f"{_percent(reading)} of {reading.limit_name or 'the limit'} over {calm} steps", plan
        )

    def _larger(self, reading: StepReading, high: float) -> MemoryPlan | None:
        """The next plan upwards that the line predicts to stay below the high watermark and that has not failed; else None."""
        allowed = high - GROWTH_MARGIN * reading.limit_bytes
        if self.plan.activation_checkpointing and not self._first.activation_checkpointing:
            plan = self.plan.model_copy(update={"activation_checkpointing": False})
            tokens = largest_micro_batch(plan, self._bounds).tokens
            predicted = self._fixed(reading) + self._per_token * tokens
            return plan if tokens <= self._ceiling_tokens(reading.limit_bytes) and predicted <= allowed else None
        tokens = self._next_tokens(reading, allowed)
        if tokens is None:
            return None
        whole = tokens >= largest_micro_batch(self._first, self._bounds).tokens
        return self.plan.model_copy(update={"micro_batch_tokens": self._first.micro_batch_tokens if whole else tokens})

    def _next_tokens(self, reading: StepReading, allowed: float) -> int | None:
        """The next size upwards: in the middle between what works and what failed, or a few times as large where nothing has.

        Never more than is predicted to fit, and no step smaller than is worth a change.
        """
        now, ceiling = self.plan.micro_batch_tokens, self._ceiling_tokens(reading.limit_bytes)
        if not now:
            return None
        wanted = now * STEP_UP if self._failed is None else (now + ceiling + 1) // 2
        if self._per_token > 0:
            wanted = min(wanted, int((allowed - self._fixed(reading)) / self._per_token))
        most = largest_micro_batch(self._first, self._bounds).tokens
        if wanted >= most:
            return most
        longest = self._bounds.longest_tokens
        if self._uniform and now >= longest:  # only whole rows make a difference
            wanted = wanted // longest * longest
            return wanted if wanted // longest > now // longest and not self._settled(now, ceiling + 1) else None
        return None if self._settled(now, wanted) or self._settled(now, ceiling + 1) else wanted

    @staticmethod
    def _settled(works: int, next_size: int) -> bool:
        return next_size - works <= SETTLED * next_size

    def _ceiling_tokens(self, limit_bytes: int) -> int:
        """Passes above it have failed, unless the limit is a good deal higher than it was then."""
        if self._failed is None:
            return 2**62
        if self._failed.limit_bytes and limit_bytes > RAISED * self._failed.limit_bytes:
            self._failed = None
            return 2**62
        return self._failed.tokens - 1

    # -- words ----------------------------------------------------------------------------------------------------------

    def _impatient(self) -> None:
        self._patience = min(MOST_PATIENCE_STEPS, 2 * self._patience)
        self._grown_at = None

    def _once(self, decision: Decision) -> Decision | None:
        """Say a thing once for each plan, not at every step."""
        key = f"{decision.action} {decision.cause} {self.plan}"
        if key in self._said:
            return None
        self._said.add(key)
        return decision

    def _decision(
        self, action: Literal["shrink", "grow", "release", "replace", "note"], reading: StepReading, cause: Cause, text: str,
        plan: MemoryPlan | None = None,
    ) -> Decision:  # fmt: skip
        numbers = f"peak {format_bytes(reading.peak_bytes)} of {format_bytes(reading.limit_bytes)}"
        return Decision(action, f"{text}; {numbers}", reading.peak_bytes, reading.limit_bytes, plan, cause)


def _percent(reading: StepReading) -> str:
    return f"{100 * reading.peak_bytes / reading.limit_bytes:.0f} %"
