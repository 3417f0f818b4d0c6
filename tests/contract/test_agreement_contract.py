"""One contract, every adapter: the page that ranks of one machine share, and threads of one process."""

from pathlib import Path

import pytest

from mem_core.core.memory.ladder import MicroBatch
from mem_core.runtime.ranks.local.board import Board
from mem_core.runtime.ranks.local.places import local_place
from mem_core.runtime.ranks.local.shared_page import SharedPage
from mem_core.testing.contracts.agreement_contract import AgreementContract, Agreements, Try
from mem_core.testing.in_process_agreement import InProcessTry


class TestSharedPage(AgreementContract):
    @pytest.fixture
    def agreements(self, tmp_path: Path) -> Agreements:
        def make(num_ranks: int, deadline_s: float = 20.0) -> Try:
            board = Board.create(tmp_path / "board")
            ranks = [SharedPage(local_place(tmp_path, "cpu", rank, num_ranks), deadline_s) for rank in range(num_ranks)]
            return Try(ranks, board.order_stop)

        return make

    def test_nobody_waits_where_nothing_can_be_undone(self, agreements: Agreements) -> None:
        """At ZeRO stages 2 and 3 gradients are on their way already: a rank's own word is enough, and no step pays for more."""
        first = agreements(2, deadline_s=0.05).ranks[0]
        assert first.agree(None, undoable=False) is None
        assert first.agree(MicroBatch(2, 64), undoable=False) == MicroBatch(2, 64)

    def test_a_single_rank_waits_for_nobody(self, agreements: Agreements) -> None:
        (rank,) = agreements(1, deadline_s=0.0).ranks
        assert rank.agree(MicroBatch(2, 64), undoable=True) == MicroBatch(2, 64)


class TestThreadsOfOneProcess(AgreementContract):
    @pytest.fixture
    def agreements(self) -> Agreements:
        def make(num_ranks: int, deadline_s: float = 20.0) -> Try:
            group = InProcessTry(num_ranks, deadline_s)
            return Try(group.ranks, group.order_stop)

        return make
