"""Which of several failures of one group came first: the others are echoes of it. Pure."""

import re
from collections.abc import Sequence

from mem_core.domain.segment import SegmentFailure, WorkerError

# What gloo and NCCL say on the ranks that are left when a peer is gone; read in the messages that real kills produced.
_PEER_GONE = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|[Rr]emote process exited|Socket (closed|Timeout)|"
    r"Timed out waiting|connect\w* timed? ?out|peer (is )?(gone|down)|ncclRemoteError|NCCL communicator was aborted|unhandled system error"
)


def is_echo(failure: SegmentFailure) -> bool:
    """Whether a rank only says that another one is gone."""
    return isinstance(failure, WorkerError) and _PEER_GONE.search(failure.evidence.exception) is not None


def first_cause(failures: Sequence[SegmentFailure]) -> SegmentFailure:
    """The failure that is nobody's echo; of several the first that arrived. `failures` is not empty."""
    return next((failure for failure in failures if not is_echo(failure)), failures[0])
