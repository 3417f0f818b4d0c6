"""Files that come with MEM beside its packages: deployments, automations, the quickstart."""

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

BESIDE = Path(__file__).parents[2] / "deployments"
SHARE = "share/mem/deployments"


def shipped(name: str) -> Path:
    """Where `deployments/NAME` lies: in the repository for who works there, else where the wheel put it.

    A file that is nowhere gives the path in the repository, whose reader then says what is missing.
    """
    beside = BESIDE / name
    if beside.is_file() and (BESIDE.parent / "pyproject.toml").is_file():  # not whatever else is called so among installed packages
        return beside
    try:
        recorded = files("mem") or ()
    except PackageNotFoundError:
        recorded = ()
    for file in recorded:
        if file.as_posix().endswith(f"{SHARE}/{name}"):
            return Path(str(file.locate())).resolve()
    return beside
