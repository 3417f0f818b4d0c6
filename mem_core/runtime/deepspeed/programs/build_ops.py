"""Compile DeepSpeed's ops once, in a process of its own: `python -m mem_core.runtime.deepspeed.programs.build_ops OWNER_PID NAME...`.

Prints one line per op, so that the caller can show what is being built. Run by the prepare step with a deadline (`build_watch`); a
worker then only loads what is there. Whatever ends the owner ends this process too, with ninja and every compiler below it: the
owner holds its standard input, and the kernel sends a signal when the owner dies.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Collection

from mem_core.infrastructure.machine.process_ties import die_with_parent

ROUNDS = 20  # a compiler that is just being started is met in the next one


def ops_needed(deepspeed_keys: Collection[str]) -> tuple[str, ...]:
    """Builder names of the ops that an engine of MEM loads at birth.

    None by default: the optimizer is torch's fused AdamW, also when it is offloaded, ZeRO flattens with torch's own functions,
    and the all-reduce for CPU inference is left out. A raw `aio` key in the request asks for the asynchronous I/O op.
    """
    return ("AsyncIOBuilder",) if "aio" in deepspeed_keys else ()


def main(argv: list[str]) -> int:
    """Build and load each op; the compiler's own words go to standard output."""
    end_with_owner(int(argv[0]))
    build(argv[1:])
    return 0


def end_with_owner(owner_pid: int) -> None:
    """End this process and all below it when the owner ends. Two signs, since each misses a case: a signal waits while a library
    is being loaded, and end of file does not come while a child of the owner's holds the other end."""
    signal.signal(signal.SIGTERM, lambda *_: _end_all())
    die_with_parent(owner_pid, signal.SIGTERM)
    threading.Thread(target=_await_owner, name="owner-watch", daemon=True).start()


def _await_owner() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1024):
            pass
    _end_all()


def _end_all() -> None:
    """SIGKILL for every process below; compilers stand in process groups of their own, so that a group would miss them."""
    import psutil

    for _ in range(ROUNDS):
        below = psutil.Process().children(recursive=True)
        if not below:
            break
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(below, timeout=0.5)
    os._exit(3)


def build(names: Collection[str]) -> None:
    """Build and load each op by the name of its builder."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    assert accelerator is not None, "DS_ACCELERATOR names one"
    for name in names:
        started_s = time.monotonic()
        print(f"building {name}", flush=True)
        builder = accelerator.create_op_builder(name)
        if builder is None:
            print(f"{name} is not offered on this accelerator", flush=True)
            continue
        builder.load()
        print(f"built {name} in {time.monotonic() - started_s:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
