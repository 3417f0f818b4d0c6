"""What older versions left behind, and what is recorded of it. A folder `v<manifest version>-<MEM version>` holds run folders and a
mirror that this version wrote; its README says how, and nothing in it is ever edited.

`python tests/frozen/frozen_versions.py FOLDER CONTINUED` records FOLDER/expected.json and FOLDER/fields.json; CONTINUED is the store in
which the same version went on with copies of the runs. Run it with the Python of that version: it needs numpy and nothing of MEM.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDERS = sorted(path.parent for path in HERE.glob("v*-*/expected.json"))
RUNS = ("one-rank", "two-ranks")
FROZEN_STEPS, CONTINUED_STEPS = 40, 60
# Where bits may differ (other versions, another CPU) the losses of the continued steps must still agree to this, relatively.
LOSS_TOLERANCE = 1e-4
# What a status says beside the run: where it lies, and shares of time, which may be divided in another way one day.
STATUS_ASIDE = frozenset({"run_folder", "report_url", "goodput", "tokens_per_s"})
# Values by name whose names are data (parameters, goodput buckets, limits of a machine) and no fields.
NAMED_VALUES = frozenset({"parameters", "seconds", "estimates_bytes", "limits_bytes"})
# The instructions that decide which kernels the numeric libraries take.
_KERNEL_FLAGS = re.compile(r"^(sse|ssse|avx|fma|f16c|amx)")


def copied(folder: Path, to: Path, *parts: str) -> Path:
    """A working copy of the store, the mirror or both; the frozen files themselves are never written to."""
    for part in parts:
        shutil.copytree(folder / part, to / part)
    return to


def continued_request(folder: Path, run: str, place: Path) -> list[str]:
    """The words after `mem train` that go on with a copied run: the same request, more steps, store and mirror in `place`."""
    changes = (f"training.max_steps={CONTINUED_STEPS}", f"store={place}/store", f"checkpoint.mirror=file://{place}/mirror")
    return [f"{folder.relative_to(ROOT)}/{run}.yaml", *(word for change in changes for word in ("--set", change))]


def machine_kind() -> dict[str, str]:
    """What the bits of a step depend on beside the run itself."""
    packages = {name: version(name) for name in ("torch", "deepspeed", "numpy", "transformers")}
    return {"python": f"{sys.version_info.major}.{sys.version_info.minor}", **packages, "cpu": _cpu_kind()}


def _cpu_kind() -> str:
    """Vendor, family and model, and the instructions that matter, as the kernel tells them; empty where it tells nothing."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.split("\n\n", 1)[0].splitlines())}
    flags = sorted(flag for flag in facts.get("flags", "").split() if _KERNEL_FLAGS.match(flag))
    return " ".join([*(facts.get(key, "?") for key in ("vendor_id", "cpu family", "model")), *flags])


# 0.1.0 measured it over the first 16 batches of the held-out rows; since then all of them count. It is no part of what a run is.
MEASURED_OTHERWISE = {"validation_loss"}


def ending(run_folder: Path) -> dict[str, Any]:
    """How a run stands: its digests, and the loss of each step beyond the frozen ones (to 17 digits, as they lie there)."""
    result = json.loads((run_folder / "result.json").read_text())
    names = ("status", "applied_steps", "tokens", "trajectory_digest", "weights_digest", "loss_last", "validation_loss")
    losses: list[float] = []
    for path in sorted((run_folder / "metrics").glob("step-*.npz")):
        columns = np.load(path)
        losses += columns["loss"][columns["step"] > FROZEN_STEPS].tolist()
    return {name: result[name] for name in names} | {"losses": losses}


def deviations(expected: Mapping[str, Any], now: Mapping[str, Any], *, to_the_bit: bool) -> list[str]:
    """Where an ending is not the expected one. Empty: it is the same run."""
    exact = set(expected) - MEASURED_OTHERWISE if to_the_bit else {"status", "applied_steps", "tokens"}
    found = [f"{name}: {now[name]} for {expected[name]}" for name in sorted(exact) if now[name] != expected[name]]
    if len(now["losses"]) != len(expected["losses"]):
        return [*found, f"{len(now['losses'])} continued steps for {len(expected['losses'])}"]
    pairs = enumerate(zip(now["losses"], expected["losses"], strict=True), start=FROZEN_STEPS + 1)
    return found + [f"loss of step {step}: {a} for {b}" for step, (a, b) in pairs if not abs(a - b) <= LOSS_TOLERANCE * abs(b)]


def key_paths(value: Any, prefix: str = "") -> Iterator[str]:
    """`a`, `a.b`, `c[].d` of a JSON value: every key at every depth, what lists hold under one name."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield prefix + key
            if key not in NAMED_VALUES:
                yield from key_paths(inner, f"{prefix}{key}.")
    elif isinstance(value, list):
        for inner in value:
            yield from key_paths(inner, f"{prefix.removesuffix('.')}[].")


def lost(before: Any, now: Any, place: str = "") -> list[str]:
    """What is in `before` and is not, or not the same, in `now`, which may hold more keys."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        missing = [f"{place}.{key} is missing" for key in before if key not in now]
        return missing + [text for key in before if key in now for text in lost(before[key], now[key], f"{place}.{key}")]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return [text for index, pair in enumerate(zip(before, now, strict=True)) for text in lost(*pair, f"{place}[{index}]")]
    return [] if before == now else [f"{place}: {now!r} for {before!r}"]


def journal_events(run_folder: Path) -> list[dict[str, Any]]:
    """Every line of a journal, as plain JSON, in order."""
    paths = sorted((run_folder / "journal").glob("attempt-*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def persisted_fields(store: Path, mirror: Path) -> dict[str, list[str]]:
    """File or kind of event -> the fields found in it, over all runs of a store and their mirror."""
    found: dict[str, set[str]] = {}
    for kind, pattern in (
        ("run.json", "*/run.json"),
        ("run.sealed.json", "*/run.sealed.json"),
        ("lease.json", "*/lease.json"),
        ("result.json", "*/result.json"),
        ("manifest.json", "*/checkpoints/*/manifest.json"),
        ("verdict.json", "*/checkpoints/*/verdict.json"),
    ):
        _add(found, kind, store.glob(pattern))
    for kind, pattern in (
        ("mirror: run.json", "*/run.json"),
        ("mirror: manifest.json", "*/checkpoints/*/*/manifest.json"),
        ("mirror: attempt", "*/attempts/*.json"),
        ("mirror: mark", "*/marks/*.json"),
    ):
        _add(found, kind, mirror.glob(pattern))
    for folder in store.iterdir():
        for line in journal_events(folder):
            found.setdefault("journal line", set()).update(line)
            found.setdefault(f"event {line['event']['event']}", set()).update(key_paths(line["event"]))
    for path in store.glob("*/metrics/*.npz"):
        found.setdefault("metrics columns", set()).update(np.load(path).files)
    return {kind: sorted(fields) for kind, fields in sorted(found.items())}


def _add(found: dict[str, set[str]], kind: str, paths: Iterator[Path]) -> None:
    for path in paths:
        found.setdefault(kind, set()).update(key_paths(json.loads(path.read_text())))


def _status_of(run_folder: Path) -> dict[str, Any]:
    command = [str(Path(sys.executable).with_name("mem")), "status", str(run_folder), "--json"]
    told = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return {name: value for name, value in told.items() if name not in STATUS_ASIDE}


def _record(folder: Path, continued: Path) -> None:
    place = Path("PLACE")
    expected = {
        "machine": machine_kind(),
        "commands": {run: shlex.join(["mem", "train", *continued_request(folder, run, place), "--json"]) for run in RUNS},
        "frozen": {run: ending(folder / "store" / run) for run in RUNS},
        "continued": {run: ending(continued / run) for run in RUNS},
        "every_event": _status_of(folder / "every-event"),
    }
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    fields = persisted_fields(folder / "store", folder / "mirror")
    (folder / "fields.json").write_text(json.dumps(fields, indent=1) + "\n")


if __name__ == "__main__":
    _record(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
