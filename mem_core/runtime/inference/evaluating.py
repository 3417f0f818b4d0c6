"""Figures of a data file, from the owner's side: prepared as for training, looked at in a process of its own."""

import os
from dataclasses import dataclass

from mem_core.domain.errors import EnvironmentUnfit, InternalError
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.results.evaluation import SetFigures
from mem_core.domain.results.generation import InferenceDevice, InferenceDtype
from mem_core.domain.units import Value
from mem_core.infrastructure.machine.observe import usable_cores
from mem_core.infrastructure.settings import Settings, child_environment
from mem_core.infrastructure.telemetry.progress import PreparingView, Progress
from mem_core.runtime.data.encoding.prepare import prepare_data
from mem_core.runtime.data.values import PreparedData, PrepareProgress
from mem_core.runtime.inference.child import Child, Died
from mem_core.runtime.inference.opening import Source
from mem_core.runtime.models.encoding import CURRENT_RULES
from mem_core.runtime.models.facts import describe_model

PROGRAM = "mem_core.runtime.inference.evaluate_process"
MOST_DEATHS = 3
ONE_ROW = 1  # tokens of a pass: less than any row, and one row is always allowed


class EvaluateJob(Value):
    """What is looked at: token shards in `data_folder`, prepared under `request`, whose global batch is what is padded alike."""

    model: str
    request: RuntimeRequest
    data_folder: str
    pad_token_id: int
    dtype: InferenceDtype = "auto"
    device: InferenceDevice = "auto"
    budget_bytes: int | None = None
    most_tokens: int | None = None
    parent_pid: int


@dataclass(frozen=True)
class Asked:
    """Which model looks at which rows. `request` holds the rows as its training data; `tokenizer` is whose tokens they become, under
    `rules`."""

    model: str
    request: RuntimeRequest
    tokenizer: str
    rules: int = CURRENT_RULES
    dtype: InferenceDtype = "auto"
    device: InferenceDevice = "auto"
    budget_bytes: int | None = None

    @classmethod
    def tokenizer_of(cls, model: str) -> str:
        """The folder or preset whose tokenizer a model brings. Raises RequestError: no such model."""
        return Source.of(model).tokenizer()

    @classmethod
    def source_of(cls, model: str) -> str:
        """The folder or preset whose positions and embeddings it has: of adapters that of their model. Raises RequestError."""
        return Source.of(model).source


def evaluate(asked: Asked, settings: Settings, progress: Progress) -> SetFigures:
    """Loss, perplexity and accuracy of every row.

    Raises:
        RequestError, DataError: the model or the rows cannot be used. MemoryExhausted: not even one row fits. EnvironmentUnfit: the
        process was killed again and again.
    """
    prepared = _prepared(asked, settings, progress)
    for note in prepared.notes:
        progress.note(note)
    environ = child_environment(settings, device="cpu" if asked.device == "cpu" else "cuda", threads_per_rank=usable_cores())
    most_tokens, died = None, None
    for _ in range(MOST_DEATHS):
        job = EvaluateJob(
            model=asked.model, request=asked.request, data_folder=prepared.train_dir, pad_token_id=prepared.pad_token_id,
            dtype=asked.dtype, device=asked.device, budget_bytes=asked.budget_bytes, most_tokens=most_tokens, parent_pid=os.getpid(),
        )  # fmt: skip
        answer = Child(PROGRAM, environ).ask(job.model_dump_json(), lambda told: None)
        if not isinstance(answer, Died):
            return SetFigures.model_validate(answer)
        if not answer.killed and not answer.memory:
            raise InternalError(f"the evaluating process {answer.words()}\n", remedy="Report this with the lines above.")
        died, most_tokens = answer, ONE_ROW
        progress.note(f"the evaluating process was {died.how}; another one goes row by row")
    raise EnvironmentUnfit(
        f"the evaluating process was {died.how if died else 'lost'} {MOST_DEATHS} times",
        remedy="Find out who kills it (dmesg), give more memory or a smaller model.",
    )


def _prepared(asked: Asked, settings: Settings, progress: Progress) -> PreparedData:
    def show(done: PrepareProgress) -> None:
        progress.update(PreparingView(done.bytes_done, done.bytes_total, done.rows, done.tokens, done.phase))

    vocab_size = describe_model(Source.of(asked.model).source).vocab_size
    data = asked.request.data
    return prepare_data(data, asked.request.training.seed, asked.tokenizer, vocab_size, settings.data_cache_dir, show, asked.rules)
