"""Who may propose hyper-parameters, within which bounds, and who confirms them."""

from typing import Literal

from pydantic import Field

from mem_core.domain.request.section import Section


class PlannerSection(Section):
    """Who may propose hyper-parameters."""

    kind: Literal["none", "rules", "openai"] = Field(default="none", description="none, built-in rules, or an OpenAI-compatible endpoint.")
    base_url: str | None = Field(default=None, description="Base URL of the endpoint; default from the environment.")
    model: str | None = Field(default=None, description="Model name at the endpoint.")
    api_key_env: str | None = Field(
        default=None, description="Environment variable (or Prefect Secret block) that holds the key; never the key itself."
    )
    time_limit_s: float = Field(default=10.0, gt=0, le=600, description="Longest that advice may delay a segment.")
    every_segments: int = Field(default=1, ge=1, description="Ask again after this many segments.")


class ApprovalSection(Section):
    """A person confirms changed hyper-parameters."""

    required: bool = Field(default=False, description="Ask a person before applied values change; needs a Prefect server with a UI.")
    time_limit_s: float = Field(default=3_600, gt=0, le=604_800, description="No answer within this time is a refusal.")


class PolicySection(Section):
    """Bounds on advice."""

    file: str | None = Field(default=None, description="YAML file with bounds; null uses the built-in lanes.")
    planner: PlannerSection = Field(default=PlannerSection(), title="Planner", description="Who may propose hyper-parameters.")
    approval: ApprovalSection = Field(default=ApprovalSection(), title="Approval", description="Whether a person confirms changes.")
