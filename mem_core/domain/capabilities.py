"""The one table of what this build cannot do, asked before anything starts and wherever something is offered or recommended.

A request that asks for a row of it is refused with exit 64 (`refuse_unsupported`: whoever builds a request from plain values, and
`submit`); the doctor says the same as a failing finding; its estimates and every remedy ask about a change before they name it
(`core/doctor/changes.py`); the form of a field says so in its description. What is built one day leaves the table, and all of them
follow.

Raw DeepSpeed keys are judged by device in `core/doctor/software.py`: they are not MEM's own offer.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mem_core.domain.environment import DataNumbers, ModelNumbers
from mem_core.domain.errors import RequestError
from mem_core.domain.fault_kinds import FAULT_KINDS
from mem_core.domain.request import RuntimeRequest


@dataclass(frozen=True, slots=True)
class Facts:
    """What a row may need beside the request; None where it is not known yet, and then the row does not speak.

    `person_at_hand`: whether whoever drives the run can put a question to a person. `has_mlflow`: whether that extra is installed.
    """

    model: ModelNumbers | None = None
    data: DataNumbers | None = None
    person_at_hand: bool | None = None
    has_mlflow: bool | None = None


NOTHING_KNOWN = Facts()


@dataclass(frozen=True, slots=True)
class Asked:
    """Where and with which value a request asks for something."""

    field: str
    value: str


@dataclass(frozen=True, slots=True)
class Capability:
    """Something that this build cannot do.

    `asks` finds what in a request asks for it, None where nothing does. `fields` are those whose form could offer it, and `in_form`
    the words of their descriptions that say it. `goes_on`: a run that has checkpoints was born without it and goes on without it,
    which is then a warning and no refusal.
    """

    id: str
    asks: Callable[[RuntimeRequest, Facts], Asked | None]
    why: str
    allowed: str
    way_out: str
    fields: tuple[str, ...]
    in_form: str
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Unsupported:
    """One thing that a request asks for and cannot have."""

    capability: Capability
    asked: Asked

    @property
    def error(self) -> RequestError:
        """The refusal in words: field, value, what is allowed, way out."""
        row = self.capability
        return RequestError(row.why, field=self.asked.field, value=self.asked.value, bound=row.allowed, remedy=row.way_out)


def _offload_of_whole_state(request: RuntimeRequest, _: Facts) -> Asked | None:
    asked = request.parallel.offload_optimizer == "cpu" and request.parallel.zero_stage == 0
    return Asked("parallel.offload_optimizer", "cpu") if asked else None


def _added_loss(request: RuntimeRequest, facts: Facts) -> Asked | None:
    added = facts.model.added_losses if facts.model is not None else ()
    return Asked("model.source", f"{request.model.source}: {', '.join(added)}") if added else None


def _chat_without_template(request: RuntimeRequest, facts: Facts) -> Asked | None:
    none_there = request.model.source.startswith("preset:") or (facts.model is not None and facts.model.has_chat_template is False)
    return Asked("data.messages_field", request.data.messages_field) if request.data.messages_field and none_there else None


def _chat_prompts_without_template(request: RuntimeRequest, facts: Facts) -> Asked | None:
    prompts = request.evaluation.prompts
    chats = isinstance(prompts, tuple) and any(not isinstance(prompt, str) for prompt in prompts)
    none_there = request.model.source.startswith("preset:") or (facts.model is not None and facts.model.has_chat_template is False)
    return Asked("evaluation.prompts", "chats") if chats and none_there else None


def _second_copy(request: RuntimeRequest, _: Facts) -> Asked | None:
    mirror, remote = request.checkpoint.mirror, "://" in request.store and not request.store.startswith("file://")
    return Asked("checkpoint.mirror", mirror) if mirror is not None and remote else None


def _unknown_faults(request: RuntimeRequest, _: Facts) -> Asked | None:
    kinds = request.chaos.kinds if request.chaos is not None else None
    if kinds is None:
        return None
    unknown = [kind for kind in kinds if kind not in FAULT_KINDS]
    return Asked("chaos.kinds", ", ".join(unknown) if unknown else "none") if unknown or not kinds else None


def _approval_by_nobody(request: RuntimeRequest, facts: Facts) -> Asked | None:
    alone = request.policy.approval.required and facts.person_at_hand is False
    return Asked("policy.approval.required", "true") if alone else None


def _mlflow_without_its_extra(request: RuntimeRequest, facts: Facts) -> Asked | None:
    return Asked("telemetry.loggers", "mlflow") if "mlflow" in request.telemetry.loggers and facts.has_mlflow is False else None


UNSUPPORTED = (
    Capability(
        id="offload_at_stage_0",
        asks=_offload_of_whole_state,
        why="at ZeRO stage 0 the optimizer's state cannot be kept in host memory",
        allowed="none at parallel.zero_stage 0",
        way_out="Set parallel.offload_optimizer to none, or parallel.zero_stage to 1, 2 or 3.",
        fields=("parallel.offload_optimizer",),
        in_form="not possible at ZeRO stage 0",
    ),
    Capability(
        id="added_loss",
        asks=_added_loss,
        why="this model adds a part of its own to the loss, which is not supported yet: it would not be trained on",
        allowed="a model whose loss is the cross-entropy of its logits, with or without a router's loss (output_router_logits: true)",
        way_out="Switch it off in the model's config.json (a coefficient of 0, output_router_logits: false): it is then not asked for.",
        fields=("model.source",),
        in_form="of losses that a model adds by itself only a router's is supported",
        goes_on=True,
    ),
    Capability(
        id="chat_template",
        asks=_chat_without_template,
        why="there is no chat template to render messages with, and presets have none",
        allowed="null, or a model folder with a chat template",
        way_out="Add chat_template.jinja to the model folder, or use data.prompt_field and data.completion_field.",
        fields=("data.messages_field",),
        in_form="presets have none",
    ),
    Capability(
        id="chat_prompts",
        asks=_chat_prompts_without_template,
        why="there is no chat template to render the chats of the prompts with, and presets have none",
        allowed="texts, or a model folder with a chat template",
        way_out="Give the prompts as texts, or add chat_template.jinja to the model folder.",
        fields=("evaluation.prompts",),
        in_form="chats need a model folder with a chat template",
    ),
    Capability(
        id="mirror_of_remote",
        asks=_second_copy,
        why="a remote store holds every validated checkpoint itself, and this version makes no second copy",
        allowed="null with a remote store",
        way_out="Set checkpoint.mirror to null, or store to a local folder.",
        fields=("checkpoint.mirror",),
        in_form="only with a local store",
    ),
    Capability(
        id="fault_kinds",
        asks=_unknown_faults,
        why="no such kind of fault",
        allowed=", ".join(FAULT_KINDS),
        way_out="Name kinds from the list, or leave chaos.kinds null.",
        fields=("chaos.kinds",),
        in_form=", ".join(FAULT_KINDS),
    ),
    Capability(
        id="approval",
        asks=_approval_by_nobody,
        why="nobody can be asked: the Prefect server of this run is its own and ends with it",
        allowed="false without PREFECT_API_URL",
        way_out="Set policy.approval.required to false, or set PREFECT_API_URL to a server whose UI somebody looks at (mem serve).",
        fields=("policy.approval.required",),
        in_form="needs a Prefect server with a UI",
    ),
    Capability(
        id="mlflow",
        asks=_mlflow_without_its_extra,
        why="MLflow's client is not installed here",
        allowed="csv, without the extra mem[mlflow]",
        way_out="Install it: pip install 'mlflow-skinny>=3.17,<4'; or leave mlflow out of telemetry.loggers.",
        fields=("telemetry.loggers",),
        in_form="needs the extra mem[mlflow]",
    ),
)


def unsupported(request: RuntimeRequest, facts: Facts = NOTHING_KNOWN) -> tuple[Unsupported, ...]:
    """Everything that a request asks for and this build cannot do, in the table's order."""
    found = ((row, row.asks(request, facts)) for row in UNSUPPORTED)
    return tuple(Unsupported(row, asked) for row, asked in found if asked is not None)


def is_supported(request: RuntimeRequest, facts: Facts = NOTHING_KNOWN) -> bool:
    """Whether a request, such as one that a remedy would lead to, asks for nothing of the table."""
    return not unsupported(request, facts)


def refuse_unsupported(request: RuntimeRequest, facts: Facts = NOTHING_KNOWN) -> None:
    """Raises RequestError: the request asks for something of the table; all of it in one message."""
    found = [item.error for item in unsupported(request, facts)]
    if not found:
        return
    first, *others = found
    also = f" Also: {'; '.join(str(other) for other in others)}" if others else ""
    raise RequestError(first.problem, field=first.field, value=first.value, bound=first.bound, remedy=first.remedy + also)


def refusal(capability_id: str, field: str, value: str) -> RequestError:
    """The refusal of one row, for the place that meets it first where only a file or a folder could tell."""
    row = next(row for row in UNSUPPORTED if row.id == capability_id)
    return Unsupported(row, Asked(field, value)).error


def is_convertible(from_stage: int, to_stage: int) -> bool:
    """Whether a checkpoint of one ZeRO stage can become one of another: DeepSpeed's universal form is made of ZeRO's optimizer
    shards, which stage 0 has not."""
    return from_stage == to_stage or (from_stage > 0 and to_stage > 0)


def convertible_stages(from_stage: int) -> str:
    """The ZeRO stages that a checkpoint can be converted to, in words."""
    return "1 to 3, with any number of ranks" if from_stage else "0, with any number of ranks"
