"""Which of several failures of one group came first: the others are echoes of it. Pure."""

from collections.abc import Sequence

from mem_core.domain.segment import SegmentFailure, WorkerError
from mem_core.runtime.ranks.worker.classify import says_peer_gone


def is_echo(failure: SegmentFailure) -> bool:
    """Whether a rank only says that another one is gone."""
    return isinstance(failure, WorkerError) and says_peer_gone(failure.evidence.exception)


def first_cause(failures: Sequence[SegmentFailure]) -> SegmentFailure:
    """The failure that is nobody's echo; of several the first that arrived. `failures` is not empty."""
    return next((failure for failure in failures if not is_echo(failure)), failures[0])
