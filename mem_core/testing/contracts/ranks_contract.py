"""What every `Ranks` must do, as tests: subclass `RanksContract` and give its fixtures. Real processes and real signals.

The ranks are those of `mem_core.testing.scripted_rank`, which need no torch.
"""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.plan import Hyperparams, MemoryPlan
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.segment import Hung, SegmentFailure, WorkerLost
from mem_core.runtime.ranks.port import GroupFailed, Heartbeat, Purpose, RankGroup, Ranks, Watch
from mem_core.runtime.ranks.worker.protocol import AnswerPrompts, Evaluate, SegmentDone, Train, WorkerSpec
from mem_core.testing.scripted_rank import LAST_WORDS

START = TrainingPosition(applied_steps=0, batch_index=0)
RanksOf = Callable[[str], Ranks]
Start = Callable[..., RankGroup]


def scripted_spec(num_ranks: int = 1, segment_deadline_s: float | str = "auto") -> WorkerSpec:
    """What scripted ranks are told about their run."""
    request = RuntimeRequest.model_validate(
        {
            "run_id": "x", "training": {"global_batch_size": 12}, "parallel": {"num_ranks": num_ranks},
            "resilience": {"segment_deadline_s": segment_deadline_s},
        }
    )  # fmt: skip
    return WorkerSpec(
        request=request, device="cpu", dtype="float32", num_threads=1, data_folder="", validation_folder=None, pad_token_id=0,
        default_plan=MemoryPlan(micro_batch_rows=1),
    )  # fmt: skip


def train(group: RankGroup, until_step: int = 10, staging: str | None = None, replay_of: int | None = None) -> SegmentDone:
    """One segment that nobody wishes to stop."""
    order = Train(until_step, Hyperparams(), staging, replay_of=replay_of)
    return group.train(order, lambda beats: None, lambda: False)


def failure_of(group: RankGroup) -> SegmentFailure:
    """What a segment of this group fails with."""
    with pytest.raises(GroupFailed) as caught:
        train(group)
    return caught.value.failure


class RanksContract:
    """Needs two fixtures: `ranks_of(entry)` gives ranks that run this function of `scripted_rank`; `nothing_left()` says whether no
    process and no file of any of their groups is left, within some seconds."""

    @pytest.fixture
    def start(self, ranks_of: RanksOf) -> Iterator[Start]:
        """Begin groups; all are ended afterwards."""
        groups: list[RankGroup] = []

        def begin(entry: str, num_ranks: int = 1, watch: Watch | None = None, segment_deadline_s: float | str = "auto") -> RankGroup:
            groups.append(ranks_of(entry).start(scripted_spec(num_ranks, segment_deadline_s), watch or Watch()))
            return groups[-1]

        yield begin
        for group in groups:
            group.stop()

    # -- orders ---------------------------------------------------------------------------------------------------------

    def test_every_rank_answers_and_stop_leaves_nothing(self, start: Start, nothing_left: Callable[[], bool]) -> None:
        """Restore, train, save, evaluate; afterwards no process, no folder."""
        group = start("obedient", 3)
        assert group.restore(None, START).applied_steps == 0
        assert train(group, 5, "/nowhere").position.applied_steps == 5
        assert group.evaluate(Evaluate(max_rows=1)).figures["validation"].loss == 1.5
        assert [sample.greedy for sample in group.answer_prompts(AnswerPrompts()).samples] == ["b"]
        assert [saved.weights_digest for saved in group.wait_saved(5, 5.0)] == ["d", "", ""]
        assert len(group.heartbeats()) == 3
        group.stop()
        group.stop()
        assert nothing_left()

    def test_a_wish_to_stop_ends_the_segment_at_the_same_batch_on_every_rank(self, start: Start) -> None:
        """Seen from outside by their heartbeats; the next segment begins without the old order."""
        group = start("steps_until_told", 2)
        group.restore(None, START)
        for _ in range(2):
            seen: list[list[Heartbeat]] = []
            order = Train(1_000_000, Hyperparams(), None)
            done = group.train(order, seen.append, lambda seen=seen: bool(seen) and seen[-1][0].batch_index >= 5)
            assert done.interrupted
            assert [beat.batch_index for beat in group.heartbeats()] == [done.position.batch_index] * 2
            assert done.position.batch_index >= 5
            assert {len(beats) for beats in seen} == {2}

    def test_what_rank_0_wants_journaled_is_handed_on_before_it_goes_on(self, start: Start) -> None:
        journal: list[object] = []
        group = start("records", 2, Watch(on_record=journal.append))
        group.restore(None, START)
        assert train(group, 3).position.applied_steps == 3
        assert journal == [("a plan",)]

    def test_the_evidence_is_that_of_rank_0_and_never_waited_for_in_vain(self, start: Start) -> None:
        group = start("tells_evidence", 2)
        group.restore(None, START)
        train(group, 6, replay_of=4)
        found = group.wait_evidence(4, 5.0)
        assert found is not None
        assert found.losses == (0.5,)
        assert group.wait_evidence(6, 0.05) is None
        group.stop()
        started_s = time.monotonic()
        assert group.wait_evidence(6, 60.0) is None
        assert time.monotonic() - started_s < 5.0

    def test_groups_of_two_purposes_do_not_disturb_each_other(self, ranks_of: RanksOf, nothing_left: Callable[[], bool]) -> None:
        """A checkpoint is replayed while training goes on: the order that ends the one is none for the other, nor is its end."""
        ranks, enough, ended = ranks_of("steps_until_told"), threading.Event(), list[SegmentDone]()
        purposes: tuple[Purpose, ...] = ("train", "replay")
        training, replay = groups = [ranks.start(scripted_spec(2), Watch(purpose=purpose)) for purpose in purposes]
        order = Train(1_000_000, Hyperparams(), None)
        thread = threading.Thread(target=lambda: ended.append(training.train(order, lambda beats: None, enough.is_set)))
        try:
            for group in groups:
                group.restore(None, START)
            thread.start()
            assert replay.train(order, lambda beats: None, lambda: True).interrupted
            replay.stop()
            reached, end = training.heartbeats()[0].batch_index, time.monotonic() + 10.0
            while thread.is_alive() and training.heartbeats()[0].batch_index < reached + 10 and time.monotonic() < end:
                time.sleep(0.01)
            assert training.heartbeats()[0].batch_index >= reached + 10
            assert thread.is_alive()
            enough.set()
            thread.join(10.0)
            assert [done.interrupted for done in ended] == [True]
        finally:
            for group in groups:
                group.stop()
        assert nothing_left()

    # -- ends -----------------------------------------------------------------------------------------------------------

    def test_the_first_rank_to_die_is_named_and_not_its_peers_complaint(self, start: Start, nothing_left: Callable[[], bool]) -> None:
        """Rank 0's "connection closed by peer" arrives first; the cause is rank 1's SIGKILL. Nobody is left."""
        group = start("dies_by_signal", 2)
        group.restore(None, START)
        failure = failure_of(group)
        assert isinstance(failure, WorkerLost)
        assert (failure.evidence.rank, failure.evidence.signal, failure.evidence.batch_index) == (1, "SIGKILL", 7)
        assert nothing_left()

    def test_exit_code_and_last_lines_are_evidence(self, start: Start) -> None:
        """A rank that exits by itself is lost with its exit code and its last words."""
        group = start("exits")
        group.restore(None, START)
        failure = failure_of(group)
        assert isinstance(failure, WorkerLost)
        assert failure.evidence.exit_code == 7
        assert LAST_WORDS in failure.evidence.last_lines

    def test_a_death_between_two_commands_is_found_by_the_next(self, start: Start) -> None:
        """A rank killed while idle fails the next command, by its signal."""
        group = start("dies_while_idle", 2)
        group.restore(None, START)
        time.sleep(0.5)
        failure = failure_of(group)
        assert isinstance(failure, WorkerLost)
        assert (failure.evidence.rank, failure.evidence.signal) == (1, "SIGKILL")

    def test_a_save_that_was_complete_before_the_death_is_kept(self, start: Start) -> None:
        """What a rank sent before it died still counts, also after the group was ended."""
        group = start("saves_then_dies")
        group.restore(None, START)
        assert train(group, 4, "/nowhere").position.applied_steps == 4
        assert [saved.step for saved in group.wait_saved(4, 5.0)] == [4]
        with pytest.raises(GroupFailed):
            train(group, 8)
        assert [saved.step for saved in group.wait_saved(4, 5.0)] == [4]

    def test_waiting_for_a_save_of_a_stopped_group_fails_at_once(self, start: Start) -> None:
        """Neither an empty answer nor a wait until the deadline: the group is gone."""
        group = start("obedient", 2)
        group.restore(None, START)
        outcome: list[object] = []

        def wait() -> None:
            try:
                outcome.append(group.wait_saved(99, 60.0))
            except GroupFailed as exc:
                outcome.append(exc.failure.kind)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.1)
        group.stop()
        thread.join(timeout=5)
        assert outcome == ["worker_lost"]
        with pytest.raises(GroupFailed):
            group.wait_saved(99, 60.0)

    def test_a_writer_that_never_ends_is_a_timeout(self, start: Start) -> None:
        group = start("obedient")
        group.restore(None, START)
        with pytest.raises(TimeoutError):
            group.wait_saved(99, 0.05)

    # -- silence --------------------------------------------------------------------------------------------------------

    def test_a_stopped_rank_is_named_with_the_stacks_of_all_and_ended(self, start: Start, nothing_left: Callable[[], bool]) -> None:
        """SIGSTOP of one of two: found after the 3 s that a step may be silent, both stacks taken, both processes gone."""
        group = start("stops_itself", 2)
        group.restore(None, START)
        started_s = time.monotonic()
        failure = failure_of(group)
        assert isinstance(failure, Hung)
        assert failure.evidence.rank == 1
        assert failure.evidence.stacks.count("scripted_rank.py") >= 2
        assert 3.0 <= failure.waited_s < 10.0
        assert time.monotonic() - started_s < 20.0
        assert nothing_left()

    def test_a_dead_lock_is_found(self, start: Start) -> None:
        """Nobody is stopped, nobody computes: hung after the same time."""
        group = start("waits_for_ever", 2)
        group.restore(None, START)
        failure = failure_of(group)
        assert isinstance(failure, Hung)
        assert failure.waited_s < 6.0

    def test_a_rank_that_computes_is_slow_and_neither_it_nor_its_peer_is_hung(self, start: Start) -> None:
        """5 s without a word on a starved machine is no hang while one rank of the group uses CPU time."""
        group = start("computes_slowly", 2)
        group.restore(None, START)
        assert train(group, 11).position.applied_steps == 11

    def test_a_segment_past_its_own_deadline_is_hung_however_busy_it_looks(self, start: Start) -> None:
        """`resilience.segment_deadline_s` as a number: the same rank that is merely slow without it."""
        group = start("computes_slowly", 2, segment_deadline_s=1.0)
        group.restore(None, START)
        failure = failure_of(group)
        assert isinstance(failure, Hung)
        assert 1.0 <= failure.waited_s < 4.5, "it computes for 5 s"
