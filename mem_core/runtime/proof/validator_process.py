"""Checkpoints are judged in a process of their own, so that neither training nor the flow process pays for it or dies of it."""

import os
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from mem_core.domain.checkpoint import CheckpointManifest, CheckpointVerdict
from mem_core.domain.errors import EnvironmentUnfit
from mem_core.runtime.checkpoint_manager.inspection.validator import IntegrityValidator, Level, Replay
from mem_core.runtime.ranks.port import HelperProcess, Helpers

ENTRY = "mem_core.runtime.proof.validator_process:validator_main"
FORK_DEADLINE_S = 120.0
MIN_DEADLINE_S = 300.0
BYTES_PER_S = 20e6  # slower than any disk that training should use


def validator_main(connection: Connection) -> None:
    """Entry of the forked validator: answers each (folder, manifest, previous digest, level) with a verdict or an error text."""
    os.nice(10)
    validator: IntegrityValidator = connection.recv()
    while True:
        try:
            order = connection.recv()
        except EOFError:
            return
        try:
            connection.send(validator(*order))
        except Exception as exc:  # noqa: BLE001 - goes back to the owner, which raises
            traceback.print_exc()
            connection.send(f"{type(exc).__name__}: {exc}")


class ValidatorProcess:
    """A `Validator` whose work is done in a forked child; a child that died is replaced once per call."""

    def __init__(self, helpers: Helpers, validator: IntegrityValidator, replay: Replay | None = None) -> None:
        """`replay` starts processes of its own, so it runs here and not in the child."""
        self.replay = replay
        self._helpers = helpers
        self._validator = validator
        self._child: HelperProcess | None = None

    def __call__(self, folder: Path, manifest: CheckpointManifest, previous_weights_digest: str, level: Level) -> CheckpointVerdict:
        """Judge one folder.

        Raises:
            EnvironmentUnfit: the validating process died twice or gave no answer in time; there is no verdict then.
        """
        size_bytes = sum(entry.size_bytes for entry in manifest.files)
        for _ in range(2):
            answer = self._ask((folder, manifest, previous_weights_digest, "integrity"), MIN_DEADLINE_S + size_bytes / BYTES_PER_S)
            if isinstance(answer, CheckpointVerdict):
                return self._replayed(folder, manifest, answer) if level == "replay" else answer
            if answer is not None:
                raise EnvironmentUnfit(f"the checkpoint could not be judged: {answer}", remedy="Read logs/validator.log in the run folder.")
        raise EnvironmentUnfit("the validating process died twice", remedy="Read logs/validator.log; memory may be short.")

    def _replayed(self, folder: Path, manifest: CheckpointManifest, verdict: CheckpointVerdict) -> CheckpointVerdict:
        if not verdict.valid or self.replay is None:
            return verdict
        started_s = time.monotonic()
        reasons = tuple(f"replay: {reason}" for reason in self.replay(folder, manifest))
        duration_s = verdict.duration_s + time.monotonic() - started_s
        return verdict.model_copy(update={"level": "replay", "valid": not reasons, "reasons": reasons, "duration_s": duration_s})

    def _ask(self, order: tuple[Path, CheckpointManifest, str, str], deadline_s: float) -> CheckpointVerdict | str | None:
        child = self._child or self._start()
        try:
            child.connection.send(order)
            if child.connection.poll(deadline_s):
                return child.connection.recv()
        except (EOFError, OSError):
            pass
        self.close()
        return None

    def _start(self) -> HelperProcess:
        self._child = self._helpers.fork(ENTRY, "validator.log")
        self._child.wait_forked(FORK_DEADLINE_S)
        self._child.connection.send(self._validator)
        return self._child

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.signal_group(9)
            self._child.close()
            self._child = None
