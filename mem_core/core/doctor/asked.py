"""What the request asks for and does not get: refused by the table of capabilities, or left out and said aloud."""

from mem_core.core.doctor.memory import Device
from mem_core.domain.capabilities import Facts, Unsupported, unsupported
from mem_core.domain.environment import Finding, ModelNumbers, SavedRun
from mem_core.domain.errors import RequestError
from mem_core.domain.request import RuntimeRequest


def capability_findings(request: RuntimeRequest, facts: Facts, *, has_checkpoints: bool) -> tuple[Finding, ...]:
    """One failure for each thing that this build cannot do, in the words of the request check (exit 64)."""
    return tuple(_finding(item, has_checkpoints) for item in unsupported(request, facts))


def _finding(item: Unsupported, has_checkpoints: bool) -> Finding:
    error = item.error
    observed = f"{error.problem} (got {error.value})"
    if item.capability.goes_on and has_checkpoints:
        remedy = f"The run was born without it and goes on without it; a new one would be refused. {error.remedy}"
        return Finding(check=error.field, severity="warning", observed=observed, needed=error.bound, remedy=remedy)
    return Finding(
        check=error.field, severity="failure", observed=observed, needed=error.bound, remedy=error.remedy, exit_code=RequestError.exit_code
    )


def left_out_findings(request: RuntimeRequest, device: Device) -> tuple[Finding, ...]:
    """What is asked for and has no effect on this kind of run."""
    findings: list[Finding] = []
    if request.chaos is not None:
        findings.append(
            Finding(
                check="chaos",
                severity="notice",
                observed="left out: training never hurts a run",
                remedy="mem drill REQUEST, or the chaos-drill deployment, injects the faults and compares with a twin.",
            )
        )
    if request.parallel.offload_optimizer == "cpu" and device == "cpu":
        findings.append(
            Finding(
                check="parallel.offload_optimizer",
                severity="notice",
                observed="it frees nothing on a CPU, where the optimizer's state is in host memory anyway",
                remedy="Set it to none, which is also quicker.",
            )
        )
    return tuple(findings)


def added_loss_findings(model: ModelNumbers | None, saved: SavedRun | None) -> tuple[Finding, ...]:
    """What a model adds to its own loss is trained on; a run that was born before that goes on without it."""
    if model is None or not model.router_loss:
        return ()
    if saved is not None and not saved.router_loss:
        observed = "the model adds a router's loss to its own, which this run was born without and goes on without"
        remedy = "A new run_id trains on it; output_router_logits: false in the model's config.json says that it is not wanted."
        return (Finding(check="model.source", severity="warning", observed=observed, remedy=remedy),)
    observed = "the model adds a router's loss to its own: trained on, weighted over the global batch, shown apart as added_loss"
    remedy = "Set output_router_logits to false in the model's config.json to leave it out."
    return (Finding(check="model.source", severity="notice", observed=observed, remedy=remedy),)
