"""Observing the machine at the edge: everything that the doctor decides on, and no decision.

No torch in this process: CUDA is asked in a process of its own, so that the caller stays able to fork.
"""

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mem_core.domain.environment import AcceleratorObservation, DeviceReading, HolderObservation, MachineObservations
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.machine import store as machine_store
from mem_core.infrastructure.machine.build import observe_build
from mem_core.infrastructure.machine.cgroups import cpu_quota, memory_cgroups, pids_left
from mem_core.infrastructure.machine.memory_probe import address_space_rlimits, available_bytes, file_size_rlimit
from mem_core.infrastructure.settings import RUN_FOLDER_VARIABLE, Settings, child_environment
from mem_core.infrastructure.storage.reading import RECORD_LIMIT_BYTES, read_regular, read_regular_text

_PACKAGES = ("torch", "deepspeed", "transformers", "prefect", "numpy", "mem")
_VECTOR_FLAGS = ("avx", "amx", "asimd", "sve")
_CUDA_LIMIT_S = 120.0
_NOT_COMPILED = "Torch not compiled with CUDA enabled"  # torch's own words
_CUDA_PROGRAM = """
import json, torch
try:
    torch.cuda.init()
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        devices.append(dict(name=properties.name, total_bytes=total, free_bytes=free, capability=f"{properties.major}.{properties.minor}",
                            bfloat16=properties.major >= 8))
    answer = dict(available=bool(devices), devices=devices, reason="" if devices else "torch counts no device",
                  nccl=torch.distributed.is_available() and torch.distributed.is_nccl_available())
except Exception as error:
    answer = dict(available=False, reason=f"{type(error).__name__}: {error}")
print(json.dumps(answer))
"""


def observe_machine(
    request: RuntimeRequest,
    settings: Settings,
    *,
    probe_remote: machine_store.StoreProbe | None = None,
    run_root: Path | None = None,
    holder_of: Callable[[Path], HolderObservation | None] = lambda run_folder: None,
    load_ops: bool = False,
    root: Path = Path("/"),
) -> MachineObservations:
    """Look at everything once; takes well under a second on a CPU build of torch, plus the time of a remote probe.

    `run_root` is the local folder that holds run folders (default: the store itself, or nothing when that is remote);
    `holder_of` tells who holds a run folder (leases are the state manager's business);
    `load_ops` opens compiled ops in a process of its own; `root` stands in for `/` in tests. Changes nothing.
    """
    store = request.store
    remote = machine_store.is_remote(store)
    live_root = run_root if run_root is not None else None if remote else machine_store.local_path(store)
    run_folder = live_root / request.run_id if live_root is not None else None
    endpoint = _endpoint(store, settings)
    environ = child_environment(settings, device="cpu" if request.device == "cpu" else "cuda")
    probe = probe_remote or (lambda url: machine_store.probe_url(url, settings.storage_options(url)))
    return MachineObservations(
        num_cores=usable_cores(root),
        cpu_flags=cpu_flags(root),
        cpu=cpu_kind(root),
        versions=package_versions(),
        accelerator=observe_accelerator(request.device, environ),
        host_limits=host_limits(root),
        address_space_limits=address_space_rlimits("self", root),
        pids_left=pids_left("self", root),
        store=machine_store.observe_store(store, probe, endpoint),
        mirror=machine_store.observe_mirror(request.checkpoint.mirror, probe),
        store_folder=machine_store.observe_folder(live_root) if live_root is not None else None,
        home=str(settings.mem_home),
        home_problem=machine_store.probe_folder(settings.mem_home),
        shared_memory=machine_store.observe_folder(root / "dev" / "shm") if (root / "dev" / "shm").is_dir() else None,
        build=observe_build(settings.torch_extensions_dir, environ, load=load_ops),
        holder=holder_of(run_folder) if run_folder is not None else None,
        saved=machine_store.observe_saved(run_folder) if run_folder is not None else None,
        file_size_limit_bytes=file_size_rlimit("self", root),
        leftovers=machine_store.find_leftovers(run_folder, RUN_FOLDER_VARIABLE, root) if run_folder is not None else (),
        stale_rank_variables=settings.stale_rank_variables,
        has_mlflow=find_spec("mlflow") is not None,
    )


def host_limits(root: Path = Path("/")) -> dict[str, int]:
    """Resident bytes that may still be taken under each limit: MemAvailable and every control group on the way up."""
    limits = {level.name: level.headroom_bytes for level in memory_cgroups("self", root) if level.headroom_bytes is not None}
    return {"MemAvailable": available_bytes(root), **limits}


def usable_cores(root: Path = Path("/")) -> int:
    """Cores by affinity and by the control group's CPU quota, rounded up; at least 1."""
    quota = cpu_quota("self", root)
    affinity = len(os.sched_getaffinity(0))
    return max(1, affinity if quota is None else min(affinity, math.ceil(quota)))


def cpu_flags(root: Path = Path("/")) -> tuple[str, ...]:
    """Feature flags of the first CPU that is listed."""
    return tuple(_cpu_fact(root, "flags", "Features").split())


def cpu_kind(root: Path = Path("/")) -> str:
    """Name of the first CPU and its vector instructions, which decide the bits of a sum: `AMD EPYC 7B13 (avx avx2)`; empty where nothing
    tells."""
    name = _cpu_fact(root, "model name", "CPU part")
    vectors = " ".join(sorted(flag for flag in cpu_flags(root) if flag.startswith(_VECTOR_FLAGS)))
    return f"{name} ({vectors})" if vectors else name


def _cpu_fact(root: Path, *names: str) -> str:
    """What the kernel says of the first CPU under one of these names; empty where it says nothing."""
    try:
        lines = read_regular(root / "proc" / "cpuinfo", RECORD_LIMIT_BYTES).decode("ascii", "replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")


def package_versions() -> dict[str, str]:
    """Versions of what decides a run's behaviour; packages that are missing are left out. Imports none of them."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def observe_accelerator(device: str, environ: Mapping[str, str]) -> AcceleratorObservation:
    """What torch says about CUDA, asked in a process of its own unless the answer is known without.

    `device: cpu` asks nothing; a torch that was built without CUDA is recognised by its version file.
    """
    if device == "cpu":
        return AcceleratorObservation(available=False, reason="not asked for")
    if _built_without_cuda():
        return AcceleratorObservation(available=False, reason=_NOT_COMPILED)
    command = [sys.executable, "-c", _CUDA_PROGRAM]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CUDA_LIMIT_S, env=dict(environ), check=False)
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return AcceleratorObservation(available=False, reason=f"torch.cuda did not answer within {_CUDA_LIMIT_S:.0f} s")
    except (OSError, ValueError, IndexError):
        return AcceleratorObservation(available=False, reason="torch could not be imported or died while it looked for CUDA")
    return AcceleratorObservation(
        available=answer["available"],
        reason=answer.get("reason", ""),
        devices=tuple(DeviceReading(**reading) for reading in answer.get("devices", ())),
        nccl=answer.get("nccl", False),
    )


def _built_without_cuda() -> bool:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        lines = read_regular_text(Path(spec.origin).parent / "version.py", RECORD_LIMIT_BYTES).splitlines()
    except OSError:
        return False
    return any(line.startswith("cuda") and line.rpartition("=")[2].strip() == "None" for line in lines)


def _endpoint(store: str, settings: Settings) -> str:
    """The effective S3 endpoint and the variable that it came from, for the report."""
    if not store.startswith(("s3://", "s3a://")):
        return ""
    url = settings.s3_endpoint_url
    return f"{url} ({settings.s3_endpoint_source})" if url else settings.s3_endpoint_source
