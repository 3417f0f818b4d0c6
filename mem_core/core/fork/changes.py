"""What a fork may change: what a resume may, and what leaves the state usable. Pure.

The state is weights, optimizer moments, loss scale, and a position: how many batches of which rows were consumed. What gives these
another meaning (another model, other rows, another batch size) is refused by name; what is read anew at every step (the learning rate,
its schedule, weight decay, clipping) may change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mem_core.core.results.length import RunLength, asks_for_length, in_steps
from mem_core.core.run.reconcile import ALLOWED_CHANGES, differences
from mem_core.domain.errors import RequestError
from mem_core.domain.request import RuntimeRequest, shown_request

FORK_CHANGES = (
    "training.learning_rate", "training.schedule", "training.schedule_steps", "training.min_lr_ratio", "training.warmup_steps",
    "training.weight_decay", "training.betas", "training.eps", "training.gradient_clip_norm", "model.compile",
)  # fmt: skip
ALLOWED = "the learning rate and its schedule, steps, weight decay, betas, eps, clipping, and what a resume may change"
_ANEW = "Begin another run with the weights instead: mem export RUN, and the folder as model.source."
# Field or section -> (why it stays, the way out); the first that fits speaks.
_STAYS: tuple[tuple[str, str, str], ...] = (
    ("run_id", "the name of the fork is its second argument", "Leave it out of --set."),
    ("training.max_steps", "it would end before the step that it begins with", "Ask for more steps, or fork an earlier step."),
    ("training.loss_scale_initial_power", "the loss scale goes on from the state and would not be looked at", "Leave it out."),
    ("training.global_batch_size", "which rows come next is counted in batches of this size", _ANEW),
    ("training.seed", "which rows come next, and which are held out, follows from it", _ANEW),
    ("parallel", "the state was saved for this shape", "Fork it as it is, then train it with mem train --allow-reshard."),
    ("memory.micro_batch_size", "how batches are split is recorded with the state", "Set memory.mode or memory.budget instead."),
    ("model", "the state is that of this model", _ANEW),
    ("data", "the position counts batches of these rows: others would be skipped or seen twice", _ANEW),
    ("device", "the state goes on where it was made", "Leave it out, or begin another run with the exported weights."),
    ("deepspeed", "the engine's own keys decide what its state looks like", _ANEW),
)


@dataclass(frozen=True)
class Change:
    """One field with its value in the origin and in the fork, as plain JSON."""

    field: str
    before: Any
    after: Any

    def words(self) -> str:
        """`training.learning_rate 0.0003 -> 0.0001`."""
        return f"{self.field} {_shown(self.before)} -> {_shown(self.after)}"


@dataclass(frozen=True)
class Branch:
    """What a fork is asked to be. `request` speaks steps; `changes` are in the order of their names."""

    request: RuntimeRequest
    changes: tuple[Change, ...]

    @property
    def same_course(self) -> bool:
        """Whether nothing that enters the numbers was changed: then it goes on as the origin did, to the bit."""
        return all(_is_under(change.field, ALLOWED_CHANGES) for change in self.changes)


def values_to_change(stored: RuntimeRequest, new_id: str, named: Sequence[str]) -> dict[str, Any]:
    """The origin's request as plain values under the fork's name, before anything is set. `named`: the fields that will be set; where
    one of them stands for another (epochs for steps), the other goes back to its default."""
    values = shown_request(stored).model_dump(mode="json")
    values["run_id"] = new_id
    training = values["training"]
    for one, other in (("epochs", "max_steps"), ("warmup_ratio", "warmup_steps")):
        if f"training.{one}" in named and f"training.{other}" not in named:
            del training[other]
    return values


def branched(stored: RuntimeRequest, asked: RuntimeRequest, length: RunLength, step: int) -> Branch:
    """The fork of a run with request `stored` at `step`, if everything that `asked` changes may be changed.

    Raises:
        RequestError: one of them may not, with why and the way out.
    """
    request = _in_steps(asked, length)
    if request.training.schedule_steps is None:
        training = request.training.model_copy(update={"schedule_steps": request.training.max_steps})
        request = request.model_copy(update={"training": training})
    old, new = (shown_request(each).model_dump(mode="json") for each in (stored, request))
    found = tuple(Change(*difference) for difference in sorted(differences(old, _named_as(new, old)), key=lambda item: item[0]))
    for change in found:
        if not _is_under(change.field, (*ALLOWED_CHANGES, *FORK_CHANGES)):
            raise _refused(stored, change)
    if request.training.max_steps < step:
        raise _refused(stored, Change("training.max_steps", stored.training.max_steps, request.training.max_steps), f"at least {step}")
    return Branch(request, found)


def horizon_words(branch: Branch) -> str:
    """What people should know of a schedule whose end stays where it was while the steps changed; empty where nothing is to be said."""
    names = {change.field for change in branch.changes}
    if "training.max_steps" not in names or "training.schedule_steps" in names or branch.request.training.schedule == "constant":
        return ""
    horizon = branch.request.training.schedule_steps
    return f"the schedule still ends at step {horizon:,}, as the origin's does; --set training.schedule_steps=... moves it"


def _in_steps(asked: RuntimeRequest, length: RunLength) -> RuntimeRequest:
    if not asks_for_length(asked):
        return asked
    if length.num_rows is None:
        raise RequestError(
            "the record of the origin is of a version that did not keep how many rows an epoch has",
            field="training.epochs", value=asked.training.epochs, remedy="Ask for training.max_steps and training.warmup_steps instead.",
        )  # fmt: skip
    return in_steps(asked, length.num_rows)


def _named_as(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """The name differs by intent, and where the folder lies is no part of what is asked."""
    return {**new, "run_id": old["run_id"], "store": old["store"]}


def _refused(stored: RuntimeRequest, change: Change, bound: str = "") -> RequestError:
    default = ("", "a fork cannot change it", "Leave it out.")
    _, why, way_out = next((row for row in _STAYS if _is_under(change.field, (row[0],))), default)
    return RequestError(
        f"run {stored.run_id} has {_shown(change.before)} there, and {why}",
        field=change.field,
        value=_shown(change.after),
        bound=bound or ALLOWED,
        remedy=way_out,
    )


def _is_under(field: str, names: Sequence[str]) -> bool:
    return any(field == name or field.startswith(f"{name}.") for name in names)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)
