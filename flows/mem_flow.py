"""MEM's kind of Prefect flow: says what is wrong with its parameters in MEM's words, and runs in a notebook without a server."""

import logging
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, ParamSpec, TypeVar, get_type_hints

from prefect import Flow
from prefect.exceptions import CancelledRun, ParameterTypeError
from pydantic import BaseModel, ValidationError, create_model

from flows.prefect_view.forms import form_of, sections_of, without_unset
from mem_core.domain.errors import InternalError, Interrupted, MemError, RequestError
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.infrastructure.request.errors import request_error
from mem_core.infrastructure.request.file import parse_request
from tasks.running import DRIVEN

P = ParamSpec("P")
R = TypeVar("R")
Answer = Callable[[Mapping[str, Any]], RunResult | None]
"""From checked parameters to the result of a run that has already done what they ask; None where something is left to do."""


class PlainEndings(logging.Filter):
    """In Prefect's log a MemError is its own few lines, in place of a traceback through Prefect's engine; a run that ended because
    somebody asked for it is one line, and no error."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always true; such a record is made plain."""
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if isinstance(error, CancelledRun):
            record.msg, record.levelno, record.levelname = f"cancelled as asked: {error}", logging.INFO, "INFO"
        elif isinstance(error, MemError) and not isinstance(error, InternalError):  # a fault of ours is found by its traceback
            record.msg = "\n".join(error.lines())
        else:
            return True
        record.args, record.exc_info, record.exc_text = (), None, None
        return True

    @classmethod
    def begin(cls) -> None:
        """In this process, from now on; once is enough."""
        for name in ("prefect.flow_runs", "prefect.task_runs"):
            logger = logging.getLogger(name)
            if not any(isinstance(each, cls) for each in logger.filters):
                logger.addFilter(cls())


class MemFlow(Flow[P, R]):
    """A flow whose `request` parameter is checked with the same messages as everywhere else, and whose form is one for people.

    `answer` is asked first where the flow is called from Python: a finished run needs neither a server nor a flow run.
    """

    def __init__(self, fn: Callable[P, R], answer: Answer = lambda parameters: None, **options: Any) -> None:
        super().__init__(fn, **options)
        self.parameters = form_of(self.parameters)
        self._answer = answer

    def validate_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Raises RequestError (all that is wrong in one message) instead of pydantic's report. Prefect asks at the start of each run."""
        PlainEndings.begin()
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
        from flows.notebook import live_progress, say_complete, shown
        from flows.server.local_api import api_at_hand

        finished = None if return_state or DRIVEN.has_surroundings else self._finished(args, kwargs)
        if finished is not None:
            say_complete(finished.run_id)
            return shown(finished)
        with api_at_hand(), live_progress() as ended:
            state: Any = super().__call__(*args, return_state=True, **kwargs)  # type: ignore[misc]
            ended(state)
        if return_state:
            return state
        if state.is_cancelled():
            raise Interrupted(state.message or "stopped", remedy="")
        return shown(state.result(_sync=True))  # inside a running loop it would be a coroutine

    def _finished(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RunResult | None:
        """Raises MemError: the parameters are wrong, or the run cannot go on with them."""
        own = {name: value for name, value in kwargs.items() if name != "wait_for"}  # Prefect's word, as return_state is
        try:
            given = signature(self.fn).bind(*args, **own)
        except TypeError as exc:
            raise RequestError(
                f"the parameters of {self.name} do not fit: {exc}", remedy="See its signature, or its form in the UI."
            ) from exc
        given.apply_defaults()
        return self._answer(self.validate_parameters(dict(given.arguments)))


def mem_flow(**options: Any) -> Callable[[Callable[P, R]], MemFlow[P, R]]:
    """`prefect.flow` for MemFlow; takes the same options, and `answer`."""
    return lambda function: MemFlow(function, **options)
