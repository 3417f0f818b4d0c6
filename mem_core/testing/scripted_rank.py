"""Ranks without torch that behave as they are told: entry functions for the contract of `Ranks`, ready in milliseconds.

Each is the `module:function` of a rank process: obedient, or failing in its own way.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.segment import Evidence, WorkerError
from mem_core.runtime.ranks.local.heartbeat import HeartbeatWriter
from mem_core.runtime.ranks.place import RankPlace
from mem_core.runtime.ranks.worker.protocol import Evaluate, Evaluated, Failed, Ready, Reply, Restore, Saved, SegmentDone, Stop, Train

BeforeTrain = Callable[[RankPlace, Train, HeartbeatWriter], Reply | None]
GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"


def obedient(connection: Connection) -> None:
    """Answers every command at once and saves what it is told to."""
    serve(connection, lambda place, command, beat: None)


def serve(connection: Connection, before_train: BeforeTrain) -> None:
    """The protocol of a rank; `before_train(place, command, heartbeat)` may misbehave, or return a reply to send instead."""
    _, place = connection.recv()
    heartbeat = HeartbeatWriter(Path(place.heartbeat_path))
    heartbeat.beat("idle")
    while True:
        try:
            command = connection.recv()
        except EOFError:
            return
        match command:
            case Stop():
                return
            case Restore():
                connection.send(Ready(command.position.applied_steps, {}, 0.0, 0.0))
            case Evaluate():
                connection.send(Evaluated(1.5))
            case Train():
                reply = before_train(place, command, heartbeat)
                connection.send(reply or done(command.until_step))
                if command.staging and reply is None:
                    connection.send(Saved(step=command.until_step, weights_digest="d" if place.rank == 0 else ""))


def done(step: int) -> SegmentDone:
    """A segment that reached its step."""
    return SegmentDone(TrainingPosition(applied_steps=step, batch_index=step), False, 0.0, 0.0)


def dies_by_signal(connection: Connection) -> None:
    """Rank 1 is killed in its first segment; rank 0 then says what gloo says, a moment before or after the death is seen."""

    def before(place: RankPlace, command: Train, beat: HeartbeatWriter) -> Failed | None:
        beat.beat("step", 7, 7)
        if place.rank == 1:
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        evidence = Evidence(rank=0, phase="backward", exception=GLOO)
        return Failed(WorkerError(evidence=evidence))

    serve(connection, before)


def exits(connection: Connection) -> None:
    """Says its last words and exits with 7 in the first segment."""

    def before(place: RankPlace, command: Train, beat: HeartbeatWriter) -> None:
        sys.stdout.write("the last words of a rank\n")
        sys.stdout.flush()
        os._exit(7)

    serve(connection, before)


def stops_itself(connection: Connection) -> None:
    """Rank 1 is stopped in its first segment; the others wait for it."""

    def before(place: RankPlace, command: Train, beat: HeartbeatWriter) -> None:
        beat.beat("step", 3, 3, step_s=0.01)
        if place.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)

    serve(connection, before)


def waits_for_ever(connection: Connection) -> None:
    """Nobody computes, nobody speaks: a dead-lock."""

    def before(place: RankPlace, command: Train, beat: HeartbeatWriter) -> None:
        beat.beat("step", 3, 3, step_s=0.01)
        time.sleep(60)

    serve(connection, before)


def computes_slowly(connection: Connection) -> None:
    """Rank 1 computes for 5 s without a word while rank 0 waits for it, then all goes on."""

    def before(place: RankPlace, command: Train, beat: HeartbeatWriter) -> None:
        beat.beat("step", 3, 3, step_s=0.01)
        end = time.monotonic() + 5.0
        while time.monotonic() < end:
            if place.rank == 0:
                time.sleep(0.1)

    serve(connection, before)


def stubborn(connection: Connection) -> None:
    """Ignores SIGTERM and never answers an evaluation."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection.recv()
    while True:
        time.sleep(60)


def saves_then_dies(connection: Connection) -> None:
    """Every file is written and said to be, then the rank is killed."""

    def before(place: RankPlace, command: Train, beat: HeartbeatWriter) -> None:
        connection.send(done(command.until_step))
        connection.send(Saved(step=command.until_step, weights_digest="d"))
        os.kill(os.getpid(), signal.SIGKILL)

    serve(connection, before)
