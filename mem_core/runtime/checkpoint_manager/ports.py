"""What a checkpoint manager is given: whose checkpoints they are, and everything of the world that it touches."""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mem_core.core.run.belonging import CheckpointWords
from mem_core.domain.checkpoint import CheckpointExpectation
from mem_core.domain.events import Event
from mem_core.domain.request import CheckpointSection
from mem_core.infrastructure.storage.disk import Disk, OsDisk
from mem_core.runtime.checkpoint_manager.inspection.pickle_scan import DEFAULT_ALLOWED_GLOBALS
from mem_core.runtime.checkpoint_manager.inspection.tensor_checks import scan_file


def _scan_engine_file(path: Path) -> tuple[str, ...]:
    return scan_file(path, DEFAULT_ALLOWED_GLOBALS)


@dataclass(frozen=True)
class CheckpointScope:
    """Whose checkpoints: one attempt of one run. `expectation` is the shape that can be resumed.

    `birth` is what the run was born with (`birth_of`): written into every manifest, compared with those that are found. Empty: unknown.
    """

    run_folder: Path
    run_id: str
    attempt: int
    section: CheckpointSection
    expectation: CheckpointExpectation
    birth: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class CheckpointPorts:
    """The world as the manager meets it.

    `fence` raises RunHeld where a newer attempt has begun; `emit` journals an event; `words` is what the journal says about checkpoints,
    what `emit` was given included; `tell` shows a line to people, beside the journal; `held` names steps that must stay (their copy
    elsewhere is not proven yet); `scan` gives the reasons why a file must not be unpickled; `clock` is in seconds of Unix time.
    """

    fence: Callable[[], None]
    emit: Callable[[Event], object]
    words: CheckpointWords = field(default_factory=CheckpointWords)
    tell: Callable[[str], object] = lambda text: None
    held: Callable[[], Collection[int]] = tuple
    scan: Callable[[Path], tuple[str, ...]] = _scan_engine_file
    disk: Disk = field(default_factory=OsDisk)
    clock: Callable[[], float] = time.time
