"""What interrupted uploads left in a run's remote store: looked at quickly, and never a reason for the doctor to fail."""

import threading
from collections.abc import Callable

from mem_core.domain.environment import EnvironmentReport, Finding
from mem_core.domain.units import format_bytes
from mem_core.infrastructure.storage.port import Store
from mem_core.runtime.checkpoint_manager.mirror.remote_layout import sort_keys

CHECK = "store.orphans"
LOOK_LIMIT_S = 5.0
MOST_KEYS = 5


def with_orphans(
    report: EnvironmentReport, open_remote: Callable[[], Store | None], run_id: str, limit_s: float = LOOK_LIMIT_S
) -> EnvironmentReport:
    """The report with a notice about incomplete uploads of the run, where there is a remote store, it answers in time and has some.

    Never raises: a store that does not answer has its own finding, or will say so when it is written to.
    """
    found: list[Finding] = []

    def look() -> None:
        try:
            store = open_remote()
            if store is not None:
                found.extend(orphan_findings(store, run_id))
        except Exception:  # noqa: BLE001 - a look that fails says nothing, and the doctor goes on
            return

    thread = threading.Thread(target=look, name="look-for-orphans", daemon=True)
    thread.start()
    thread.join(limit_s)
    return report.model_copy(update={"findings": (*report.findings, *tuple(found))})


def orphan_findings(store: Store, run_id: str) -> tuple[Finding, ...]:
    """One notice with count, bytes and the first keys of uploads that no manifest completes; nothing where there are none.

    Raises:
        StoreUnavailable: the store does not answer.
    """
    objects = store.list(run_id)
    run = sort_keys(run_id, objects)
    keys = [key for upload in run.incomplete for key in run.keys[upload]]
    parts = [item.key for item in store.unfinished(run_id)]
    if not keys and not parts:
        return ()
    sizes = {item.key: item.size_bytes for item in objects}
    named = [*keys, *(f"parts of {key}" for key in parts)]
    more = f" and {len(named) - MOST_KEYS} more" if len(named) > MOST_KEYS else ""
    unfinished = f" and {len(parts)} unfinished objects" if parts else ""
    return (
        Finding(
            check=CHECK,
            severity="notice",
            observed=(
                f"{len(keys)} objects ({format_bytes(sum(sizes[key] for key in keys))}) of {len(run.incomplete)} incomplete uploads"
                f"{unfinished} in {store.url}: {', '.join(named[:MOST_KEYS])}{more}"
            ),
            remedy="Nothing is to be done: rotation of the next attempt removes them, unless one is being uploaded right now.",
        ),
    )
