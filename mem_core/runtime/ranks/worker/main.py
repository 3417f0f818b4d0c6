"""A rank process: takes orders over its control connection, answers each with one reply, ends on `Stop` or end of file."""

import ctypes
import os
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, assert_never

from mem_core.runtime.ranks.agreement import Agreement
from mem_core.runtime.ranks.local.heartbeat import HeartbeatWriter
from mem_core.runtime.ranks.local.shared_page import SharedPage
from mem_core.runtime.ranks.place import RankPlace
from mem_core.runtime.ranks.port import Pulse
from mem_core.runtime.ranks.worker.classify import classify
from mem_core.runtime.ranks.worker.protocol import (
    AnswerPrompts,
    Command,
    Evaluate,
    Failed,
    Ready,
    Record,
    Recorded,
    Reply,
    Restore,
    Stop,
    Train,
    WorkerSpec,
)

M_ARENA_MAX = -8  # malloc.h


class ReplyChannel:
    """The connection's sending side, shared by the training thread and the snapshot's."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, reply: Reply) -> None:
        """Send one reply; a supervisor that is gone ends this process through the parent-death signal, not through here."""
        with self._lock:
            try:
                self._connection.send(reply)
            except BrokenPipeError:
                os._exit(3)

    def record(self, events: tuple[Any, ...]) -> None:
        """Have events journaled; returns when they are durable. Only from the thread that obeys commands.

        Raises:
            EOFError: the supervisor is gone.
        """
        self.send(Record(events))
        reply = self._connection.recv()
        if not isinstance(reply, Recorded):
            raise EOFError("the supervisor gave up waiting for this command")


def rank_main(connection: Connection) -> None:
    """Entry of a forked rank: the first message is its `WorkerSpec` and its `RankPlace`, then come commands."""
    first: tuple[WorkerSpec, RankPlace] = connection.recv()
    spec, place = first
    channel = ReplyChannel(connection)
    try:
        runner = _open_runner(spec, place, channel)
    except Exception as exc:  # noqa: BLE001 - as below: a rank that cannot begin says why
        traceback.print_exc()
        channel.send(Failed(classify(exc, place.rank, "start", 0, steps_done=False)))
        return
    _obey_until_stop(runner, place, connection, channel)


def _open_runner(spec: WorkerSpec, place: RankPlace, channel: ReplyChannel) -> Any:
    _prepare_process(spec, place)
    from mem_core.runtime.deepspeed.runner import DeepSpeedRunner  # preloaded by the fork server
    from mem_core.runtime.ranks.worker.device import open_device

    device = open_device(place)
    device.use()
    if spec.allocator_setting:
        device.set_allocator(spec.allocator_setting)
    pulse = open_pulse(place)
    pulse.beat("start")
    return DeepSpeedRunner(spec, place, device, pulse, open_agreement(spec, place), channel.record)


def _obey_until_stop(runner: Any, place: RankPlace, connection: Connection, channel: ReplyChannel) -> None:
    while True:
        try:
            command: Command = connection.recv()
        except EOFError:
            return
        if isinstance(command, Stop):
            return
        try:
            channel.send(_obey(runner, command, channel))
        except Exception as exc:  # noqa: BLE001 - the one edge where exceptions become outcomes (I8)
            traceback.print_exc()
            peak_bytes = runner.memory.peak_and_limit[0] or None
            failure = classify(
                exc, place.rank, runner.phase, runner.position.batch_index,
                failed=runner.micro_batch, peak_bytes=peak_bytes, steps_done=runner.has_stepped,
            )  # fmt: skip
            channel.send(Failed(runner.memory.with_evidence(failure)))
            return


def _obey(runner: Any, command: Restore | Train | Evaluate | AnswerPrompts, channel: ReplyChannel) -> Reply:
    match command:
        case Restore():
            runner.build(command.folder, command.position, command.replay_until)
            return Ready(runner.position.applied_steps, runner.engine.parameter_shapes(), runner.build_s, runner.restore_s)
        case Train():
            return runner.train(command, channel.send)
        case Evaluate():
            return runner.evaluate(command)
        case AnswerPrompts():
            return runner.answer_prompts(command)
    assert_never(command)


def open_pulse(place: RankPlace) -> Pulse:
    """This rank's sign of life."""
    return HeartbeatWriter(Path(place.heartbeat_path))


def open_agreement(spec: WorkerSpec, place: RankPlace) -> Agreement:
    """This rank's way to agree with the others, who all stand on this machine."""
    return SharedPage(place, spec.deadline_s)


def rank_variables(place: RankPlace) -> dict[str, str]:
    """What libraries read from the environment; DeepSpeed asks for mpi4py when one of the first five is missing."""
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.num_ranks),
        "MASTER_ADDR": place.meeting.master_address,
        "MASTER_PORT": str(place.meeting.master_port),
        "GLOO_SOCKET_IFNAME": place.meeting.interface,
    }


def _prepare_process(spec: WorkerSpec, place: RankPlace) -> None:
    """What must be set before the process group exists."""
    os.environ.update(rank_variables(place))
    import torch

    torch.set_num_threads(spec.num_threads)
    _use_one_malloc_arena()


def _use_one_malloc_arena() -> None:
    """Each new thread (the snapshot's, the collectives') would map an arena of 64 MiB, which RLIMIT_AS counts; glibc only."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)
