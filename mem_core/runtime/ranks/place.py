"""Where one rank of a run stands. What the run is, the same for all of its ranks, is `WorkerSpec`; a rank is given both.

A place is made complete by whoever starts the rank, and nothing of it is learned or changed later.
"""

from dataclasses import dataclass
from typing import Literal

from mem_core.domain.errors import InternalError


@dataclass(frozen=True, slots=True)
class Meeting:
    """How the ranks of one try find each other.

    `init_method` is the URL that torch's process group is given: its scheme says through what the ranks meet. `master_address` and
    `master_port` are for libraries that know only these two; `interface` is the network device that collectives use.
    """

    init_method: str
    master_address: str
    master_port: int
    interface: str


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank's number, device, meeting point and files.

    `rank` counts over all machines, `local_rank` on its own machine; `device` is the only one that it computes on: `cpu`, or
    `cuda:N`. The paths are of files on the rank's own machine that whoever watches it has made or reads.
    """

    rank: int
    num_ranks: int
    local_rank: int
    device: str
    meeting: Meeting
    heartbeat_path: str
    board_path: str

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_ranks:
            raise _impossible("rank", self.rank, f"0 to {self.num_ranks - 1}")
        if self.local_rank < 0:
            raise _impossible("local_rank", self.local_rank, "0 or more")
        # DeepSpeed derives the device from LOCAL_RANK alone: any other index would put its buffers on another device.
        if self.device not in ("cpu", f"cuda:{self.local_rank}"):
            raise _impossible("device", self.device, f"cpu or cuda:{self.local_rank}")

    @property
    def device_kind(self) -> Literal["cpu", "cuda"]:
        """The device without its number."""
        return "cpu" if self.device == "cpu" else "cuda"


def _impossible(field: str, value: object, bound: str) -> InternalError:
    return InternalError("a rank cannot stand there", field=field, value=value, bound=bound, remedy="Report this as a bug.")
