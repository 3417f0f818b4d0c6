"""What the run is made of: versions, DeepSpeed's ops and their locks, raw DeepSpeed keys, leftovers in the environment."""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, cast

from mem_core.core.doctor.memory import Device
from mem_core.domain.environment import EngineObservation, Finding, MachineObservations
from mem_core.domain.request import RuntimeRequest

TESTED_VERSIONS = {"torch": "2.13.", "deepspeed": "0.19.", "transformers": "5.24.", "prefect": "3.9."}
"""The releases of constraints.txt, which every test runs with; what else `pyproject.toml` allows is tried at its ends alone."""
_ENGINE = ("torch", "deepspeed")


class KeyRule(NamedTuple):
    """A raw DeepSpeed key that cannot work, or breaks a promise, on some device. `value` None means any set value."""

    key: str
    value: object
    devices: tuple[Device, ...]
    why: str


_CPU: tuple[Device, ...] = ("cpu",)
_BOTH: tuple[Device, ...] = ("cpu", "cuda")
# Matched by name at any depth, since users paste configurations from many DeepSpeed versions.
KEY_RULES = (
    KeyRule("device", "nvme", _BOTH, "offload to NVMe needs async_io and is not part of MEM's checkpoints"),
    KeyRule("offload_optimizer", None, _BOTH, "belongs to MEM: use parallel.offload_optimizer"),
    KeyRule("offload_param", None, _BOTH, "is not supported: parameters would be outside MEM's checkpoints"),
    KeyRule("aio", None, _CPU, "async_io serves offload to NVMe only"),
    KeyRule("overlap_comm", True, _CPU, "overlapping needs CUDA streams"),
    KeyRule("amp", None, _CPU, "needs apex and CUDA"),
    KeyRule("fp16", None, _CPU, "half precision does not train on a CPU: use model.dtype"),
    KeyRule("fused", True, _CPU, "the fused optimizer is a CUDA kernel"),
    KeyRule("cpu_offload", True, _CPU, "there is nothing to offload from"),
    KeyRule("cpu_checkpointing", True, _CPU, "there is nothing to offload from"),
    KeyRule("sparse_attention", None, _CPU, "needs triton and CUDA"),
    KeyRule("hybrid_engine", None, _CPU, "needs CUDA inference kernels"),
    KeyRule("graph_harvesting", True, _CPU, "needs CUDA graphs"),
    KeyRule("communication_data_type", "fp16", _CPU, "gloo does not reduce float16 well"),
    KeyRule("autotuning", None, _BOTH, "changes the batch by itself; MEM sizes micro-batches"),
    KeyRule("tensor_parallel", None, _BOTH, "is not supported: ranks are data-parallel"),
    KeyRule("pipeline", None, _BOTH, "is not supported: ranks are data-parallel"),
    KeyRule("progressive_layer_drop", None, _BOTH, "makes a step depend on more than its batch index"),
)


def version_findings(seen: MachineObservations) -> tuple[Finding, ...]:
    """The stack, and whether it is the one that MEM was tested with."""
    missing = [name for name in _ENGINE if not seen.versions.get(name)]
    if missing:
        return (
            Finding(
                check="versions",
                severity="failure",
                observed=f"{', '.join(missing)} not installed",
                needed=", ".join(f"{name} {TESTED_VERSIONS[name]}x" for name in missing),
                remedy="Install MEM again with its constraints file.",
                exit_code=69,
            ),
        )
    other = [name for name, tested in TESTED_VERSIONS.items() if seen.versions.get(name) and not seen.versions[name].startswith(tested)]
    listed = ", ".join(f"{name} {version}{_tested_words(name, other)}" for name, version in sorted(seen.versions.items()))
    if not other:
        return (Finding(check="versions", severity="ok", observed=listed),)
    return (
        Finding(
            check="versions",
            severity="warning" if set(other) & set(_ENGINE) else "notice",
            observed=listed,
            needed=", ".join(f"{name} {TESTED_VERSIONS[name]}x" for name in other),
            remedy="MEM relies on measured behaviour of these versions, and digests are promised per version; run its tests before "
            "you trust others.",
        ),
    )


def _tested_words(name: str, other: Collection[str]) -> str:
    if name not in TESTED_VERSIONS:
        return ""
    return " (not tested)" if name in other else " (tested)"


def build_findings(request: RuntimeRequest, seen: MachineObservations, device: Device) -> tuple[Finding, ...]:
    """Can what this request compiles be compiled; would a lock make every start wait for ever."""
    build = seen.build
    problems = [
        *([] if build.folder_writable else [f"{build.folder} cannot be written"]),
        *([] if build.compiler and not build.compiler_problem else [f"no C++ compiler: {build.compiler_problem or 'not found'}"]),
        *([] if build.ninja and not build.ninja_problem else [f"no ninja: {build.ninja_problem or 'not found'}"]),
    ]
    findings = [_toolchain_finding(request, seen, problems, device)]
    if build.broken_ops:
        findings.append(
            Finding(
                check="ops.broken",
                severity="warning",
                observed=f"built and not loadable: {'; '.join(build.broken_ops)}",
                remedy=f"The prepare step builds them again; if that does not help, delete {build.folder}.",
            )
        )
    findings += [_lock_finding(lock.path, lock.age_s, lock.reason, stale=lock.stale) for lock in build.locks]
    return tuple(findings)


def _toolchain_finding(request: RuntimeRequest, seen: MachineObservations, problems: list[str], device: Device) -> Finding:
    """A compiler is needed for torch.compile and for raw keys that ask for an op; MEM's own engine loads none."""
    build, wanted = seen.build, ["model.compile: on"] if request.model.compile == "on" else []
    wanted += ["deepspeed.aio"] if "aio" in request.deepspeed else []
    if problems:
        possible = bool(wanted) or request.model.compile == "auto"
        severity = "failure" if wanted else "warning" if possible else "ok"
        return Finding(
            check="build_tools",
            severity=severity,
            observed="; ".join(problems),
            needed=f"a compiler, ninja and a writable folder on {device} for {', '.join(wanted) or 'torch.compile, if it is chosen'}",
            remedy="Install g++ and ninja (or set CXX), set MEM_HOME to a folder that you may write, or use model.compile: off.",
            exit_code=69 if wanted else 0,
        )
    ops = f"; ops built: {', '.join(build.built_ops)}" if build.built_ops else ""
    return Finding(check="build_tools", severity="ok", observed=f"{build.compiler}, ninja {build.ninja}{ops}")


def _lock_finding(path: str, age_s: float, reason: str, *, stale: bool) -> Finding:
    """A builder that was killed leaves `lock` behind, and DeepSpeed waits for it without a word."""
    if stale:
        remedy = "The prepare step removes it; or delete the file yourself."
        return Finding(check="ops.lock", severity="warning", observed=f"stale lock {path}: {reason}", remedy=remedy)
    observed = f"{path} is {age_s:.0f} s old; another build seems to run ({reason})"
    return Finding(check="ops.lock", severity="notice", observed=observed, remedy="The prepare step waits for it within its deadline.")


def deepspeed_key_findings(request: RuntimeRequest, device: Device) -> tuple[Finding, ...]:
    """Every raw DeepSpeed key that is of no use on this device, named by its path."""
    unusable = [
        f"deepspeed.{path}: {rule.why}"
        for path, key, value in walk_keys(request.deepspeed)
        for rule in KEY_RULES
        if rule.key == key and device in rule.devices and _is_set(value) and (rule.value is None or rule.value == value)
    ]
    if not unusable:
        return ()
    return (
        Finding(
            check="deepspeed",
            severity="failure",
            observed="; ".join(unusable),
            needed=f"keys that work on {device}",
            remedy="Remove these keys from the deepspeed section.",
            exit_code=69,
        ),
    )


def _is_set(value: object) -> bool:
    """Keys that are off (`false`, null, {enabled: false}, device: none) do no harm."""
    if isinstance(value, dict):
        section = cast("dict[str, Any]", value)
        return section.get("enabled", True) is not False and section.get("device", "") not in ("none", None)
    return value not in (None, False, "none", [], {})


def walk_keys(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """(dotted path, key, value) of every key at any depth."""
    for key, value in config.items():
        path = f"{prefix}{key}"
        yield path, key, value
        if isinstance(value, dict):
            yield from walk_keys(cast("dict[str, Any]", value), f"{path}.")


def engine_findings(seen: EngineObservation | None) -> tuple[Finding, ...]:
    """What the libraries themselves say of model and configuration, before any process trains."""
    if seen is None:
        return ()
    if seen.unknown:
        observed = f"model and configuration were not tried: {seen.unknown}"
        remedy = "Training will tell; look at the machine's load if this comes again."
        return (Finding(check="engine", severity="notice", observed=observed, remedy=remedy),)
    if seen.died:
        observed = f"a process with the engine's libraries ended at once: {seen.died}"
        remedy = "Mend the installation, or the environment variable that breaks it (PYTHONOPTIMIZE, PYTHONPATH)."
        return (Finding(check="engine", severity="failure", observed=observed, remedy=remedy, exit_code=69),)
    found = [
        Finding(
            check=problem.field,
            severity="failure",
            observed=problem.problem,
            needed=problem.bound,
            remedy=problem.remedy,
            exit_code=problem.exit_code,
        )
        for problem in seen.problems
    ]
    if seen.attention == "eager":
        found.append(
            Finding(
                check="model.attention",
                severity="notice",
                observed=f"{seen.architecture} has no fused attention kernel: plain operations are used, which need more memory and time",
                remedy="Nothing is to be done; a shorter data.sequence_length helps most where memory is short.",
            )
        )
    if seen.left_out:
        found.append(
            Finding(
                check="model.lora",
                severity="notice",
                observed=f"no adapter fits on weights of three dimensions, as experts are: {', '.join(seen.left_out)}",
                remedy="Nothing is to be done where the other layers suffice; with model.lora null they are trained.",
            )
        )
    return tuple(found)


def environment_findings(seen: MachineObservations) -> tuple[Finding, ...]:
    """Rank variables of a dead run, which workers never see."""
    if not seen.stale_rank_variables:
        return ()
    return (
        Finding(
            check="rank_variables",
            severity="notice",
            observed=f"set in this environment and ignored: {', '.join(seen.stale_rank_variables)}",
            remedy="MEM sets its own; unset them to silence this.",
        ),
    )
