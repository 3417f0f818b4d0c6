"""What every `Agreement` must do, as tests: subclass `AgreementContract` and give an `agreements` fixture."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from mem_core.core.memory.ladder import MicroBatch
from mem_core.domain.plan import MemoryPlan
from mem_core.runtime.ranks.agreement import Agreement, RankReading

BATCHES = 6
LIMIT_S = 30.0


@dataclass(frozen=True)
class Try:
    """The ranks of one try as whoever tests them sees them: each one's agreement, and the word from outside to end the segment."""

    ranks: Sequence[Agreement]
    order_stop: Callable[[], None]


Agreements = Callable[..., Try]


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run at the same time, each in a thread; the results in order. The first error is raised here."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def call(index: int) -> None:
        try:
            results[index] = calls[index]()
        except BaseException as exc:  # noqa: BLE001 - told to the thread that asked
            errors.append(exc)

    threads = [threading.Thread(target=call, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads), "a rank waits for ever"
    if errors:
        raise errors[0]
    return results


class AgreementContract:
    """Needs a fixture `agreements`: `agreements(num_ranks, deadline_s=20.0)` gives the `Try` of fresh ranks on one machine."""

    @pytest.mark.parametrize("num_ranks", [1, 2, 3])
    def test_without_an_order_every_batch_may_start(self, agreements: Agreements, num_ranks: int) -> None:
        assert stops(agreements(num_ranks), lambda batch, turn: None) == [None] * num_ranks

    @pytest.mark.parametrize("num_ranks", [1, 2, 3])
    def test_an_order_stops_all_ranks_at_the_same_batch(self, agreements: Agreements, num_ranks: int) -> None:
        """Whenever it comes and whichever rank asks first; within two batches."""
        moments = itertools.product(range(BATCHES - 3), range(num_ranks), itertools.permutations(range(num_ranks)))
        for ordered_in, before_turn, turns in moments:
            attempt = agreements(num_ranks)

            def order(batch: int, turn: int, attempt: Try = attempt, moment: tuple[int, int] = (ordered_in, before_turn)) -> None:
                if (batch, turn) == moment:
                    attempt.order_stop()

            stopped = stops(attempt, order, turns)
            assert len(set(stopped)) == 1, f"order in batch {ordered_in} before turn {before_turn} of {turns}"
            assert stopped[0] in range(ordered_in, ordered_in + 3)

    @pytest.mark.parametrize("num_ranks", [2, 3])
    def test_a_wish_of_rank_0_is_an_order_and_that_of_another_rank_is_not(self, agreements: Agreements, num_ranks: int) -> None:
        assert stops(agreements(num_ranks), lambda batch, turn: None, wishes=(num_ranks - 1, 1)) == [None] * num_ranks
        stopped = stops(agreements(num_ranks), lambda batch, turn: None, wishes=(0, 1))
        assert len(set(stopped)) == 1
        assert stopped[0] in (1, 2)

    def test_a_single_rank_follows_its_own_wish_at_once(self, agreements: Agreements) -> None:
        (rank,) = agreements(1).ranks
        assert rank.may_start(6)
        assert not rank.may_start(7, stop_wanted=True)

    def test_notice_is_needed_only_where_there_are_others(self, agreements: Agreements) -> None:
        assert agreements(1).ranks[0].notice_steps == 0
        assert all(rank.notice_steps >= 1 for rank in agreements(2).ranks)

    @pytest.mark.parametrize("num_ranks", [1, 2, 3])
    def test_every_rank_sees_the_largest_failure_of_each_round(self, agreements: Agreements, num_ranks: int) -> None:
        """Hundreds of rounds with failures now here, now there: all ranks come to the same answer in each."""
        rounds = 300

        def failure(rank: int, turn: int) -> MicroBatch | None:
            return MicroBatch(rank + 1, 64 + turn) if (turn + rank) % 5 == 0 else None

        def run(rank: int, agreement: Agreement) -> list[MicroBatch | None]:
            return [agreement.agree(failure(rank, turn), undoable=True) for turn in range(rounds)]

        expected = []
        for turn in range(rounds):
            failed = [size for rank in range(num_ranks) if (size := failure(rank, turn)) is not None]
            expected.append(max(failed, key=lambda size: size.tokens, default=None))
        assert each(agreements(num_ranks), run) == [expected] * num_ranks

    def test_a_step_that_cannot_be_undone_goes_on_where_nothing_failed(self, agreements: Agreements) -> None:
        assert each(agreements(2), lambda rank, agreement: agreement.agree(None, undoable=False)) == [None, None]

    def test_a_rank_that_never_speaks_is_a_timeout(self, agreements: Agreements) -> None:
        """The wait is bounded, also where nobody watches."""
        with pytest.raises(TimeoutError):
            agreements(2, deadline_s=0.05).ranks[0].agree(None, undoable=True)

    @pytest.mark.parametrize("num_ranks", [2, 3])
    def test_a_plan_is_followed_from_its_batch_on_by_every_rank(self, agreements: Agreements, num_ranks: int) -> None:
        """Announced before batch 2 begins: unknown before its own first batch, the same plan from then on."""
        plan = MemoryPlan(micro_batch_rows=3, micro_batch_tokens=700, activation_checkpointing=True, offload_optimizer="cpu")

        def run(rank: int, agreement: Agreement) -> list[tuple[int, MemoryPlan] | None]:
            seen = []
            for batch in range(BATCHES):
                if rank == 0 and batch == 2:
                    agreement.announce(batch + agreement.notice_steps, plan)
                seen.append(agreement.announced(batch))
                agreement.agree(None, undoable=True)
            return seen

        attempt = agreements(num_ranks)
        first = 2 + attempt.ranks[0].notice_steps
        expected = [None] * first + [(first, plan)] * (BATCHES - first)
        assert each(attempt, run)[1:] == [expected] * (num_ranks - 1)

    @pytest.mark.parametrize("num_ranks", [1, 2, 3])
    def test_nobody_goes_on_before_rank_0_has_recorded_what_failed(self, agreements: Agreements, num_ranks: int) -> None:
        """Each failed round is recorded once, by rank 0, before any rank returns; a plan that was announced before is void."""
        recorded: list[int] = []

        def record(rank: int) -> None:
            time.sleep(0.05)
            recorded.append(rank)

        def run(rank: int, agreement: Agreement) -> list[object]:
            if rank == 0:
                agreement.announce(1, MemoryPlan(micro_batch_rows=1))
            seen: list[object] = []
            for _ in range(3):
                agreement.agree(MicroBatch(4, 64) if rank == num_ranks - 1 else None, undoable=True)
                agreement.record_first(lambda: record(rank))
                seen.append(list(recorded))
                agreement.agree(None, undoable=True)  # nobody is in the next round before all have looked
            return [*seen, agreement.announced(9) if rank else None]

        assert each(agreements(num_ranks), run) == [[[0], [0, 0], [0, 0, 0], None]] * num_ranks

    def test_a_rank_0_that_never_records_is_a_timeout(self, agreements: Agreements) -> None:
        attempt = agreements(2, deadline_s=1.0)
        each(attempt, lambda rank, agreement: agreement.agree(MicroBatch(1, 64), undoable=True))
        with pytest.raises(TimeoutError):
            attempt.ranks[1].record_first(lambda: None)

    @pytest.mark.parametrize("num_ranks", [1, 2, 3])
    def test_every_rank_knows_what_each_one_uses(self, agreements: Agreements, num_ranks: int) -> None:
        """What was told before a step that all have done is known after it."""

        def run(rank: int, agreement: Agreement) -> list[RankReading]:
            agreement.share(told[rank])
            agreement.agree(None, undoable=True)
            return agreement.share(told[rank])

        told = [RankReading(rank + 1, rank + 10, rank + 100, rank + 2, 8 * (rank + 1)) for rank in range(num_ranks)]
        assert each(agreements(num_ranks), run) == [told] * num_ranks


def each(attempt: Try, run: Callable[[int, Agreement], Any]) -> list[Any]:
    """`run(rank, agreement)` of all ranks at the same time."""
    return in_threads([lambda rank=rank, voice=voice: run(rank, voice) for rank, voice in enumerate(attempt.ranks)])


def stops(
    attempt: Try, before: Callable[[int, int], None], turns: Sequence[int] = (), wishes: tuple[int, int] = (-1, -1)
) -> list[int | None]:
    """The batch that each rank did not begin, None where it began them all.

    In each batch the ranks ask in the order of `turns`; `before(batch, turn)` is called before each asks. `wishes` names a rank and
    the batch from which on it wishes to stop. Behind each batch stands a barrier, as the gradients' collective does.
    """
    order = list(turns) or list(range(len(attempt.ranks)))
    asked = {(batch, turn): threading.Event() for batch in range(BATCHES) for turn in range(len(order) + 1)}
    collective = threading.Barrier(len(order))

    def run(rank: int, agreement: Agreement) -> int | None:
        turn = order.index(rank)
        for batch in range(BATCHES):
            assert turn == 0 or asked[batch, turn].wait(LIMIT_S)
            before(batch, turn)
            begins = agreement.may_start(batch, stop_wanted=rank == wishes[0] and batch >= wishes[1])
            asked[batch, turn + 1].set()
            if not begins:
                return batch
            agreement.agree(None, undoable=True)
            collective.wait(LIMIT_S / 3)
        return None

    return each(attempt, run)
