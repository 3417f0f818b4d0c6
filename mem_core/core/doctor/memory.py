"""How much memory a run will need: a prediction from sizes alone, and what to do when it does not fit.

The formulas follow what DeepSpeed 0.19 and PyTorch keep alive at the peak of a step; the constants were measured with
SmolLM2-135M on a CPU. Calibration before step 0 replaces the prediction by readings, so it only has to be good enough
to say "this cannot work" before minutes are spent: within ESTIMATE_ERROR.
"""

import math
from collections.abc import Mapping
from typing import Literal

from mem_core.core.doctor.changes import adapters, offload, with_values
from mem_core.core.doctor.sizes import activation_bytes, trained_parameters
from mem_core.domain.environment import Finding, MemoryBudget, ModelNumbers
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.units import format_bytes

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]

ESTIMATE_ERROR = 0.25
# Resident bytes of a process that imported torch, deepspeed and transformers and joined a group, before any weight.
PROCESS_BASE_BYTES = 500 * 2**20
# Address space that a rank maps and never touches (code, thread stacks, allocator arenas): VmSize less VmRSS after start.
UNTOUCHED_BYTES = 600 * 2**20
# A CUDA context with its kernels, cuBLAS and NCCL buffers (device), and what the driver maps on the host.
# (Not measured yet: a guess on the safe side, so host memory beside a device only warns.)
CUDA_CONTEXT_BYTES = 600 * 2**20
CUDA_HOST_BASE_BYTES = 2_500 * 2**20
# Copies of the logits alive at the peak: the logits, their log-softmax, and the gradient, all in float32.
LOGITS_COPIES = 3
# The C library keeps about this part of freed activations, so that they still count when the optimizer steps.
RETAINED = 0.6
# DeepSpeed's defaults: parameters that stage 3 keeps gathered, and elements of a reduction bucket.
_MAX_LIVE_PARAMETERS = 1_000_000_000
_BUCKET_ELEMENTS = 500_000_000
_ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


def estimate_memory(
    model: ModelNumbers,
    request: RuntimeRequest,
    dtype: Dtype,
    *,
    device: Device = "cpu",
    micro_batch_rows: int = 1,
    activation_checkpointing: bool | None = None,
) -> dict[str, int]:
    """Predicted bytes per rank and in total, for rows of `data.sequence_length` tokens.

    With P parameters, T of them trained, w bytes per item of `dtype`, R ranks, and s = R at ZeRO stage >= 1, else 1:

    - weights: P w; at stage 3 P w / R and on top what stays gathered, min(P, 1e9) w.
    - gradients: T w, since accumulation is not managed by DeepSpeed and whole gradients stay until the step; at stage 3
      a float32 copy of the rank's partition comes on top, 4 T / R.
    - optimizer: two Adam moments in float32, 8 T / s, and from stage 1 on (or with 16-bit weights) a float32 master copy,
      4 T / s. With offload, which there is from stage 1 on, they are counted on the host.
    - step_transient: copies of the gradients on their way to the optimizer: the reduction buffer, T w; at stages 1 and 2 also
      the flat float32 partition, 4 T / s; at stage 3 two buckets, 2 min(T, 5e8) w.
    - activations: tokens x layers x (13 hidden + 3 kv + 4 intermediate) x w; with activation checkpointing
      tokens x layers x hidden x w plus one layer in full. Dropout in adapters keeps each one's input twice more.
    - logits: tokens x vocab x 4 x LOGITS_COPIES. A = activations + logits.
    - training_peak_per_rank: base + weights + optimizer + the larger of the two moments "loss" (A, and the gradients of earlier
      micro-batches) and "step" (gradients + step_transient + RETAINED A; at stage 3 all of A, as reduction runs in the backward).
    - checkpoint: T w for the module (nothing at stage 3, whose module file holds no weights) + optimizer of all ranks.
    - save_copy_total: host bytes on top while a checkpoint is written behind training: the writer keeps the state as it was
      (by copy-on-write on a CPU, as a host copy on CUDA), and copies the module's weights out of their flat buffer.
    - resume_peak_total: ranks x (base + weights + master + the larger file that a rank reads: the module, or its own optimizer
      shard; at stage 0 both are one file). Moments are taken over from what was read, not copied.

    `training_peak_total` and `training_peak_per_rank` count the memory of `device`; on CUDA `host_peak_total` is apart.
    What does not train has neither gradients nor optimizer, and is in no checkpoint.
    Against SmolLM2-135M, float32, fused AdamW, 128 to 2,048 tokens a pass, one and two ranks: within 8 % at stages 0 to 3.
    """
    item, ranks, stage = _ITEM_BYTES[dtype], request.parallel.num_ranks, request.parallel.zero_stage
    trained = trained_parameters(model, request)
    checkpointing = request.model.activation_checkpointing == "on" if activation_checkpointing is None else activation_checkpointing
    tokens = micro_batch_rows * request.data.sequence_length
    passes = -(-request.training.global_batch_size // (ranks * micro_batch_rows))

    state = _state_bytes(model.num_parameters, trained, item, ranks, stage)
    activations = activation_bytes(model, request, tokens, item, checkpointing=checkpointing)
    logits = tokens * model.vocab_size * 4 * LOGITS_COPIES
    retained = 1.0 if stage == 3 else RETAINED if device == "cpu" else 0.0
    at_loss = activations + logits + (state["gradients"] if passes > 1 else 0)
    at_step = state["gradients"] + state["step_transient"] + int(retained * (activations + logits))

    offloaded = request.parallel.offload_optimizer == "cpu" and device == "cuda" and stage >= 1
    base = CUDA_CONTEXT_BYTES if device == "cuda" else PROCESS_BASE_BYTES
    peak = base + state["weights"] + (0 if offloaded else state["optimizer"]) + max(at_loss, at_step)
    estimates = {
        "parameters": model.num_parameters,
        "process_base": base,
        **state,
        "activations": activations,
        "logits": logits,
        "training_peak_per_rank": peak,
        "training_peak_total": peak * ranks,
        "checkpoint": (0 if stage == 3 else trained * item) + state["optimizer"] * (ranks if stage >= 1 else 1),
        "save_copy_total": _save_copy_bytes(trained * item, state, ranks, stage),
        "resume_peak_total": ranks
        * _resume_bytes((model.num_parameters * item, trained * item), state, request, device, offloaded=offloaded),
    }
    if device == "cuda":
        estimates["host_peak_total"] = ranks * (CUDA_HOST_BASE_BYTES + (state["optimizer"] if offloaded else 0))
    return estimates


def _state_bytes(parameters: int, trained: int, item: int, ranks: int, stage: int) -> dict[str, int]:
    """Weights, gradients, optimizer and the step's transient of one rank; see `estimate_memory`."""
    shards = ranks if stage >= 1 else 1
    has_master = stage >= 1 or item < 4
    weights, gradients, transient = parameters * item, trained * item, trained * item
    if stage in (1, 2):
        transient += 4 * trained // shards
    if stage == 3:
        weights = weights // ranks + min(parameters, _MAX_LIVE_PARAMETERS) * item
        gradients = trained * item + 4 * trained // ranks
        transient = 2 * min(trained, _BUCKET_ELEMENTS) * item
    optimizer = trained * (12 if has_master else 8) // shards
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer, "step_transient": transient}


def _save_copy_bytes(module: int, state: Mapping[str, int], ranks: int, stage: int) -> int:
    """Host bytes of all ranks that a save in the background keeps alive."""
    own_weights = module // ranks if stage == 3 else module
    return ranks * (own_weights + state["optimizer"]) + (0 if stage == 3 else module)


def _resume_bytes(
    weights_and_read: tuple[int, int], state: Mapping[str, int], request: RuntimeRequest, device: Device, *, offloaded: bool
) -> int:
    """Host bytes of one rank at the peak of loading a checkpoint; of the weights what trains is read from it."""
    whole, module = weights_and_read
    stage, optimizer = request.parallel.zero_stage, state["optimizer"]
    read = {0: module + optimizer, 3: optimizer}.get(stage, max(module, optimizer))
    built = optimizer if stage == 3 else optimizer // 3 if stage else 0
    if device == "cuda":
        return CUDA_HOST_BASE_BYTES + read + (optimizer if offloaded else 0)
    weights = whole // request.parallel.num_ranks if stage == 3 else whole  # nothing is gathered yet
    return PROCESS_BASE_BYTES + weights + built + read


def choose_micro_batch_rows(
    model: ModelNumbers, request: RuntimeRequest, dtype: Dtype, *, device: Device, budget_bytes: int, activation_checkpointing: bool = False
) -> int:
    """Most rows per forward pass, dividing a rank's share, whose predicted peak stays under the high watermark; at least 1."""
    rows_per_rank = request.training.global_batch_size // request.parallel.num_ranks
    asked = request.memory.micro_batch_size
    most = rows_per_rank if asked == "auto" else asked
    allowed = int(budget_bytes * request.memory.high_watermark)
    for rows in (size for size in _divisors(rows_per_rank) if size <= most):
        peak = estimate_memory(
            model, request, dtype, device=device, micro_batch_rows=rows, activation_checkpointing=activation_checkpointing
        )
        if needed_bytes(peak, device) <= allowed:
            return rows
    return 1


def _divisors(number: int) -> list[int]:
    """Divisors, largest first."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)}, reverse=True)


def needed_bytes(estimates: Mapping[str, int], device: Device) -> int:
    """What to compare with the budget: all ranks share the host, each has a device of its own."""
    return estimates["training_peak_per_rank" if device == "cuda" else "training_peak_total"]


def memory_findings(
    model: ModelNumbers, request: RuntimeRequest, dtype: Dtype, device: Device, budgets: tuple[MemoryBudget, ...], rows: int
) -> tuple[Finding, ...]:
    """Whether the predicted peaks fit their budgets; a failure says what would fit."""
    estimates = estimate_memory(model, request, dtype, device=device, micro_batch_rows=rows)
    by_kind = {budget.kind: budget for budget in budgets}
    main = by_kind.get("device" if device == "cuda" else "host")
    findings = [_training_finding(model, request, dtype, device, main, estimates, rows)] if main else []
    host = by_kind.get("host")
    if host:
        findings += [_save_finding(model, request, estimates, host, device), _resume_finding(estimates, host)]
    if host and device == "cuda":
        findings.append(_fit("memory.host", "host memory beside the device", estimates["host_peak_total"], host, "", strict=False))
    return tuple(findings)


def _training_finding(
    model: ModelNumbers,
    request: RuntimeRequest,
    dtype: Dtype,
    device: Device,
    budget: MemoryBudget,
    estimates: Mapping[str, int],
    rows: int,
) -> Finding:
    needed = needed_bytes(estimates, device)
    hopeless = needed if request.memory.mode == "fixed" else _lowest_rung_bytes(model, request, dtype, device)
    options = _what_would_fit(model, request, dtype, device, budget.budget_bytes) if needed > budget.budget_bytes else ""
    label = f"predicted peak at {rows} x {request.data.sequence_length} tokens per forward pass"
    strict = hopeless * (1 - ESTIMATE_ERROR) > budget.budget_bytes
    return _fit("memory.training", label, needed, budget, options, strict=strict)


def _lowest_rung_bytes(model: ModelNumbers, request: RuntimeRequest, dtype: Dtype, device: Device) -> int:
    """What is still needed when adaptive memory has used every means: one row, activation checkpointing, offload."""
    lowest = next((changed for _, changed in offload(request, model, device)), request)
    return needed_bytes(estimate_memory(model, lowest, dtype, device=device, activation_checkpointing=True), device)


def _fit(check: str, label: str, needed: int, budget: MemoryBudget, remedy: str, *, strict: bool) -> Finding:
    """Compare, allowing for the estimate's error: only what cannot fit even with it is a failure."""
    observed = f"{format_bytes(budget.budget_bytes)} under {budget.binding_limit}"
    text = f"{format_bytes(needed)} {label}"
    if needed <= budget.budget_bytes:
        return Finding(check=check, severity="ok", observed=observed, needed=text)
    remedy = remedy or f"Give the run more {budget.kind} memory."
    if strict and needed * (1 - ESTIMATE_ERROR) > budget.budget_bytes:
        return Finding(check=check, severity="failure", observed=observed, needed=text, remedy=remedy, exit_code=69)
    return Finding(check=check, severity="warning", observed=observed, needed=text, remedy=remedy)


def _save_finding(
    model: ModelNumbers, request: RuntimeRequest, estimates: Mapping[str, int], host: MemoryBudget, device: Device
) -> Finding:
    """A process killed right after a save, when the copy of the state and the next step's peak meet."""
    training = estimates["host_peak_total" if device == "cuda" else "training_peak_total"]
    needed = training + estimates["save_copy_total"]
    ways = ", ".join(["fewer ranks per machine", *(words for words, _ in adapters(request, model)), "or more memory"])
    remedy = f"A save behind training may not fit: use {ways}."
    return _fit("memory.save", "host memory while a checkpoint is written behind training", needed, host, remedy, strict=False)


def _resume_finding(estimates: Mapping[str, int], host: MemoryBudget) -> Finding:
    """Fitting when fresh and dying on resume is the classic: the first resume would be the first to notice."""
    label = "host memory to resume, every rank reading its checkpoint files"
    return _fit("memory.resume", label, estimates["resume_peak_total"], host, "Use fewer ranks per machine, or more memory.", strict=False)


def _what_would_fit(model: ModelNumbers, request: RuntimeRequest, dtype: Dtype, device: Device, budget_bytes: int) -> str:
    """The first changes, from mild to harsh, that the same formula predicts to fit."""
    allowed = int(budget_bytes * request.memory.high_watermark)

    def fits(changed: RuntimeRequest, *, checkpointing: bool = False) -> bool:
        peak = estimate_memory(model, changed, dtype, device=device, micro_batch_rows=1, activation_checkpointing=checkpointing)
        return needed_bytes(peak, device) <= allowed

    found: list[str] = []
    if fits(request):
        found.append("memory.micro_batch_size: 1 or auto")
    elif fits(request, checkpointing=True):
        found.append("memory.micro_batch_size: 1 with model.activation_checkpointing: on")
    shorter = ((length, with_values(request, "data", sequence_length=length)) for length in _shorter_lengths(request))
    length = next((length for length, changed in shorter if not found and fits(changed, checkpointing=True)), None)
    if length:
        found.append(f"data.sequence_length: {length} with activation checkpointing")
    found += [words for words, changed in offload(request, model, device) if fits(changed, checkpointing=True)]
    found += [words for words, changed in adapters(request, model) if fits(changed)]
    if device == "cuda" and request.parallel.zero_stage < 3:
        found.append("a higher parallel.zero_stage with more ranks")
    return (
        f"What would fit: {'; '.join(found)}." if found else "Nothing smaller fits here: use a smaller model or a machine with more memory."
    )


def _shorter_lengths(request: RuntimeRequest) -> list[int]:
    lengths, length = list[int](), request.data.sequence_length // 2
    while length >= 16:
        lengths.append(length)
        length //= 2
    return lengths
