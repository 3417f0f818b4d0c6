"""Ranks without torch that behave as they are told: entry functions for the contract of `Ranks`, ready in milliseconds.

Each function with a `connection` alone is the `module:function` of a rank process, which serves the protocol and misbehaves in its
own way.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.plan import Hyperparams
from mem_core.domain.results.evaluation import SetFigures
from mem_core.domain.results.samples import Sample
from mem_core.domain.segment import Evidence, WorkerError
from mem_core.runtime.ranks.agreement import Agreement
from mem_core.runtime.ranks.place import RankPlace
from mem_core.runtime.ranks.port import Pulse
from mem_core.runtime.ranks.worker.main import open_agreement, open_pulse
from mem_core.runtime.ranks.worker.protocol import (
    Answered,
    AnswerPrompts,
    Evaluate,
    Evaluated,
    Failed,
    Ready,
    Record,
    ReplayEvidence,
    Reply,
    Restore,
    Saved,
    SegmentDone,
    Stop,
    Train,
)

GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"
LAST_WORDS = "the last words of a rank"


@dataclass(frozen=True)
class Actor:
    """What a rank has at hand."""

    connection: Connection
    place: RankPlace
    pulse: Pulse
    agreement: Agreement


Misbehave = Callable[[Actor, Train], Reply | None]


def serve(connection: Connection, train: Misbehave = lambda actor, command: None, restored: Callable[[Actor], None] | None = None) -> None:
    """The protocol of a rank. `train` may do as it likes, or return a reply to send instead; `restored` is called after a restore."""
    spec, place = connection.recv()
    actor = Actor(connection, place, open_pulse(place), open_agreement(spec, place))
    actor.pulse.beat("idle")
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
                if restored is not None:
                    restored(actor)
            case Evaluate():
                connection.send(Evaluated({"validation": SetFigures.of(1.5, 0.5, tokens=1, rows=1, rows_total=1)}))
            case AnswerPrompts():
                connection.send(Answered((Sample(prompt="a", greedy="b", sampled="c"),) if place.rank == 0 else ()))
            case Train():
                reply = train(actor, command)
                connection.send(reply or done(command.until_step))
                if command.staging and reply is None:
                    connection.send(Saved(step=command.until_step, weights_digest="d" if place.rank == 0 else ""))


def done(step: int, *, interrupted: bool = False) -> SegmentDone:
    """A segment that ended at this step."""
    return SegmentDone(TrainingPosition(applied_steps=step, batch_index=step), interrupted, 0.0, 0.0)


def obedient(connection: Connection) -> None:
    """Answers every command at once and saves what it is told to."""
    serve(connection)


def steps_until_told(connection: Connection) -> None:
    """Takes steps as ranks do, together, until an order ends the segment."""

    def train(actor: Actor, command: Train) -> SegmentDone:
        batch = 0
        while batch < command.until_step and actor.agreement.may_start(batch):
            time.sleep(0.002)
            actor.agreement.agree(None, undoable=True)
            batch += 1
            actor.pulse.beat("step", batch, batch, step_s=0.002)
        return done(batch, interrupted=batch < command.until_step)

    serve(connection, train)


def records(connection: Connection) -> None:
    """Rank 0 has something journaled in the middle of a segment and goes on when it is told that this is done."""

    def train(actor: Actor, command: Train) -> None:
        if actor.place.rank == 0:
            actor.connection.send(Record(("a plan",)))  # type: ignore[arg-type] - any value does for the one who only hands it on
            actor.connection.recv()

    serve(connection, train)


def tells_evidence(connection: Connection) -> None:
    """Says early what its first steps came to, where it is asked to."""

    def train(actor: Actor, command: Train) -> None:
        if command.replay_of is not None:
            actor.connection.send(ReplayEvidence(command.replay_of, Hyperparams(), (0.5 + actor.place.rank,), (None,)))

    serve(connection, train)


def dies_by_signal(connection: Connection) -> None:
    """Rank 1 is killed in its first segment; rank 0 then says what gloo says, a moment before or after the death is seen."""

    def train(actor: Actor, command: Train) -> Failed:
        actor.pulse.beat("step", 7, 7)
        if actor.place.rank == 1:
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        return Failed(WorkerError(evidence=Evidence(rank=0, phase="backward", exception=GLOO)))

    serve(connection, train)


def dies_while_idle(connection: Connection) -> None:
    """Rank 1 is killed a moment after it has restored, whether or not it is asked for anything then."""

    def restored(actor: Actor) -> None:
        if actor.place.rank == 1:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def train(actor: Actor, command: Train) -> None:
        if actor.place.rank == 1:
            time.sleep(60)

    serve(connection, train, restored)


def exits(connection: Connection) -> None:
    """Says its last words and exits with 7 in the first segment."""

    def train(actor: Actor, command: Train) -> None:
        sys.stdout.write(LAST_WORDS + "\n")
        sys.stdout.flush()
        os._exit(7)

    serve(connection, train)


def stops_itself(connection: Connection) -> None:
    """Rank 1 is stopped in its first segment; the others wait for it."""

    def train(actor: Actor, command: Train) -> None:
        actor.pulse.beat("step", 3, 3, step_s=0.01)
        if actor.place.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)

    serve(connection, train)


def waits_for_ever(connection: Connection) -> None:
    """Nobody computes, nobody speaks: a dead-lock."""

    def train(actor: Actor, command: Train) -> None:
        actor.pulse.beat("step", 3, 3, step_s=0.01)
        time.sleep(60)

    serve(connection, train)


def computes_slowly(connection: Connection) -> None:
    """Rank 1 computes for 5 s without a word while rank 0 waits for it, then all goes on.

    Rank 0 answers first: a waiting rank that is the last to owe an answer would have nobody to be excused by.
    """

    def train(actor: Actor, command: Train) -> None:
        actor.pulse.beat("step", 3, 3, step_s=0.01)
        if actor.place.rank == 0:
            time.sleep(4.7)
            return
        end = time.monotonic() + 5.0
        while time.monotonic() < end:
            pass

    serve(connection, train)


def saves_then_dies(connection: Connection) -> None:
    """Every file is written and said to be, then the rank is killed."""

    def train(actor: Actor, command: Train) -> None:
        actor.connection.send(done(command.until_step))
        actor.connection.send(Saved(step=command.until_step, weights_digest="d"))
        os.kill(os.getpid(), signal.SIGKILL)

    serve(connection, train)


def stubborn(connection: Connection) -> None:
    """Ignores SIGTERM and never answers anything."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection.recv()
    while True:
        time.sleep(60)
