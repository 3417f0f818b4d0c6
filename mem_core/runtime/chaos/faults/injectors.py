"""Kind -> what does it. The table and the kinds are checked against each other by a test."""

from mem_core.runtime.chaos.faults import file_faults, process_faults, service_faults
from mem_core.runtime.chaos.faults.scene import Injector

INJECTORS: dict[str, Injector] = {
    "kill_rank": process_faults.kill_role("rank"),
    "kill_all_ranks": process_faults.kill_all_ranks,
    "kill_flow": process_faults.kill_flow,
    "kill_fork_server": process_faults.kill_role("fork-server"),
    "kill_validator": process_faults.kill_role("validator"),
    "kill_writer": process_faults.kill_writer,
    "kill_rank_in_save": process_faults.kill_rank_in_save,
    "kill_flow_in_save": process_faults.kill_flow_in_save,
    "kill_flow_in_commit": process_faults.kill_flow_in_commit,
    "hang_rank": process_faults.hang_rank,
    "slow_rank": process_faults.slow_rank,
    "freeze_flow": process_faults.freeze_flow,
    "interrupt_flow": process_faults.interrupt_flow,
    "memory_pressure": process_faults.memory_pressure,
    "write_limit": process_faults.write_limit,
    **{kind: file_faults.damage_checkpoint(kind) for kind in file_faults.DAMAGES},
    "cut_journal": file_faults.cut_journal,
    "future_lease": file_faults.future_lease,
    "stale_build_lock": file_faults.stale_build_lock,
    **{
        kind: service_faults.ordered(kind)
        for kind in ("error_in_forward", "error_in_backward", "error_in_step", "nan_batch", "failed_allocation")
    },
    "hostile_planner": service_faults.hostile_planner,
    "prefect_away": service_faults.prefect_away,
    "prefect_killed": service_faults.prefect_killed,
    "read_only_store": service_faults.read_only_store,
    "full_disk": service_faults.full_disk,
    "store_errors": service_faults.store_misbehaves("errors", ("503",)),
    "store_resets": service_faults.store_misbehaves("resets", ("ConnectionResetError", "RemoteDisconnected", "BrokenPipeError")),
}
