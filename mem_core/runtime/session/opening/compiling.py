"""A run's passes are compiled in its fork server before any rank is forked, with a word about each and a deadline."""

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from mem_core.core.compilation.rule import compilation_of, hindrance_of
from mem_core.core.run.record import RunRecord
from mem_core.domain.environment import EnvironmentReport, ModelNumbers
from mem_core.domain.errors import EnvironmentUnfit
from mem_core.domain.request import RuntimeRequest
from mem_core.runtime.compiled.order import COMPILE, Compiling, key_of
from mem_core.runtime.ranks.port import HelperServer
from mem_core.runtime.ranks.worker.protocol import WorkerSpec

DEADLINE_S = 1800.0
_REMEDY = "Mend the compiler (CXX, g++ and ninja) or the folder MEM_HOME, or use model.compile: off."


def born_compiled(request: RuntimeRequest, model: ModelNumbers, environment: EnvironmentReport, note: Callable[[str], None]) -> bool:
    """Whether a run that is born now is compiled; says why not where that was asked for."""
    choice = compilation_of(request, model, environment.device, environment.dtype, request.training.max_steps)
    if request.model.compile == "on" and not choice.wanted:
        note(f"passes are not compiled, though model.compile is on: {choice.why}")
    return choice.wanted


def compiled_as_recorded(record: RunRecord) -> bool:
    """Of a run that was born before: older versions compiled where they were told to, and never by a rule."""
    recorded = record.request.model.compile == "on" if record.compiled is None else record.compiled
    return recorded and not hindrance_of(record.request)  # its shape may have changed since


def compile_ahead(server: HelperServer, spec: WorkerSpec, note: Callable[[str], None], *, born: bool) -> bool:
    """Compile what `spec` needs, where it asks for it; returns whether ranks will be compiled.

    What cannot be compiled goes on eager, and says so, unless the request insists on it. `born`: the run has done nothing yet.

    Raises:
        EnvironmentUnfit: model.compile is on, and it cannot be done, in the compiler's words.
    """
    if not spec.compiled or spec.device != "cpu":  # a device is not touched before the fork: there, ranks compile for themselves
        return spec.compiled
    started_s = time.monotonic()
    connection = server.begin_inside(COMPILE, spec, key_of(spec))
    if connection is None:
        return True
    with connection:
        problem = _heard(connection, note, started_s + DEADLINE_S)
    if not problem:
        note(f"passes are compiled ({time.monotonic() - started_s:.0f} s; what was made is kept for other starts)")
        return True
    if spec.request.model.compile == "on":
        raise EnvironmentUnfit(f"the model cannot be compiled: {problem}", field="model.compile", value="on", remedy=_REMEDY)
    server.replace()
    before = "" if born else " It was compiled before: from here on its numbers are the same up to rounding, and not to the bit."
    note(f"passes are not compiled, since that failed: {problem}.{before}")
    return False


def _heard(connection: Connection, note: Callable[[str], None], end_s: float) -> str:
    """What went wrong; empty where nothing did."""
    while True:
        try:
            if not connection.poll(max(0.0, end_s - time.monotonic())):
                return f"it was not done within {DEADLINE_S / 60:.0f} minutes"
            told: Any = connection.recv()
        except (EOFError, OSError):
            return "the process that compiled died (was memory short?)"
        if not isinstance(told, Compiling):
            return str(told)
        note(f"compiling the model once: {told.words} ({told.number} of {told.of})")
