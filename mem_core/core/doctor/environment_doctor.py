"""The doctor: examines and advises, changes nothing.

It is a pure function of the request and of observations gathered elsewhere (`mem_core.infrastructure.machine.observe`), so that
every verdict can be tested without the machine that it is about.
"""

from mem_core.core.doctor import compute, memory, software, storage
from mem_core.core.doctor.asked import added_loss_findings, capability_findings, left_out_findings
from mem_core.core.doctor.keeping import keeping_findings
from mem_core.core.doctor.memory import Device, Dtype
from mem_core.domain.capabilities import Facts
from mem_core.domain.environment import DataNumbers, EnvironmentReport, Finding, MachineObservations, MemoryBudget, ModelNumbers
from mem_core.domain.errors import (
    DataError,
    EnvironmentUnfit,
    MemError,
    NoValidCheckpoint,
    PolicyRefused,
    RequestError,
    RunHeld,
    StoreUnavailable,
)
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.units import format_bytes

_SEVERITIES = ("failure", "warning", "notice", "ok")
# The order in which conditions are looked at: the first that fits decides the exit code.
_ERRORS: tuple[type[MemError], ...] = (
    RequestError,
    PolicyRefused,
    RunHeld,
    StoreUnavailable,
    DataError,
    NoValidCheckpoint,
    EnvironmentUnfit,
)


class EnvironmentDoctor:
    """Judges whether a request can run on a machine as observed."""

    def examine(
        self,
        request: RuntimeRequest,
        observations: MachineObservations,
        model: ModelNumbers | None = None,
        data: DataNumbers | None = None,
        person_at_hand: bool | None = None,
    ) -> EnvironmentReport:
        """The machine as one run sees it, worst findings first.

        Checks that need numbers of the model or the data, or whether a person can be asked, are left out when those are None.
        Never raises for what it finds: `error_of(report)` gives the error that ends the run.
        """
        model = _with_trained(model, observations)
        device, device_reason, accelerator = compute.choose_device(request, observations)
        dtype, dtype_finding = compute.choose_dtype(request, observations, device)
        threads, threads_finding = compute.choose_threads(request, observations, model)
        budgets = memory_budgets(request, observations, device)
        rows = _rows(request, model, dtype, device, budgets)
        estimates = memory.estimate_memory(model, request, dtype, device=device, micro_batch_rows=rows) if model is not None else {}
        facts = Facts(model=model, data=data, person_at_hand=person_at_hand, has_mlflow=observations.has_mlflow)
        findings = [
            *capability_findings(request, facts, has_checkpoints=observations.saved is not None),
            accelerator,
            *([dtype_finding] if accelerator.exit_code != PolicyRefused.exit_code else []),  # judged on the wrong device otherwise
            threads_finding,
            compute.batch_finding(request, rows),
            *compute.schedule_findings(request),
            *(_budget_finding(budget) for budget in budgets),
            *((compute.compile_finding(request, model, device, dtype), *compute.model_findings(request, model)) if model else ()),
            *(memory.memory_findings(model, request, dtype, device, budgets, rows) if model is not None else ()),
            *(storage.data_findings(data) if data is not None else ()),
            *storage.store_findings(request, observations),
            *storage.mirror_findings(observations),
            *storage.home_findings(observations),
            *storage.file_size_findings(observations, estimates.get("checkpoint")),
            *storage.disk_findings(request, observations, estimates.get("checkpoint")),
            *keeping_findings(request),
            *storage.shared_memory_findings(request, observations, device),
            *storage.occupant_findings(request, observations),
            *software.version_findings(observations),
            *software.build_findings(request, observations, device),
            *software.deepspeed_key_findings(request, device),
            *software.engine_findings(observations.engine),
            *software.environment_findings(observations),
            *left_out_findings(request, device),
            *added_loss_findings(model, observations.saved),
        ]
        host = next(budget.budget_bytes for budget in budgets if budget.kind == "host")
        return EnvironmentReport(
            device=device,
            device_reason=device_reason,
            dtype=dtype,
            num_cores=observations.num_cores,
            threads_per_rank=threads,
            versions=observations.versions,
            memory=budgets,
            estimates_bytes=estimates,
            findings=tuple(sorted(findings, key=lambda finding: _SEVERITIES.index(finding.severity))),
            num_ranks=request.parallel.num_ranks,
            micro_batch_rows=rows,
            max_build_jobs=compute.max_build_jobs(observations.num_cores, host, observations.pids_left),
            stale_locks=tuple(lock.path for lock in observations.build.locks if lock.stale),
            model=model,
            cpu=observations.cpu,
        )


def memory_budgets(request: RuntimeRequest, seen: MachineObservations, device: Device) -> tuple[MemoryBudget, ...]:
    """Host budget (resident bytes of all ranks) and, on CUDA, the budget of the fullest device.

    The user's own budget counts on the memory that trains: the device's on CUDA, else the host's. RLIMIT_AS and
    RLIMIT_DATA hold per process and count address space, of which a rank maps more than it ever touches.
    """
    own = int(request.memory.budget) if request.memory.budget is not None else None
    ranks = request.parallel.num_ranks
    address_space = {
        f"{name} of {format_bytes(limit)} a process": max(0, limit - memory.UNTOUCHED_BYTES) * ranks
        for name, limit in seen.address_space_limits.items()
    }
    host = smallest_limit("host", {**seen.host_limits, **address_space}, own if device == "cpu" else None)
    if device == "cpu":
        return (host,)
    used = seen.accelerator.devices[: request.parallel.num_ranks]
    limits = {f"{gpu.name} #{index} free": gpu.free_bytes for index, gpu in enumerate(used)}
    return (smallest_limit("device", limits, own), host)


def smallest_limit(kind: Device | str, limits_bytes: dict[str, int], own_bytes: int | None = None) -> MemoryBudget:
    """The least of all limits, and its name. Without any limit the budget is 0 under "unknown"."""
    limits = dict(limits_bytes) if own_bytes is None else {**limits_bytes, "memory.budget": own_bytes}
    binding = min(limits, key=lambda name: limits[name], default="unknown")
    return MemoryBudget(
        kind="device" if kind == "device" else "host",
        budget_bytes=max(0, limits.get(binding, 0)),
        binding_limit=binding,
        limits_bytes=limits,
    )


def with_failures(report: EnvironmentReport, *errors: MemError) -> EnvironmentReport:
    """The report with what was tried and refused as its first findings, in the words of what refused it."""
    return report.model_copy(update={"findings": (*map(_failure, errors), *report.findings)})


def _failure(error: MemError) -> Finding:
    got = f" (got {error.value})" if error.value is not None else ""
    return Finding(
        check=error.field or "run", severity="failure", observed=f"{error.problem}{got}", needed=error.bound, remedy=error.remedy,
        exit_code=error.exit_code,
    )  # fmt: skip


def error_of(report: EnvironmentReport) -> MemError | None:
    """The error that ends the run, by the order of conditions of the exit codes; None when nothing failed.

    A kind that no condition has, as when a process that looks has died, comes last: what failed never counts as ready.
    """
    others = tuple(kind for kind in MemError.__subclasses__() if kind not in _ERRORS)
    for kind in (*_ERRORS, *others):
        failures = [finding for finding in report.failures if finding.exit_code == kind.exit_code]
        if failures:
            problem = "; ".join(f"{finding.check}: {finding.observed}" for finding in failures)
            bound = "; ".join(finding.needed for finding in failures if finding.needed)
            remedy = " ".join(dict.fromkeys(finding.remedy for finding in failures))
            return kind(problem, remedy=remedy, bound=bound)
    return None


def _rows(request: RuntimeRequest, model: ModelNumbers | None, dtype: Dtype, device: Device, budgets: tuple[MemoryBudget, ...]) -> int:
    asked = request.memory.micro_batch_size
    if model is None or (asked != "auto" and request.memory.mode == "fixed"):
        return 1 if asked == "auto" else asked
    return memory.choose_micro_batch_rows(model, request, dtype, device=device, budget_bytes=budgets[0].budget_bytes)


def _with_trained(model: ModelNumbers | None, seen: MachineObservations) -> ModelNumbers | None:
    """What trains was counted where the model was built; where it was not, the formula has to do."""
    counted = seen.engine.num_trainable_parameters if seen.engine is not None else None
    return model.model_copy(update={"num_trainable_parameters": counted}) if model is not None and counted is not None else model


def _budget_finding(budget: MemoryBudget) -> Finding:
    others = ", ".join(f"{name} {format_bytes(size)}" for name, size in budget.limits_bytes.items() if name != budget.binding_limit)
    observed = f"{format_bytes(budget.budget_bytes)}, bound by {budget.binding_limit}" + (f" (others: {others})" if others else "")
    return Finding(check=f"memory.{budget.kind}_budget", severity="ok", observed=observed)
