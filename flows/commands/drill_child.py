"""`mem train` as a drill starts it: it dies with the drill, and its ranks may be composed with a port for faults.

As a program: `python -m flows.commands.drill_child OWNER_PID ON_BUILT REQUEST.json`, ON_BUILT being "module:function" or empty.
"""

import os
import sys

from mem_core.infrastructure.machine.process_ties import die_with_parent


def main(argv: list[str]) -> int:
    """Train the request to its end; prints the result as JSON."""
    owner_pid, on_built, path = argv
    die_with_parent(int(owner_pid))
    from flows.commands.output import report_error
    from flows.commands.train import train
    from mem_core.domain.errors import MemError

    try:
        return train(path, [], as_json=True, on_built=on_built)
    except MemError as exc:
        return report_error(exc, as_json=True)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as the console script does: Prefect's exit handlers would wait for a server that is gone
