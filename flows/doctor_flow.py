"""The doctor as a deployment: what a worker's machine says to a request, without training on it."""

from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.settings import PREFECT_API_URL

from flows.context import doctor_run_name, request_of_run
from flows.mem_flow import mem_flow
from flows.server.local_api import is_embedded
from mem_core.bootstrap import examine_deeply
from mem_core.core.doctor.environment_doctor import error_of
from mem_core.core.doctor.render import render_report
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.printable import printable
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.settings import Settings


@mem_flow(name="doctor", flow_run_name=doctor_run_name, persist_result=False, validate_parameters=True)
def doctor(request: RuntimeRequest, overrides: dict[str, Any] = {}) -> Any:  # noqa: B006 - never changed; the form shows it
    """Examine the machine that runs this flow for a request; changes nothing, fails where a run would be refused.

    Args:
        request: Everything about the run that is meant.
        overrides: Single values by dotted name, such as {"device": "cuda"}; they win over the request.
    """
    report = EnvironmentReport.model_validate(examine(request_of_run(request, overrides, refuse=False).model_dump(mode="json")))
    text = render_report(report)
    print(printable(text))
    create_markdown_artifact(f"# Doctor\n\n```\n{text}\n```\n", key="mem-doctor", description=text.rsplit("\n", 1)[-1])
    error = error_of(report)
    if error is not None:
        raise error
    return report.model_dump(mode="json")


@task(name="examine", cache_policy=NO_CACHE, persist_result=False, retries=0)
def examine(request: dict[str, Any]) -> dict[str, Any]:
    """The report as plain values, for a run that this flow's server would drive."""
    seen = not is_embedded(PREFECT_API_URL.value())
    report = examine_deeply(RuntimeRequest.model_validate(request), Settings.from_environment(), person_at_hand=seen)
    return report.model_dump(mode="json")
