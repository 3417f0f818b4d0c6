"""The undisturbed twin: a run of its own that replays what was recorded, so that bits can be compared (I1)."""

from pathlib import Path

from mem_core.core.run.record import record_of
from mem_core.core.run.state_manager import StateManager, read_journal
from mem_core.domain.events import BatchSkipped, MemoryPlanChanged, PolicyDecided, RunEnded
from mem_core.domain.request import RuntimeRequest


def twin_request(request: RuntimeRequest, run_id: str) -> RuntimeRequest:
    """The request of the twin: nothing is decided anew, so memory is fixed to the recorded plans."""
    memory = request.memory.model_copy(update={"mode": "fixed"})
    checkpoint = request.checkpoint.model_copy(update={"export": "off"})
    return request.model_copy(update={"run_id": run_id, "memory": memory, "checkpoint": checkpoint, "chaos": None})


def seed_twin(run_folder: Path, root: Path, request: RuntimeRequest) -> None:
    """Give the twin its birth certificate and the recorded decisions; it then starts at step 0 with all of its future known.

    Memory plan changes and policy decisions that a rollback undid were overridden by later ones at the same place, exactly
    as a resumed run reads them.
    """
    record = record_of(run_folder)
    state = StateManager.acquire(root, request.run_id)
    try:
        horizon = {"schedule_steps": record.request.training.schedule_steps}
        born = request.model_copy(update={"training": request.training.model_copy(update=horizon)})
        state.write_record(record.model_copy(update={"run_id": request.run_id, "request": born}))
        state.start_attempt(None, note=f"twin of {record.run_id}: its recorded splits and decisions are replayed")
        for line in read_journal(run_folder / "journal"):
            if isinstance(line.event, BatchSkipped | MemoryPlanChanged | PolicyDecided):
                state.emit(line.event)
        state.emit(RunEnded(status="interrupted", exit_code=75, message="seeded; the twin's own process goes on"))
    finally:
        state.release()
