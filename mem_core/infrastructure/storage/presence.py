"""Whether a local store is still where a run took it: moved away, unmounted or removed under the run it is waited for, within bounds.

Two things look alike from here and are treated alike: the store's root is gone, or the run's own folder is (an empty mount point looks so
too). Either way the claim, the record and the lease have gone with it, so that nothing here may be made anew: it waits, and then gives up.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mem_core.domain.errors import StoreUnavailable

POLL_S = 0.2


@dataclass(frozen=True)
class Patience:
    """How long a store that went away is waited for, and who is told that it is."""

    limit_s: float = 60.0
    say: Callable[[str], None] = lambda text: None


class StorePresence:
    """Looks at one file that only the holder of the run can have made. Safe for several threads."""

    def __init__(self, path: Path, patience: Patience) -> None:
        self._path, self._patience = path, patience
        self._inode: int | None = None
        self._lock = threading.Lock()
        self._gave_up = False

    def remember(self) -> None:
        """The file was just made: this very one is looked for from now on."""
        self._inode = self._path.stat().st_ino

    def here(self) -> bool:
        """Whether the file is there. Another one of that name (somebody began the run anew where the store was) does not count.

        The number of the device does not count either: a file system that was mounted again may have another one.
        """
        try:
            return self._inode is None or self._path.stat().st_ino == self._inode
        except OSError:
            return False

    def wait(self) -> None:
        """Return when it is there. A wait that ran out is not waited again: the next call says so at once, until it is back.

        Raises:
            StoreUnavailable: it did not come back in time.
        """
        if self.here():
            return
        with self._lock:
            end_s = time.monotonic() + (0.0 if self._gave_up else self._patience.limit_s)
            if not self._gave_up and not self.here():
                self._patience.say(f"the store is gone ({self._path} is not there): waiting up to {self._patience.limit_s:.0f} s for it")
            while not self.here():
                if time.monotonic() >= end_s:
                    self._gave_up = True
                    raise StoreUnavailable(
                        f"the store went away under the run and did not come back within {self._patience.limit_s:.0f} s",
                        field="store",
                        value=self._path.parent.parent,
                        remedy="Bring it back where it was, then give the same command again; nothing was made in its place.",
                    )
                time.sleep(POLL_S)
            self._gave_up = False
            self._patience.say("the store is back: going on")
