"""Whether a run is compiled: by arithmetic alone, the same for equal requests; and what follows from a compiler that fails."""

from multiprocessing import Pipe
from typing import Any

import pytest

from mem_core.core.compilation.rule import compilation_of, compile_s, expected_s
from mem_core.core.run.record import RunRecord
from mem_core.domain.environment import ModelNumbers
from mem_core.domain.errors import EnvironmentUnfit
from mem_core.domain.plan import MemoryPlan
from mem_core.domain.request import RuntimeRequest
from mem_core.runtime.compiled.order import Compiling, key_of
from mem_core.runtime.ranks.worker.protocol import WorkerSpec
from mem_core.runtime.session.opening.compiling import compile_ahead, compiled_as_recorded

NANO = ModelNumbers(num_parameters=57_536, num_layers=1, hidden_size=64, vocab_size=259)
LONG, SHORT = 1_000_000, 100


def request_of(**sections: Any) -> RuntimeRequest:
    return RuntimeRequest.model_validate({"run_id": "a", "device": "cpu"} | sections)


def test_a_long_run_is_compiled_and_a_short_one_is_not() -> None:
    short, long = (compilation_of(request_of(), NANO, "cpu", "float32", steps) for steps in (SHORT, LONG))
    assert (short.wanted, long.wanted) == (False, True)
    assert "too few" in short.why
    assert expected_s(request_of(), NANO, LONG) > 10 * compile_s(NANO) > expected_s(request_of(), NANO, SHORT)


@pytest.mark.parametrize(("mode", "wanted"), [("on", True), ("off", False)])
def test_what_was_asked_for_is_done_whatever_the_length(mode: str, wanted: bool) -> None:
    for steps in (SHORT, LONG):
        assert compilation_of(request_of(model={"compile": mode}), NANO, "cpu", "float32", steps).wanted is wanted


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_stage_three_and_a_routers_loss_stay_eager_and_say_so(mode: str) -> None:
    model = {"compile": mode}
    stage = compilation_of(request_of(model=model, parallel={"zero_stage": 3}), NANO, "cpu", "float32", LONG)
    router = compilation_of(request_of(model=model), NANO.model_copy(update={"router_loss": True}), "cpu", "float32", LONG)
    assert (stage.wanted, router.wanted) == (False, False)
    assert "stage 3" in stage.why
    assert "router" in router.why


@pytest.mark.parametrize(("device", "dtype"), [("cuda", "bfloat16"), ("cpu", "bfloat16"), ("cuda", "float32")])
def test_auto_is_for_what_was_measured(device: str, dtype: str) -> None:
    assert not compilation_of(request_of(), NANO, device, dtype, LONG).wanted
    assert compilation_of(request_of(model={"compile": "on"}), NANO, device, dtype, LONG).wanted


def record_of(compiled: bool | None, **sections: Any) -> RunRecord:
    return RunRecord(
        run_id="a", request=request_of(**sections), device="cpu", dtype="float32", default_plan=MemoryPlan(micro_batch_rows=1),
        data_fingerprint="", model_fingerprint="", compiled=compiled,
    )  # fmt: skip


def test_a_run_of_an_older_version_goes_on_as_it_was_told() -> None:
    assert not compiled_as_recorded(record_of(None))
    assert compiled_as_recorded(record_of(None, model={"compile": "on"}))
    assert compiled_as_recorded(record_of(True))
    assert not compiled_as_recorded(record_of(True, parallel={"zero_stage": 3}))  # converted since


class Server:
    """A fork server whose compiler says what it is told to say."""

    def __init__(self, *said: Any) -> None:
        self.said, self.replaced = said, 0

    def begin_inside(self, entry: str, order: Any, key: str) -> Any:
        ours, theirs = Pipe()
        for each in self.said:
            theirs.send(each)
        theirs.close()
        return ours

    def replace(self) -> None:
        self.replaced += 1


def spec_of(mode: str = "auto", **changes: Any) -> WorkerSpec:
    plan = MemoryPlan(micro_batch_rows=8)
    values: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_threads": 1, "compiled": True} | changes
    return WorkerSpec(
        request=request_of(model={"compile": mode}), data_folder="rows", validation_folder=None, pad_token_id=0, default_plan=plan, **values
    )


def test_each_pass_is_told_while_it_is_compiled() -> None:
    notes: list[str] = []
    server: Any = Server(Compiling(1, 2, "one row, full"), Compiling(2, 2, "one row, padded"), "")
    assert compile_ahead(server, spec_of(), notes.append, born=True)
    assert [note.partition(":")[2] for note in notes[:2]] == [" one row, full (1 of 2)", " one row, padded (2 of 2)"]
    assert notes[2].startswith("passes are compiled (")


@pytest.mark.parametrize("said", [("CppCompileError: no g++",), ()], ids=["failed", "died"])
def test_a_compiler_that_fails_leaves_auto_eager_aloud_and_ends_on(said: tuple[str, ...]) -> None:
    notes: list[str] = []
    server: Any = Server(*said)
    assert not compile_ahead(server, spec_of(), notes.append, born=True)
    assert server.replaced == 1
    assert notes[0].startswith("passes are not compiled, since that failed:")
    assert "not to the bit" not in notes[0]
    with pytest.raises(EnvironmentUnfit, match=r"the model cannot be compiled.*model.compile: off"):
        compile_ahead(server, spec_of("on"), notes.append, born=True)


def test_a_run_that_was_compiled_and_goes_on_eager_is_told_what_that_means() -> None:
    notes: list[str] = []
    server: Any = Server("CppCompileError: no g++")
    assert not compile_ahead(server, spec_of(), notes.append, born=False)
    assert "not to the bit" in notes[0]


def test_eager_runs_and_devices_compile_nothing_ahead() -> None:
    server: Any = None
    assert not compile_ahead(server, spec_of(compiled=False), print, born=True)
    assert compile_ahead(server, spec_of(device="cuda"), print, born=True)


def test_what_decides_the_code_is_in_its_key() -> None:
    base = key_of(spec_of())
    assert base == key_of(spec_of(deadline_s=1.0))
    assert len({base, key_of(spec_of(num_threads=2)), key_of(spec_of(dtype="bfloat16")), key_of(spec_of("on"))}) == 4
