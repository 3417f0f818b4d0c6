"""Which real faults there are: one table, read by the plan, the injectors and the report. Pure."""

from dataclasses import dataclass
from typing import Literal

Recovery = Literal["same_workers", "new_workers", "new_flow"]


@dataclass(frozen=True)
class FaultKind:
    """One kind of fault.

    `recovery` says who must be there again before it counts as recovered: the workers that were there go on, replaced ones, or
    ones under a restarted flow. `needs` names what the machine or the request must offer.
    """

    name: str
    title: str
    recovery: Recovery
    needs: tuple[Literal["root", "own_disk", "planner", "prefect", "relay", "cpu"], ...] = ()


_ALL = (
    FaultKind("kill_rank", "SIGKILL of one rank", "new_workers"),
    FaultKind("kill_all_ranks", "SIGKILL of every rank", "new_workers"),
    FaultKind("kill_flow", "SIGKILL of the process that drives the run", "new_flow"),
    FaultKind("kill_fork_server", "SIGKILL of the fork server, and with it of every worker", "new_workers"),
    FaultKind("kill_validator", "SIGKILL of the process that proves checkpoints", "same_workers"),
    FaultKind("kill_writer", "SIGKILL of the process that writes a snapshot", "same_workers", ("cpu",)),
    FaultKind("kill_rank_in_save", "SIGKILL of a rank while its files are being written", "new_workers"),
    FaultKind("kill_flow_in_save", "SIGKILL of the flow while files are being written", "new_flow"),
    FaultKind("kill_flow_in_commit", "SIGKILL of the flow between the manifest and the verdict", "new_flow"),
    FaultKind("hang_rank", "SIGSTOP of one rank", "new_workers"),
    FaultKind("slow_rank", "a rank stopped and continued in bursts", "same_workers"),
    FaultKind("freeze_flow", "SIGSTOP of the flow for some seconds", "same_workers"),
    FaultKind("interrupt_flow", "SIGTERM of the flow, as a scheduler sends it", "new_flow"),
    FaultKind("error_in_forward", "an exception in forward", "new_workers"),
    FaultKind("error_in_backward", "an exception in backward", "new_workers"),
    FaultKind("error_in_step", "an exception after the update was applied on one rank", "new_workers"),
    FaultKind("nan_batch", "a batch whose loss is not a number", "new_workers"),
    FaultKind("failed_allocation", "an allocation that the kernel refuses", "same_workers"),
    FaultKind("memory_pressure", "a ballast process that takes memory away", "same_workers"),
    FaultKind("flip_checkpoint", "one bit of the newest checkpoint flipped, then a rank killed", "new_workers"),
    FaultKind("truncate_checkpoint", "a file of the newest checkpoint cut short, then a rank killed", "new_workers"),
    FaultKind("delete_checkpoint_file", "a file of the newest checkpoint removed, then a rank killed", "new_workers"),
    FaultKind("cut_journal", "the journal's last line cut short under a killed flow", "new_flow"),
    FaultKind("write_limit", "the kernel refuses the ranks' writes beyond a size", "same_workers"),
    FaultKind("full_disk", "the run's disk filled to the last byte", "same_workers", ("root", "own_disk")),
    FaultKind("read_only_store", "the run folder mounted read-only", "same_workers", ("root",)),
    FaultKind("store_errors", "every request to the object store answered with 503", "same_workers", ("relay",)),
    FaultKind("store_resets", "every connection to the object store reset", "same_workers", ("relay",)),
    FaultKind("stale_build_lock", "a build lock of a dead builder in the op folder, then the flow killed", "new_flow"),
    FaultKind("future_lease", "a lease from a clock that was a day ahead, then the flow killed", "new_flow"),
    FaultKind("prefect_away", "the Prefect API stopped answering", "same_workers", ("prefect",)),
    FaultKind("prefect_killed", "SIGKILL of the Prefect API", "same_workers", ("prefect",)),
    FaultKind("hostile_planner", "a planner reply that no planner should give", "same_workers", ("planner",)),
)
FAULT_KINDS: dict[str, FaultKind] = {kind.name: kind for kind in _ALL}


def offered_kinds(*, root: bool, own_disk: bool, planner: bool, prefect: bool, relay: bool, cpu: bool = True) -> tuple[str, ...]:
    """Kinds that this machine and this request allow, in the table's order.

    `own_disk`: the run may get a small disk of its own; `relay`: its object store can be reached through one.
    """
    there = {"root": root, "own_disk": own_disk, "planner": planner, "prefect": prefect, "relay": relay, "cpu": cpu}
    return tuple(kind.name for kind in _ALL if all(there[need] for need in kind.needs))
