"""Places of ranks on this machine: they meet in a file of their try's folder, so that no port is taken or left behind."""

from pathlib import Path
from typing import Literal

from mem_core.runtime.ranks.place import Meeting, RankPlace


def local_place(folder: Path, device: Literal["cpu", "cuda"], rank: int, num_ranks: int) -> RankPlace:
    """The place of one of `num_ranks` ranks that all stand on this machine, with a device each; `folder` is their try's own."""
    meeting = Meeting(init_method=f"file://{folder / 'rendezvous'}", master_address="127.0.0.1", master_port=0, interface="lo")
    return RankPlace(
        rank=rank,
        num_ranks=num_ranks,
        local_rank=rank,
        device="cpu" if device == "cpu" else f"cuda:{rank}",
        meeting=meeting,
        heartbeat_path=str(folder / f"rank-{rank}.heartbeat"),
        board_path=str(folder / "board"),
    )
