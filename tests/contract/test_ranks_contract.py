"""One contract, every adapter of `Ranks`: processes of this machine, forked from one warm server."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mem_core.runtime.ranks.local.processes import ForkServer
from mem_core.runtime.ranks.local.ranks import LocalRanks
from mem_core.testing.contracts.ranks_contract import RanksContract, RanksOf

LIMIT_S = 5.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """A fork server with nothing heavy imported."""
    server = ForkServer.start(dict(os.environ), tmp_path_factory.mktemp("logs"), preload=("mem_core.testing.scripted_rank",))
    yield server
    server.close()


class TestLocalRanks(RanksContract):
    @pytest.fixture
    def ranks_of(self, server: ForkServer, tmp_path: Path) -> RanksOf:
        return lambda entry: LocalRanks(server, tmp_path / "live", f"mem_core.testing.scripted_rank:{entry}")

    @pytest.fixture
    def nothing_left(self, server: ForkServer, tmp_path: Path) -> Callable[[], bool]:
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children")

        def look() -> bool:
            end = time.monotonic() + LIMIT_S
            while children.read_text().split() and time.monotonic() < end:
                time.sleep(0.01)
            return not children.read_text().split() and not (tmp_path / "live").exists()

        return look
