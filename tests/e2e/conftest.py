"""One Prefect server and one serving process for all tests that need them."""

from collections.abc import Iterator

import pytest
from prefect_site import Site


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server with `mem serve` beside it; about 15 s on a quiet machine."""
    with Site.open(tmp_path_factory.mktemp("site")) as opened:
        yield opened
