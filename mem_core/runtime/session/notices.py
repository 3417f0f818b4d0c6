"""What the supervising loop notices beside progress: stragglers, a preemption notice, a loss that is far out."""

import os
from collections.abc import Callable, Sequence

from mem_core.core.recovery.spikes import WINDOW, spike_at
from mem_core.core.recovery.stragglers import StragglerWatch
from mem_core.domain.request import ResilienceSection
from mem_core.infrastructure.storage.reading import local_name
from mem_core.runtime.ranks.port import Heartbeat


class Notices:
    """One for an attempt. `say` records a sentence in the journal and shows it."""

    def __init__(self, section: ResilienceSection, say: Callable[[str], None]) -> None:
        self._section = section
        self._say = say
        self._stragglers: StragglerWatch | None = None
        self._compared_batch = -1
        self._losses: list[float] = []

    def look_for_stragglers(self, beats: Sequence[Heartbeat]) -> None:
        """A notice only: what to do about a slow machine is a person's decision."""
        if len(beats) < 2 or beats[0].phase != "step" or beats[0].batch_index == self._compared_batch:
            return
        self._compared_batch = beats[0].batch_index
        self._stragglers = self._stragglers or StragglerWatch(len(beats))
        found = self._stragglers.take([beat.compute_s for beat in beats])
        if found is not None:
            self._say(f"rank {found[0]} is a straggler: it computes {found[1]:.1f} times as long as its peers")

    def preempted(self) -> str:
        """Who asks for an end, where the request names a notice file and it is there; else empty."""
        notice = self._section.preemption_file
        return f"the preemption notice {notice}" if notice is not None and os.path.exists(local_name(notice)) else ""

    def spike(self, losses: Sequence[float]) -> int | None:
        """Index of the first loss of a segment that is too far out, where the request sets a threshold. Otherwise they are history."""
        factor = self._section.loss_spike_factor
        found = spike_at(self._losses, losses, factor) if factor is not None else None
        if found is None:
            self._losses = [*self._losses, *losses][-WINDOW:]
        return found
