"""A run without Prefect in a process of its own, to be killed: `python drive_child.py OWNER_PID REQUEST.json`. Prints the result."""

import os
import sys
from pathlib import Path

from mem_core.domain.errors import MemError
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.machine.process_ties import die_with_parent
from mem_core.testing.driver import drive


def main(owner_pid: str, path: str) -> int:
    """Drive the request to its end; the exit code of DESIGN §9."""
    die_with_parent(int(owner_pid))
    try:
        result = drive(RuntimeRequest.model_validate_json(Path(path).read_text()))
    except MemError as exc:
        print(exc, file=sys.stderr)
        return exc.exit_code
    print(result.model_dump_json())
    return 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
