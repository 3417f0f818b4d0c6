"""Which failure of a group came first: pure."""

import pytest

from mem_core.domain.segment import Evidence, Hung, NonFinite, OutOfMemory, SegmentFailure, WorkerError, WorkerLost
from mem_core.runtime.ranks.local.first_cause import first_cause, is_echo

PEER_GONE = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:23",
    "DistBackendError: NCCL error: remote process exited or there was a network error",
    "RuntimeError: Connection reset by peer",
    "RuntimeError: [enforce fail at pair.cc] Broken pipe",
)


def error(text: str, rank: int = 0) -> WorkerError:
    return WorkerError(evidence=Evidence(rank=rank, exception=text))


@pytest.mark.parametrize("text", PEER_GONE)
def test_words_about_a_lost_peer_are_an_echo(text: str) -> None:
    """What is left of a group when one is gone."""
    assert is_echo(error(text))


@pytest.mark.parametrize(
    "failure",
    [
        error("ValueError: shapes do not match"),
        WorkerLost(cause="SIGKILL", evidence=Evidence()),
        OutOfMemory(memory="host", evidence=Evidence()),
        NonFinite(what="loss", batch_index=3),
        Hung(waited_s=3, evidence=Evidence()),
    ],
)
def test_every_other_failure_is_a_cause(failure: SegmentFailure) -> None:
    """Nothing else is mistaken for an echo."""
    assert not is_echo(failure)


def test_the_first_cause_wins_over_earlier_echoes_and_later_causes() -> None:
    """Order of arrival among causes; an echo only where there is nothing else."""
    lost, late = WorkerLost(cause="SIGKILL", evidence=Evidence(rank=1)), error("ValueError: x", 2)
    assert first_cause([error(PEER_GONE[0]), lost, late]) is lost
    echo = error(PEER_GONE[0])
    assert first_cause([echo]) is echo
