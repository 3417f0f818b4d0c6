"""Fixed prompts during training: the same training bits with and without, each answered once for each step, whatever dies meanwhile."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mem_core.core.run.state_manager import read_journal
from mem_core.domain.errors import Interrupted
from mem_core.domain.events import Sampled
from mem_core.domain.printable import printable
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.results.generation import Sampling
from mem_core.domain.run import RunResult
from mem_core.runtime.chaos.faults.view import RunView
from mem_core.runtime.inference.answering import Answering
from mem_core.runtime.inference.opening import open_model
from mem_core.runtime.inference.prompt_rows import Prompt
from mem_core.runtime.session.opening.stages import Prepared
from mem_core.runtime.session.stop_flag import StopFlag
from mem_core.testing.model_folders import model_folder
from mem_core.testing.ports import Console, with_port

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft asks transformers for it
]
Drive = Callable[..., RunResult]
Asked = Callable[..., RuntimeRequest]
STEPS, EVERY_STEPS, TOKENS = 8, 4, 8
TRAINING = {
    "max_steps": STEPS,
    "schedule_steps": STEPS,
    "segment_steps": 3,
    "global_batch_size": 4,
    "warmup_steps": 2,
    "learning_rate": 1e-2,
}
CHAT = [{"role": "user", "content": "hello"}]
PROMPTS: list[Any] = ["the quick <b>fox</b>", "hello", "the"]
LORA = {"lora": {"rank": 4, "dropout": 0.1}}
SOON_S, NEVER_S = 45.0, 240.0  # deadlines for a busy machine, not expectations


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "llama", "llama", attention_dropout=0.1)


@pytest.fixture
def asked(nano: Callable[..., RuntimeRequest], tmp_path: Path) -> Asked:
    """A request that answers the prompts, with `prompts=None` the same one that does not; no row is held out."""
    rows = [json.dumps({"text": f"{row:>3} " + "the quick fox " * (1 + row % 3)}) for row in range(40)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows) + "\n")
    data = {"train": [str(tmp_path / "train.jsonl")], "validation": None, "sequence_length": 32, "packing": False}

    def make(run_id: str, part: dict[str, Any] | None = None, parallel: dict[str, int] | None = None, **evaluation: Any) -> RuntimeRequest:
        section = {"prompts": PROMPTS, "every_steps": EVERY_STEPS, "sample_tokens": TOKENS, **evaluation}
        section = section if section["prompts"] else {}
        return nano(
            run_id,
            model=part or {},
            data=data,
            training=TRAINING,
            parallel=parallel or {},
            checkpoint={"export": "off"},
            evaluation=section,
        )

    return make


def digests(result: RunResult) -> tuple[str, str]:
    assert (result.status, result.applied_steps) == ("completed", STEPS)
    return result.trajectory_digest, result.weights_digest


def answers(result: RunResult) -> list[tuple[int, tuple[tuple[str, str, str], ...]]]:
    """(step, prompt with both answers) of every line of the journal, each time that it was written."""
    events = [line.event for line in read_journal(Path(result.run_folder) / "journal")]
    return [
        (event.found.step, tuple((sample.prompt, sample.greedy, sample.sampled) for sample in event.found.samples))
        for event in events
        if isinstance(event, Sampled)
    ]


class InSampling:
    """Does something at the third token of the answers at `step`, the first `times`."""

    def __init__(self, folder: Path, step: int, times: int, what: str) -> None:
        self.marker, self.step, self.times, self.what = folder / "met", step, times, what

    def __call__(self, runner: Any) -> None:
        beat, seen = runner.beat, [0]

        def hit(phase: str) -> None:
            beat(phase)
            seen[0] += phase == "sample"
            hits = self.marker.stat().st_size if self.marker.exists() else 0
            if phase == "sample" and seen[0] % 4 == 3 and runner.position.applied_steps == self.step and hits < self.times:
                with self.marker.open("ab") as file:
                    file.write(b".")
                self.happen()

        runner.beat = hit

    def happen(self) -> None:
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "hang":
            time.sleep(90.0)
        raise MemoryError("made up: no room for another token")


@pytest.mark.parametrize(
    ("part", "parallel"),
    [
        pytest.param({}, {}, id="whole"),
        pytest.param(LORA, {"zero_stage": 1}, id="lora", marks=pytest.mark.slow),
        pytest.param({}, {"zero_stage": 3, "num_ranks": 2}, id="two ranks, stage 3"),
        pytest.param(LORA, {"zero_stage": 3, "num_ranks": 2}, id="lora, two ranks, stage 3", marks=pytest.mark.slow),
        pytest.param({}, {"zero_stage": 2, "num_ranks": 2}, id="two ranks, stage 2", marks=pytest.mark.slow),
        pytest.param({}, {"zero_stage": 0}, id="stage 0", marks=pytest.mark.slow),
        pytest.param({"activation_checkpointing": "on"}, {}, id="recomputed", marks=pytest.mark.slow),
        pytest.param({"compile": "on"}, {}, id="compiled", marks=pytest.mark.slow),
        pytest.param({"dtype": "bfloat16"}, {"zero_stage": 3}, id="half, stage 3", marks=pytest.mark.slow),
    ],
)
def test_training_has_the_same_bits_with_and_without(part: dict[str, Any], parallel: dict[str, int], drive: Drive, asked: Asked) -> None:
    console = Console()
    with_them = drive(asked("with", part, parallel), progress=console)
    assert digests(with_them) == digests(drive(asked("without", part, parallel, prompts=None)))
    found = answers(with_them)
    assert [step for step, _ in found] == [0, EVERY_STEPS, STEPS]
    assert {tuple(prompt for prompt, _, _ in each) for _, each in found} == {tuple(PROMPTS)}
    assert found[0][1] != found[-1][1], "the weights are others"
    assert "3 prompts answered before training: 'the quick <b>fox</b>' -> " in console.text
    assert (with_them.restarts, with_them.memory.plan_changes) == (0, ())


def test_chats_and_adapters_on_a_model_folder(drive: Drive, asked: Asked, model: Path) -> None:
    """Adapters are where they train, dropout is off, and chats go through the folder's template up to the answer."""
    part = {"source": str(model), **LORA}
    with_them = drive(asked("with", part, prompts=["the quick", CHAT]))
    assert digests(with_them) == digests(drive(asked("without", part, prompts=None)))
    found = answers(with_them)
    assert [(step, [prompt for prompt, _, _ in each]) for step, each in found] == [
        (step, ["the quick", "user: hello"]) for step in (0, EVERY_STEPS, STEPS)
    ]
    assert found[0][1] != found[-1][1]
    assert [each[1:] for each in found[0][1]] == list(zip(as_generated(model, 0.0), as_generated(model, 1.0), strict=True))


def as_generated(model: Path, temperature: float) -> list[str]:
    """What `mem generate` answers to both prompts; adapters add nothing before they are trained."""
    opened = open_model(str(model), "float32", "cpu")
    prompts = list(opened.encoder.prompts([Prompt("the quick"), Prompt(messages=tuple(CHAT))]))
    answering = Answering(opened, Sampling(max_new_tokens=TOKENS, temperature=temperature, seed=0), lambda: None)
    return [printable(answering.text(tokens)) for tokens, _, _ in answering.answers((0, 1), prompts)]


def test_they_stand_in_result_page_and_tensorboard_and_a_resume_answers_none_twice(drive: Drive, asked: Asked) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    request = asked("run", every_steps=2)
    shorter = request.training.model_copy(update={"max_steps": 4})
    drive(request.model_copy(update={"training": shorter}))
    result = drive(request)
    assert [step for step, _ in answers(result)] == [0, 2, 4, 6, 8]
    assert result.samples is not None
    assert result.samples.step == STEPS
    assert tuple((one.prompt, one.greedy, one.sampled) for one in result.samples.samples) == answers(result)[-1][1]
    page = (Path(result.run_folder) / "report.html").read_text()
    assert "the quick &lt;b&gt;fox&lt;/b&gt;" in page
    assert "<b>fox" not in page
    assert page.count(">0, before training<") == 3
    accumulator = EventAccumulator(str(Path(result.run_folder) / "tensorboard")).Reload()
    assert [event.step for event in accumulator.Tensors("samples/1/text_summary")] == [0, 2, 4, 6, 8]
    without = drive(asked("ends", every_steps=None))
    assert [step for step, _ in answers(without)] == [0, STEPS]
    assert answers(without)[0] == answers(result)[0]
    assert answers(without)[-1] == answers(result)[-1]


@pytest.mark.parametrize(("what", "step", "times"), [("kill", 0, 1), ("kill", EVERY_STEPS, 2), ("memory", EVERY_STEPS, 1)])
def test_what_interrupts_the_answers_costs_them_alone(what: str, step: int, times: int, drive: Drive, asked: Asked, tmp_path: Path) -> None:
    """A rank that is killed is replaced and all prompts are answered again; what does not fit is answered in smaller passes, at once."""
    hit = drive(asked("hit"), options=with_port(InSampling(tmp_path, step, times, what)))
    assert (tmp_path / "met").stat().st_size == times
    assert bool(hit.restarts) == (what == "kill")
    assert hit.memory.plan_changes == ()
    clean = drive(asked("clean", prompts=None))
    assert digests(hit) == digests(clean)
    assert [step for step, _ in answers(hit)] == [0, EVERY_STEPS, STEPS]


def test_answers_that_never_come_to_an_end_end_no_run(drive: Drive, asked: Asked, tmp_path: Path) -> None:
    console = Console()
    hit = drive(asked("hit"), options=with_port(InSampling(tmp_path, EVERY_STEPS, 99, "kill")), progress=console)
    assert digests(hit)
    assert [step for step, _ in answers(hit)] == [0, STEPS]
    assert f"no answers to prompts after step {EVERY_STEPS}: the workers died in each try" in console.text


class StopMeanwhile(Console):
    """Asks for a stop, as a signal does, once a rank hangs in its answers."""

    def __init__(self, marker: Path) -> None:
        super().__init__()
        self.marker, self.asked_s = marker, 0.0
        self.stop: StopFlag | None = None

    def prepared(self, prepared: Prepared) -> None:
        self.stop = prepared.held.order.stop

    def update(self, view: Any) -> None:
        if self.stop is not None and not self.stop and self.marker.exists():
            self.asked_s = time.monotonic()
            self.stop.ask("SIGINT")


@pytest.mark.parametrize("step", [0, pytest.param(STEPS, marks=pytest.mark.slow)])
def test_a_stop_is_obeyed_in_the_middle_of_an_answer(step: int, drive: Drive, asked: Asked, tmp_path: Path) -> None:
    port = InSampling(tmp_path, step, 1, "hang")
    stopper = StopMeanwhile(port.marker)
    with pytest.raises(Interrupted, match=f"stopped by SIGINT at validated step {step}"):
        drive(asked("stopped"), options=with_port(port), progress=stopper, prepared=stopper.prepared)
    assert time.monotonic() - stopper.asked_s < SOON_S
    again = drive(asked("stopped"))
    assert [step for step, _ in answers(again)] == [0, EVERY_STEPS, STEPS]


@pytest.mark.slow
def test_a_driver_killed_in_its_answers_leaves_nothing_and_they_are_done_again(drive: Drive, asked: Asked, tmp_path: Path) -> None:
    """`kill -9` of the driving process before training, in the middle and at the end, the same request again each time."""
    request, view = asked("killed", sample_tokens=400), RunView(tmp_path / "killed")
    (tmp_path / "request.json").write_text(request.model_dump_json())
    for step in (0, EVERY_STEPS, STEPS):
        kill_in_answers(tmp_path, view, step)
        end_s = time.monotonic() + 15.0
        while left := view.leftovers():
            assert time.monotonic() < end_s, left
            time.sleep(0.05)
    again, clean = drive(request), drive(asked("clean", sample_tokens=400))
    assert digests(again) == digests(clean)
    assert answers(again) == answers(clean)


def kill_in_answers(folder: Path, view: RunView, step: int) -> None:
    """Start the driver; SIGKILL once rank 0 answers prompts at `step`."""
    program = [sys.executable, "-m", "mem_core.testing.driver", str(folder / "request.json")]
    with (folder / "driver.log").open("ab") as log:
        driver = subprocess.Popen(program, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    end_s = time.monotonic() + NEVER_S
    try:
        while not ((sign := view.sign()) is not None and (sign.beat.phase, sign.steps) == ("sample", step)):
            assert driver.poll() is None, (folder / "driver.log").read_text()[-2_000:]
            assert time.monotonic() < end_s, "the moment never came"
            view.processes()
            time.sleep(0.01)
        view.processes()
        assert driver.poll() is None
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
