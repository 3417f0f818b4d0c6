"""MEM's kind of Prefect flow: says what is wrong with its parameters in MEM's words, and runs in a notebook without a server."""

import logging
from collections.abc import Callable
from inspect import signature
from typing import Any, ParamSpec, TypeVar, get_type_hints

from prefect import Flow
from prefect.exceptions import CancelledRun, ParameterTypeError
from pydantic import BaseModel, ValidationError, create_model

from flows.forms import form_of, sections_of, without_unset
from mem_core.domain.errors import Interrupted, RequestError
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.request.errors import request_error
from mem_core.infrastructure.request.file import parse_request

P = ParamSpec("P")
R = TypeVar("R")


class OrderedStops(logging.Filter):
    """A run that ended because somebody asked for it: one line in Prefect's log in place of its engine's traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always true; such a record is made plain."""
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if isinstance(error, CancelledRun):
            record.msg, record.args, record.exc_info, record.exc_text = f"cancelled as asked: {error}", (), None, None
            record.levelno, record.levelname = logging.INFO, "INFO"
        return True

    @classmethod
    def tell_in_one_line(cls) -> None:
        """In this process, from now on; once is enough."""
        logger = logging.getLogger("prefect.flow_runs")
        if not any(isinstance(each, cls) for each in logger.filters):
            logger.addFilter(cls())


class MemFlow(Flow[P, R]):
    """A flow whose `request` parameter is checked with the same messages as everywhere else, and whose form is one for people."""

    def __init__(self, fn: Callable[P, R], **options: Any) -> None:
        super().__init__(fn, **options)
        self.parameters = form_of(self.parameters)

    def validate_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Raises RequestError (all that is wrong in one message) instead of pydantic's report."""
        request = parameters.get("request")
        if isinstance(request, dict):
            given = without_unset(request, sections_of(RuntimeRequest))
            parameters = {**parameters, "request": parse_request(given)}  # overrides may still change it
        elif "request" in parameters and not isinstance(request, RuntimeRequest):
            raise RequestError(
                "this is no request", field="request", value=type(request).__name__, remedy="Give a mapping of request fields."
            )
        try:
            return super().validate_parameters(parameters)
        except ParameterTypeError as exc:
            if isinstance(exc.__context__, ValidationError):  # what Prefect made its text of
                raise request_error(exc.__context__, self._parameters_model()) from exc
            raise RequestError(f"the parameters of this flow do not fit: {exc}", remedy="Its form in the UI names them.") from exc

    def _parameters_model(self) -> type[BaseModel]:
        """The parameters as fields of a model, for their descriptions and bounds."""
        hints = get_type_hints(self.fn, include_extras=True)
        fields: dict[str, Any] = {
            name: (hints.get(name, Any), ... if given.default is given.empty else given.default)
            for name, given in signature(self.fn).parameters.items()
        }
        return create_model("Parameters", **fields)

    def __call__(self, *args: Any, return_state: bool = False, **kwargs: Any) -> Any:
        """Run it here; where no server is configured an embedded one is started first, in a notebook the progress is shown.

        Raises:
            Interrupted: the run was asked to stop. MemError: every other ending of a run that is no result.
        """
        from flows.notebook import live_progress, shown
        from flows.server.local_api import api_at_hand

        with api_at_hand(), live_progress():
            state: Any = super().__call__(*args, return_state=True, **kwargs)  # type: ignore[misc]
        if return_state:
            return state
        if state.is_cancelled():
            raise Interrupted(state.message or "stopped", remedy="")
        return shown(state.result(_sync=True))  # inside a running loop it would be a coroutine


def mem_flow(**options: Any) -> Callable[[Callable[P, R]], MemFlow[P, R]]:
    """`prefect.flow` for MemFlow; takes the same options."""
    return lambda function: MemFlow(function, **options)
