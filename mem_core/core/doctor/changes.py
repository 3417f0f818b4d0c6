"""Changes of a request that need less memory, each in the request's own words. What this build cannot do is never among them."""

from mem_core.domain.capabilities import Facts, unsupported
from mem_core.domain.environment import ModelNumbers
from mem_core.domain.request import LoraSection, RuntimeRequest

Change = tuple[str, RuntimeRequest]


def with_values(request: RuntimeRequest, section: str, **values: object) -> RuntimeRequest:
    """The request with other values in one section."""
    return request.model_copy(update={section: getattr(request, section).model_copy(update=values)})


def offload(request: RuntimeRequest, model: ModelNumbers | None, device: str) -> tuple[Change, ...]:
    """The optimizer's state in host memory, where that is another memory than the one that trains; else nothing."""
    if device != "cuda" or request.parallel.offload_optimizer != "none":
        return ()
    return _if_possible("parallel.offload_optimizer: cpu", request, with_values(request, "parallel", offload_optimizer="cpu"), model)


def adapters(request: RuntimeRequest, model: ModelNumbers) -> tuple[Change, ...]:
    """Low-rank adapters instead of every weight, where they can be trained; else nothing."""
    if request.model.lora is not None or request.model.freeze:
        return ()
    return _if_possible("model.lora: {rank: 8}", request, with_values(request, "model", lora=LoraSection()), model)


def _if_possible(words: str, request: RuntimeRequest, changed: RuntimeRequest, model: ModelNumbers | None) -> tuple[Change, ...]:
    """The change, unless it asks for something unsupported that the request does not ask for already."""
    before, after = ({item.capability.id for item in unsupported(asked, Facts(model=model))} for asked in (request, changed))
    return ((words, changed),) if after <= before else ()
