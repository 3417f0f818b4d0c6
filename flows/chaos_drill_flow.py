"""The drill as a flow: for deployments that rehearse failure on a schedule, and for people who watch it in Prefect's UI."""

import tempfile
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from flows.commands.owned import run_owned
from flows.context import flow_run_name, request_of_run
from flows.mem_flow import mem_flow
from mem_core.domain.printable import printable
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.settings import Settings
from mem_core.runtime.chaos.drill.report import DrillReport, text_report


class DrillFailed(RuntimeError):
    """A promise was broken, or a fault did not fire or was not survived."""


@mem_flow(name="chaos-drill", flow_run_name=flow_run_name, persist_result=False, validate_parameters=True)
def chaos_drill(
    request: RuntimeRequest,
    seed: int = 0,
    overrides: dict[str, Any] = {},  # noqa: B006 - never changed; the form shows it
) -> Any:
    """Train under real faults, then an undisturbed twin, and compare. Fails unless everything was survived.

    Args:
        request: What to train; its chaos section says when and which faults.
        seed: Seed of the fault plan.
        overrides: Single values by dotted name, such as {"training.max_steps": 200}; they win over the request.
    """
    report = DrillReport.model_validate(run_drill(request_of_run(request, overrides).model_dump(mode="json"), seed))
    if not report.passed:
        raise DrillFailed(f"{printable(text_report(report))}\nRead {report.run_folder}.drill/drill.html.")
    return report.model_dump(mode="json")


@task(name="drill", cache_policy=NO_CACHE, persist_result=False, retries=0)
def run_drill(request: dict[str, Any], seed: int) -> dict[str, Any]:
    """`mem drill` in a process of its own, since its children's lives hang on its main thread; it dies with this one.

    Raises:
        DrillFailed: it ended without a report.
    """
    environment = {name: value for name, value in Settings.from_environment().environ.items() if name != "PREFECT_API_URL"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "request.json"
        path.write_text(RuntimeRequest.model_validate(request).model_dump_json())
        done = run_owned(["drill", str(path), "--seed", str(seed), "--json"], environment)
    lines = done.stdout.strip().splitlines()
    if done.returncode not in (0, 1) or not lines:
        raise DrillFailed(f"the drill ended with {done.returncode}: {printable(done.stderr[-1500:])}")
    return DrillReport.model_validate_json(lines[-1]).model_dump(mode="json")
