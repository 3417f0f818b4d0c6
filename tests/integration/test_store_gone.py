"""The store goes away in the middle of a whole run: waited for within bounds, gone on with when it is back, never made anew."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mem_core.domain.errors import StoreUnavailable
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.runtime.session.opening.stages import OpeningOptions
from mem_core.testing.ports import Console

pytestmark = pytest.mark.integration
TRAINING = {"max_steps": 40, "segment_steps": 10, "global_batch_size": 4, "warmup_steps": 5}
Drive = Callable[..., RunResult]
Nano = Callable[..., RuntimeRequest]


class MovedAway:
    """Before segment 2 a folder is moved away; after `back_s` it is moved back (None: never). Sees what stands in its place meanwhile."""

    def __init__(self, folder: Path, away: Path, back_s: float | None) -> None:
        self.folder, self.away, self.back_s = folder, away, back_s
        self.in_its_place: list[str] = []
        self.timer: threading.Timer | None = None

    def __call__(self, session: Any, segment: Any) -> None:
        """The hook."""
        if segment.segment_index == 2 and not self.away.exists() and self.timer is None:
            session.checkpoints.wait_judged()
            self.folder.rename(self.away)
            if self.back_s is not None:
                self.timer = threading.Timer(self.back_s, self.bring_back)
                self.timer.start()

    def bring_back(self) -> None:
        """Raises OSError where something was made in its place."""
        if self.folder.exists():
            self.in_its_place = [path.name for path in self.folder.rglob("*")]
        self.away.rename(self.folder)


@pytest.mark.parametrize("what", ["root", "run folder"])
def test_a_store_that_comes_back_costs_a_wait(what: str, drive: Drive, nano: Nano, tmp_path: Path) -> None:
    """The same weights, nothing lost, nothing made meanwhile."""
    root = tmp_path / "store"
    plain = drive(nano("plain", training=TRAINING))
    gone = MovedAway(root if what == "root" else root / "run", tmp_path / "away", back_s=4.0)
    console = Console()
    request = nano("run", training=TRAINING).model_copy(update={"store": str(root)})
    result = drive(request, before_segment=gone, progress=console)
    assert gone.timer is not None
    assert (result.weights_digest, result.trajectory_digest) == (plain.weights_digest, plain.trajectory_digest)
    assert gone.in_its_place == []
    assert "waiting up to 60 s" in console.text
    assert "the store is back" in console.text


def test_a_store_that_stays_away_ends_the_run_with_73(drive: Drive, nano: Nano, tmp_path: Path) -> None:
    """Nothing stands where it was; brought back, the same command goes on from what was proven."""
    root, away = tmp_path / "store", tmp_path / "away"
    request = nano("run", training=TRAINING).model_copy(update={"store": str(root)})
    with pytest.raises(StoreUnavailable) as caught:
        drive(request, before_segment=MovedAway(root, away, back_s=None), options=OpeningOptions(store_patience_s=1.0))
    assert caught.value.exit_code == 73
    assert not root.exists()
    away.rename(root)
    shutil.rmtree(root / "run" / "leases")  # what they say of this very process, which would have ended by now
    (root / "run" / "lease.json").unlink()
    result = drive(request)
    assert (result.status, result.applied_steps) == ("completed", 40)
    plain = drive(nano("plain", training=TRAINING))
    assert result.weights_digest == plain.weights_digest
