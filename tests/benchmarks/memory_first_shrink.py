"""Is the limit met before it is hit? One document 50 times as long as the others at step 150 of 200, under a real RLIMIT_AS.

For each seed four runs: without a limit, adaptive under the limit, a twin without a limit that replays the recorded splits, and
`mode: fixed` under the same limit, which shows that the limit bites. Prints one JSON object; the claim is that the first shrink comes
before any allocation fails (`ooms_absorbed` 0) in at least 9 of 10 seeds, and that every run completes with the weights that it has
without a limit (norm-wise 1e-5), and with those of its twin to the bit.

    python tests/benchmarks/memory_first_shrink.py [--seeds 10] [--headroom-mib 200] [--model preset:llama-nano]
"""

import argparse
import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from measuring import parsed

from mem_core.core.run.state_manager import read_journal
from mem_core.domain.errors import MemError, MemoryExhausted
from mem_core.domain.events import MemoryPlanChanged, Noted, OomAbsorbed
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.infrastructure.settings import Settings, child_environment
from mem_core.runtime.data.serving.order import sample_ids
from mem_core.runtime.ranks.local.processes import ForkServer
from mem_core.testing.driver import drive
from mem_core.testing.memory_faults import limit_address_space
from mem_core.testing.ports import distance, recorded, replaying, with_port

MIB = 2**20
STEPS, LONG_STEP, ROWS = 200, 150, 32
USUAL, TIMES = 20, 50  # tokens of a usual row, and how much longer the long one is; a byte is a token, and one ends the row
LENGTH = 1_024


def documents(path: Path, seed: int) -> None:
    """As many rows as the run reads, all of the usual length but one: that which the run's own order gives to batch `LONG_STEP`."""
    total = STEPS * ROWS
    place = int(sample_ids(seed, LONG_STEP, ROWS, total)[seed % ROWS])
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 10**9, size=total)
    with path.open("w") as file:
        for number in range(total):
            size = (USUAL * TIMES if number == place else USUAL) - 1
            text = f"{words[number]} lines of text and more of it ".ljust(32) * (size // 32 + 1)
            file.write(json.dumps({"text": text[:size]}) + "\n")


def request_of(store: Path, run_id: str, seed: int, model: str, **memory: Any) -> RuntimeRequest:
    """Two hundred steps in four segments; all rows of a batch in one pass unless memory says otherwise."""
    return RuntimeRequest.model_validate(
        {
            "run_id": run_id, "store": str(store), "device": "cpu", "model": {"source": model},
            "data": {"train": [str(store / "rows.jsonl")], "validation": None, "sequence_length": LENGTH, "packing": False},
            "training": {"max_steps": STEPS, "segment_steps": STEPS // 4, "global_batch_size": ROWS, "warmup_steps": 10, "seed": seed},
            "memory": memory,
        }
    )  # fmt: skip


def first_event(result: RunResult) -> str:
    """Which came first: a smaller plan, or an allocation that failed."""
    for line in read_journal(Path(result.run_folder) / "journal"):
        if isinstance(line.event, OomAbsorbed):
            return "failed allocation"
        if isinstance(line.event, MemoryPlanChanged):
            return "failed allocation" if line.event.change.failed_tokens else "shrink"
    return "neither"


def control(request: RuntimeRequest, headroom_bytes: int, server: ForkServer) -> dict[str, Any]:
    """The same run with adaptation off: the exit code it dies with and where."""
    try:
        result = drive(request, options=with_port(partial(limit_address_space, headroom_bytes=headroom_bytes)), server=server)
    except MemoryExhausted as exc:
        return {"died": True, "exit_code": exc.exit_code, "problem": str(exc)[:200]}
    except MemError as exc:
        return {"died": False, "exit_code": exc.exit_code, "problem": str(exc)[:200]}
    return {"died": False, "exit_code": 0, "problem": f"completed {result.applied_steps} steps"}


def measure(seed: int, arguments: argparse.Namespace, server: ForkServer) -> dict[str, Any]:
    """The four runs of one seed."""
    headroom_bytes = arguments.headroom_mib * MIB
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder)
        documents(store / "rows.jsonl", seed)
        ask = partial(request_of, store, seed=seed, model=arguments.model)
        free = drive(ask("free"), server=server)
        try:
            result = drive(ask("limited"), options=with_port(partial(limit_address_space, headroom_bytes=headroom_bytes)), server=server)
        except MemError as exc:
            return {"seed": seed, "completed": False, "ooms_fatal": 1, "ooms_absorbed": None, "problem": str(exc)[:300]}
        # with room to spare an adaptive twin would grow after a calm time
        twin = drive(ask("twin", mode="fixed"), options=replaying(recorded(result)), server=server)
        return {
            "seed": seed,
            "completed": result.status == "completed" and result.applied_steps == STEPS,
            "ooms_absorbed": result.ooms_absorbed,
            "ooms_fatal": result.ooms_fatal,
            "restarts": result.restarts,
            "first": first_event(result),
            "changes": [f"batch {change['batch_index']}: {change['reason']}"[:160] for change in result.memory.plan_changes],
            "notes": notes(result),
            "same_tokens": result.tokens == free.tokens,
            "distance": distance(result, free),
            "equals_twin": (twin.weights_digest, twin.trajectory_digest) == (result.weights_digest, result.trajectory_digest),
            "fixed": control(ask("fixed", mode="fixed"), headroom_bytes, server),
        }


def notes(result: RunResult) -> list[str]:
    """What the journal says of memory beside plans."""
    events = [line.event for line in read_journal(Path(result.run_folder) / "journal")]
    return [event.text[:300] for event in events if isinstance(event, Noted) and "memory" in event.text]


def summary(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """The claims of the issue, counted."""
    done = [seed for seed in seeds if seed["completed"]]
    return {
        "seeds": len(seeds),
        "completed": len(done),
        "shrunk_before_any_failure": sum(seed["ooms_absorbed"] == 0 and seed["first"] == "shrink" for seed in done),
        "ooms_fatal": sum(seed["ooms_fatal"] for seed in seeds),
        "fixed_died": sum(seed["fixed"]["died"] for seed in done),
        "equal_to_twin": sum(seed["equals_twin"] for seed in done),
        "same_tokens": sum(seed["same_tokens"] for seed in done),
        "largest_distance": max((seed["distance"] for seed in done), default=None),
    }


def main() -> None:
    """Run every seed and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--headroom-mib", type=int, default=200)
    parser.add_argument("--model", default="preset:llama-nano")
    arguments = parsed(parser, seeds=1)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        server = ForkServer.start(child_environment(Settings.from_environment(), device="cpu"), Path(folder))
        try:
            seeds = [measure(seed, arguments, server) for seed in range(arguments.seeds)]
        finally:
            server.close()
    answer = summary(seeds) | {
        "headroom_mib": arguments.headroom_mib, "model": arguments.model, "minutes": round((time.monotonic() - started_s) / 60, 1),
        "load": [round(value, 2) for value in os.getloadavg()], "each": seeds,
    }  # fmt: skip
    print(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
