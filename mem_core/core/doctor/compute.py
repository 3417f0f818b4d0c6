"""Where and how the run computes: device, number format, threads, batch arithmetic."""

from typing import Literal

from mem_core.core.compilation.rule import compilation_of
from mem_core.core.doctor.memory import Device, Dtype
from mem_core.domain.environment import Finding, MachineObservations, ModelNumbers
from mem_core.domain.request import RuntimeRequest

# Without these, bfloat16 on a CPU is emulated: SmolLM2-135M took 80 s instead of 7 s for a step.
CPU_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
# Below this the pieces of work are too small to share: a second thread waits more than it computes (8 x was seen).
SMALL_MODEL_PARAMETERS = 3_000_000
# A compiler for DeepSpeed's ops takes over a gigabyte and a handful of processes.
BUILD_JOB_BYTES = 3 * 2**29
BUILD_JOB_PIDS = 8


def choose_device(request: RuntimeRequest, seen: MachineObservations) -> tuple[Device, str, Finding]:
    """The device that will be used, why, and the finding that says so.

    Asked for CUDA where there is none, the answer is "cpu" with a failure (exit 80, `cuda_unavailable`): nothing ever
    trains on another device than the one asked for.
    """
    gpu = seen.accelerator
    if request.device == "cpu":
        reason = "asked for with device: cpu"
        return "cpu", reason, Finding(check="accelerator", severity="ok", observed=f"CPU, gloo; {reason}")
    if gpu.available and gpu.devices:
        names = ", ".join(sorted({device.name for device in gpu.devices}))
        reason = f"{len(gpu.devices)} x {names}"
        return "cuda", reason, _cuda_finding(request, seen, reason)
    reason = gpu.reason or "torch sees no CUDA device"
    if request.device == "cuda":
        finding = Finding(
            check="accelerator",
            severity="failure",
            observed=f"cuda_unavailable: {reason}",
            needed="device: cuda",
            remedy="Fix the driver or the torch build that the reason names, or ask for device: cpu or auto.",
            exit_code=80,
        )
        return "cpu", f"cuda_unavailable: {reason}", finding
    finding = Finding(
        check="accelerator",
        severity="notice",
        observed=f"TRAINING ON CPU with gloo, since device: auto found no CUDA device ({reason})",
        remedy="Ask for device: cuda to have this refused instead.",
    )
    return "cpu", f"auto: no CUDA device ({reason})", finding


def _cuda_finding(request: RuntimeRequest, seen: MachineObservations, reason: str) -> Finding:
    ranks, devices = request.parallel.num_ranks, len(seen.accelerator.devices)
    problem = ""
    if ranks > devices:
        problem = f"{ranks} ranks need {ranks} devices"
    elif ranks > 1 and not seen.accelerator.nccl:
        problem = "this torch was built without NCCL, which more than one rank needs"
    if problem:
        remedy = f"Use parallel.num_ranks: {min(ranks, devices) if seen.accelerator.nccl else 1}, or a machine with more devices."
        return Finding(check="accelerator", severity="failure", observed=reason, needed=problem, remedy=remedy, exit_code=69)
    return Finding(check="accelerator", severity="ok", observed=f"CUDA, {'nccl' if ranks > 1 else 'one rank'}; {reason}")


def choose_dtype(request: RuntimeRequest, seen: MachineObservations, device: Device) -> tuple[Dtype, Finding]:
    """The number format that will be used. On a CPU `auto` is always float32."""
    asked = request.model.dtype
    if device == "cpu":
        return _cpu_dtype(asked, seen)
    capable = all(gpu.bfloat16 for gpu in seen.accelerator.devices)
    if asked == "auto":
        chosen: Dtype = "bfloat16" if capable else "float16"
        return chosen, Finding(check="dtype", severity="ok", observed=f"{chosen}, chosen for this device")
    if asked == "bfloat16" and not capable:
        return asked, Finding(
            check="dtype",
            severity="warning",
            observed="bfloat16 is emulated on this device",
            remedy="Use model.dtype: float16 or auto.",
        )
    return asked, Finding(check="dtype", severity="ok", observed=f"{asked}, as asked")


def _cpu_dtype(asked: Literal["auto", "float32", "bfloat16", "float16"], seen: MachineObservations) -> tuple[Dtype, Finding]:
    native = sorted(CPU_BFLOAT16_FLAGS & set(seen.cpu_flags))
    if asked == "float16":
        return asked, Finding(
            check="dtype",
            severity="failure",
            observed="float16 asked for on a CPU",
            needed="a CUDA device",
            remedy="Use model.dtype: float32 or auto.",
            exit_code=69,
        )
    if asked == "bfloat16":
        if native:
            return asked, Finding(check="dtype", severity="ok", observed=f"bfloat16, native through {', '.join(native)}")
        return asked, Finding(
            check="dtype",
            severity="warning",
            observed="bfloat16 is emulated on this CPU (no avx512_bf16, no amx_bf16)",
            needed="about 10 times the time of float32 per step",
            remedy="Use model.dtype: float32 or auto.",
        )
    why = "as asked" if asked == "float32" else "chosen for the CPU"
    emulated = "" if native else "; bfloat16 would be emulated here, about 10 times slower"
    return "float32", Finding(check="dtype", severity="ok", observed=f"float32, {why}{emulated}")


def choose_threads(request: RuntimeRequest, seen: MachineObservations, model: ModelNumbers | None) -> tuple[int, Finding]:
    """Intra-op threads per rank: cores ÷ ranks, one for models too small to share work."""
    cores, ranks = seen.num_cores, request.parallel.num_ranks
    small = model is not None and model.num_parameters < SMALL_MODEL_PARAMETERS
    threads = 1 if small else max(1, cores // ranks)
    observed = f"{cores} cores, {ranks} rank{'s' if ranks > 1 else ''}: {threads} thread{'s' if threads > 1 else ''} each"
    if ranks > cores:
        return 1, Finding(
            check="threads",
            severity="warning",
            observed=observed,
            needed=f"at least {ranks} cores",
            remedy=f"Ranks will wait for each other; use parallel.num_ranks: {cores} or fewer.",
        )
    return threads, Finding(check="threads", severity="ok", observed=observed + (", since the model is small" if small else ""))


def max_build_jobs(num_cores: int, memory_bytes: int, pids_left: int | None) -> int:
    """MAX_JOBS from real limits: a parallel build that the cgroup kills leaves a lock behind."""
    by_memory = memory_bytes // BUILD_JOB_BYTES
    by_pids = num_cores if pids_left is None else pids_left // BUILD_JOB_PIDS
    return max(1, min(num_cores, by_memory, by_pids))


def batch_finding(request: RuntimeRequest, rows: int) -> Finding:
    """The batch arithmetic, solved."""
    ranks, batch = request.parallel.num_ranks, request.training.global_batch_size
    per_rank = batch // ranks
    passes = -(-per_rank // rows)
    tokens = batch * request.data.sequence_length
    observed = f"{batch} sequences = {ranks} rank{'s' if ranks > 1 else ''} x {rows} rows x {passes} micro-batches, {tokens} tokens a step"
    return Finding(check="batch", severity="ok", observed=observed)


def compile_finding(request: RuntimeRequest, model: ModelNumbers, device: Device, dtype: Dtype) -> Finding:
    """Whether passes are compiled, by the rule that decides it when the run is born."""
    if request.training.epochs is not None and request.model.compile == "auto":
        return Finding(check="compile", severity="ok", observed="decided by the number of steps that the epochs come to")
    choice = compilation_of(request, model, device, dtype, request.training.max_steps)
    if not choice.wanted:
        severity = "warning" if request.model.compile == "on" else "ok"
        remedy = "Use another setting of what is named, or model.compile: auto." if severity == "warning" else ""
        return Finding(check="compile", severity=severity, observed=f"no: {choice.why}", remedy=remedy)
    return Finding(
        check="compile",
        severity="notice",
        observed=f"yes, before the first step: {choice.why}",
        remedy="Set model.compile to off to begin at once; the numbers are the same up to rounding, not to the bit.",
    )


def schedule_findings(request: RuntimeRequest) -> tuple[Finding, ...]:
    """A warm-up that the run never leaves, so that the learning rate that was asked for is never reached."""
    training = request.training
    if training.warmup_ratio is not None or training.warmup_steps <= training.max_steps:
        return ()
    peak = training.max_steps / training.warmup_steps
    return (
        Finding(
            check="schedule",
            severity="notice",
            observed=f"training.warmup_steps is {training.warmup_steps} and the run has {training.max_steps} steps: "
            f"it ends at {peak:.0%} of training.learning_rate",
            remedy="Set training.warmup_steps to a tenth of training.max_steps or so, if that is not meant.",
        ),
    )


def model_findings(request: RuntimeRequest, model: ModelNumbers) -> tuple[Finding, ...]:
    """Sequence length against positions, tokenizer against embedding: both end in an index error deep inside, later."""
    findings: list[Finding] = []
    length, positions = request.data.sequence_length, model.max_positions
    if positions is not None and length > positions:
        findings.append(
            Finding(
                check="sequence_length",
                severity="failure",
                observed=f"data.sequence_length is {length}",
                needed=f"at most {positions}, the positions that {request.model.source} takes",
                remedy=f"Set data.sequence_length to {positions} or less.",
                exit_code=64,
            )
        )
    else:
        limit = f"of {positions} positions" if positions is not None else "and the model states no limit"
        findings.append(Finding(check="sequence_length", severity="ok", observed=f"{length} tokens {limit}"))
    tokens = model.tokenizer_vocab_size
    if tokens is not None and tokens > model.vocab_size:
        findings.append(
            Finding(
                check="tokenizer",
                severity="failure",
                observed=f"the tokenizer makes {tokens} different tokens",
                needed=f"at most {model.vocab_size}, the rows of the embedding of {request.model.source}",
                remedy="Use the model's own tokenizer, or resize the model's embedding.",
                exit_code=64,
            )
        )
    elif tokens is not None:
        findings.append(Finding(check="tokenizer", severity="ok", observed=f"{tokens} tokens for {model.vocab_size} embedding rows"))
    return tuple(findings)
