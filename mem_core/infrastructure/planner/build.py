"""From the request's section to a planner. Base URL and key are values: whoever calls has read them from the environment."""

from mem_core.domain.advice import Planner
from mem_core.domain.errors import RequestError
from mem_core.domain.request import PlannerSection
from mem_core.infrastructure.planner.none import NoPlanner
from mem_core.infrastructure.planner.rules import RulesPlanner


def build_planner(section: PlannerSection, *, default_base_url: str | None = None, api_key: str | None = None) -> Planner:
    """The planner that `policy.planner` names.

    Raises:
        RequestError: kind openai without base URL or model, or with a URL or key that cannot be used.
    """
    match section.kind:
        case "none":
            return NoPlanner()
        case "rules":
            return RulesPlanner()
        case "openai":
            from mem_core.infrastructure.planner.http import HttpPlanner  # httpx is of use to this kind alone

            base_url = _required("base_url", section.base_url or default_base_url, "the endpoint, such as http://localhost:8000/v1")
            model = _required("model", section.model, "the model's name at the endpoint")
            return HttpPlanner(base_url, model, api_key, time_limit_s=section.time_limit_s)


def _required(name: str, value: str | None, what: str) -> str:
    if not value:
        raise RequestError("kind openai needs it", field=f"policy.planner.{name}", remedy=f"Give {what}, or use kind none or rules.")
    return value
