"""From a flow's parameters to the request that is run: overrides, names by date, and what a deployment may not leave open."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field

from mem_core.domain.capabilities import refuse_unsupported
from mem_core.domain.errors import RequestError
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.units import format_bytes
from mem_core.infrastructure.machine.store import is_remote
from mem_core.infrastructure.request.file import apply_overrides, parse_request

MAX_SUBMITTED_BYTES = 65_536
RunId = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
# What the two UIs of Prefect fill in by themselves: a star, as in "rho33-kaldra", or a dish, as in "Tasty-Coq".
_STARS = "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|omicron|pi|rho|sigma|tau|upsilon|phi|chi|psi|omega"
_DISHES = (
    "Awesome|Rustic|Small|Gorgeous|Fantastic|Sleek|Intelligent|Unbranded|Refined|Licensed|Generic|Practical|Ergonomic|Handcrafted|Tasty|"
    "Handmade|Incredible"
)
_MADE_UP_IN_FORMS = re.compile(rf"^(({_STARS})\d*-[a-z-]+|({_DISHES})-[A-Z]\w*)$")


@dataclass(frozen=True)
class FirstFields:
    """What a form asks first, beside the whole request; None where the request decides."""

    run_id: str | None = None
    model: str | None = None
    data: str | Sequence[str] | None = None
    max_steps: int | None = None
    global_batch_size: int | None = None
    learning_rate: float | None = None

    @classmethod
    def among(cls, parameters: Mapping[str, Any]) -> "FirstFields":
        """Those of a flow's parameters."""
        return cls(**{field.name: parameters.get(field.name) for field in fields(cls)})

    def overrides(self) -> dict[str, Any]:
        """The same by the dotted names of the request."""
        named = {
            "run_id": self.run_id,
            "model.source": self.model,
            "data.train": self.data,
            "training.max_steps": self.max_steps,
            "training.global_batch_size": self.global_batch_size,
            "training.learning_rate": self.learning_rate,
        }
        return {name: value for name, value in named.items() if value is not None}


def refuse_large(parameters: Mapping[str, Any]) -> None:
    """What is submitted is kept by Prefect, shown in its UI and sent to each worker: data does not belong into it.

    Raises:
        RequestError: more than MAX_SUBMITTED_BYTES as JSON.
    """
    plain = {name: value.model_dump(mode="json") if isinstance(value, RuntimeRequest) else value for name, value in parameters.items()}
    size_bytes = {name: len(json.dumps(value, default=str, skipkeys=True).encode()) for name, value in plain.items() if value is not None}
    if sum(size_bytes.values()) > MAX_SUBMITTED_BYTES:
        raise RequestError(
            "this is too large to be submitted",
            field=max(size_bytes, key=lambda name: size_bytes[name]),
            value=format_bytes(sum(size_bytes.values())),
            bound=f"{format_bytes(MAX_SUBMITTED_BYTES)} in all",
            remedy="Pass a path: write the rows to a file that the worker can read, and name it in data.train.",
        )


def settled_request(
    request: RuntimeRequest, overrides: Mapping[str, Any] | None, *, deployed: bool, start_unix_s: float, refuse: bool = True
) -> RuntimeRequest:
    """The request with overrides applied. `refuse`: what this build cannot do is an error; the doctor says it among its findings.

    `{date}` and `{week}` in an overridden run_id become the day or ISO week of the flow run's first start, so that a weekly
    schedule trains anew each week, while late runs of one week and retries are the same run.

    Raises:
        RequestError: an override or the result is wrong or not supported, or a deployment has a relative store.
    """
    if overrides:
        named = {name: _dated(value, start_unix_s) if name == "run_id" else value for name, value in overrides.items()}
        pairs = [f"{name}={json.dumps(value)}" for name, value in named.items()]
        request = parse_request(apply_overrides(request.model_dump(mode="json"), pairs))
    if refuse:
        refuse_unsupported(request)
    if deployed:
        refuse_relative_store(request.store)
    return request


def _dated(value: Any, start_unix_s: float) -> Any:
    if not isinstance(value, str):
        return value
    start = time.localtime(start_unix_s)
    return value.replace("{date}", time.strftime("%Y-%m-%d", start)).replace("{week}", time.strftime("%G-w%V", start))


def refuse_relative_store(store: str) -> None:
    """A worker elsewhere would resolve it against another folder and start a new run in silence.

    Raises:
        RequestError: neither absolute, nor below the home folder (`~/...`), nor a URL.
    """
    path = store.removeprefix("file://")
    if not is_remote(store) and not path.startswith(("/", "~")):
        raise RequestError(
            "a relative store means another folder on each worker, so a deployment refuses it",
            field="store",
            value=store,
            bound="an absolute path, ~/..., or a URL such as s3://bucket/prefix",
            remedy='Set store to such a place, for example with overrides {"store": "~/mem/runs"}.',
        )


def name_beside(name: str, run_id: str) -> str:
    """What a flow run is called: the name that somebody typed with the run id beside it, else the run id.

    A retried flow run has such a name already. Where nobody typed one, Prefect and the forms of its UI make one up.
    """
    if name == run_id or name.endswith(f"({run_id})"):
        return name
    words = name.split("-")
    made_up = (len(words) == 2 and _made_up_words().issuperset(words)) or _MADE_UP_IN_FORMS.match(name)
    return run_id if not name.strip() or made_up else f"{name} ({run_id})"


def run_id_in(name: str) -> str:
    """The run id in what `name_beside` made."""
    found = re.search(r" \(([a-z0-9-]+)\)$", name)
    return found.group(1) if found else name


@lru_cache(maxsize=1)
def _made_up_words() -> frozenset[str]:
    """The words that Prefect's names are made of."""
    from coolname.data import config

    return frozenset(word for entry in config.values() if isinstance(entry, dict) for word in entry.get("words", ()))
