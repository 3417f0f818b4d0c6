"""Programs that MEM starts import MEM, wherever somebody stands who has folders of the same names."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULE = re.compile(r'sys\.executable,\s*(?:#[^\n]*\n\s*)?"-m"')


def test_every_module_that_is_started_is_looked_for_among_installed_ones_only() -> None:
    """`-m` without `-P` puts the current folder first: a user's own `flows/` would be run in place of MEM's."""
    files = [path for folder in ("flows", "tasks", "mem_core") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    assert [path.relative_to(ROOT).as_posix() for path in files if MODULE.search(path.read_text())] == []
