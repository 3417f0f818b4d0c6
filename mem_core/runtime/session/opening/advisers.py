"""Who decides hyper-parameters in a run: the policy engine with its bounds, and the planner that may propose."""

from mem_core.core.policy.local_policy_engine import LocalPolicyEngine
from mem_core.domain.errors import MemError
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.planner.background import BackgroundAdvice
from mem_core.infrastructure.planner.build import build_planner
from mem_core.infrastructure.request.policy_file import load_policy_file
from mem_core.infrastructure.settings import Settings


def policy_engine(bounds_file: str | None) -> LocalPolicyEngine:
    """The engine with built-in or user-given bounds. Raises RequestError."""
    return LocalPolicyEngine(load_policy_file(bounds_file)) if bounds_file else LocalPolicyEngine()


def planner_of(request: RuntimeRequest, settings: Settings) -> BackgroundAdvice | None:
    """The planner that is asked for, None where none is. Nobody is asked anything yet.

    Raises:
        RequestError: it cannot be used as it is described.
    """
    section = request.policy.planner
    if section.kind == "none":
        return None
    key = settings.secret(section.api_key_env) if section.api_key_env else None
    return BackgroundAdvice(build_planner(section, default_base_url=settings.planner_base_url, api_key=key))


def advice_problems(request: RuntimeRequest, settings: Settings) -> tuple[MemError, ...]:
    """What building either of them says, for the doctor."""
    found: list[MemError] = []
    for build in (lambda: policy_engine(request.policy.file), lambda: planner_of(request, settings)):
        try:
            build()
        except MemError as exc:
            found.append(exc)
    return tuple(found)
