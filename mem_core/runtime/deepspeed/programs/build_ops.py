"""Compile DeepSpeed's ops once, in a process of its own: `python -m mem_core.runtime.deepspeed.programs.build_ops NAME...`.

Prints one line per op, so that the caller can show what is being built. Run by the prepare step with a deadline; a worker
then only loads what is there.
"""

import sys
import time
from collections.abc import Collection


def ops_needed(deepspeed_keys: Collection[str]) -> tuple[str, ...]:
    """Builder names of the ops that an engine of MEM loads at birth.

    None by default: the optimizer is torch's fused AdamW, also when it is offloaded, ZeRO flattens with torch's own functions,
    and the all-reduce for CPU inference is left out. A raw `aio` key in the request asks for the asynchronous I/O op.
    """
    return ("AsyncIOBuilder",) if "aio" in deepspeed_keys else ()


def main(names: list[str]) -> int:
    """Build and load each op; the compiler's own words go to standard output."""
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
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
