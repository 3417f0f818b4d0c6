"""The answering process: `python -m mem_core.runtime.inference.generate_process`, one GenerateJob as a JSON line on standard input.

Composes batches, writes each down before it is answered, keeps the answers. What does not fit is composed anew, smaller. All that it has
kept stays when it is killed: the next process goes on from there.
"""

import gc
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mem_core.core.inference.composition import ModelShape, Sizing, longest_first
from mem_core.core.inference.recorded import Composed, DidNotFit, Recorded
from mem_core.domain.errors import DataError, MemoryExhausted, StoreUnavailable
from mem_core.domain.results.generation import FinishReason, GenerateOrder
from mem_core.infrastructure.machine.memory_probe import MemoryProbe
from mem_core.runtime.data.child import Say, answer_parent
from mem_core.runtime.data.encoding.joining import Tokens
from mem_core.runtime.inference.answering import Answering
from mem_core.runtime.inference.opening import device_kind, open_model
from mem_core.runtime.inference.output import write_output
from mem_core.runtime.inference.prompt_encoder import checked
from mem_core.runtime.inference.prompt_rows import PromptRows
from mem_core.runtime.inference.supervise import GenerateJob, too_large_alone
from mem_core.runtime.inference.work_folder import Answer, WorkFolder
from mem_core.runtime.ranks.worker.classify import memory_kind
from mem_core.runtime.ranks.worker.device import CpuDevice, CudaDevice, LocalDevice

KEPT_FREE = 0.1  # of the limit, for what no estimate and no earlier batch shows
TOLD_EVERY_S = 0.5


@dataclass
class Teller:
    """Tells the owner where things are, at most every `TOLD_EVERY_S`, and of each batch as it begins and ends."""

    say: Callable[[dict[str, Any]], None]
    probe: MemoryProbe
    limit_bytes: int = 0
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    told_s: float = 0.0

    def tell(self, **state: Any) -> None:
        """At once."""
        self.state |= state
        self.told_s = time.monotonic()
        self.say({**self.state, "peak_bytes": self.probe.usage().peak_bytes, "limit_bytes": self.limit_bytes})

    def beat(self) -> None:
        """When it is time."""
        if time.monotonic() - self.told_s >= TOLD_EVERY_S:
            self.tell()


class Answers(Protocol):
    """A model at work on one order, as `answering.Answering` is."""

    @property
    def shape(self) -> ModelShape:
        """What decides the memory of a batch."""
        ...

    def answers(self, rows: Sequence[int], prompts: Sequence[Tokens]) -> list[tuple[list[int], FinishReason, int]]:
        """Of each row the tokens of its answer, how it ended, and how many were made."""
        ...

    def text(self, tokens: Sequence[int]) -> str:
        """An answer as text."""
        ...


@dataclass
class Generation:
    """One order at work, of prompts whose ids are known."""

    order: GenerateOrder
    work: WorkFolder
    answering: Answers
    prompts: Sequence[Tokens]
    device: LocalDevice
    teller: Teller

    def __post_init__(self) -> None:
        new_tokens = self.order.sampling.max_new_tokens
        self._lengths = [prompt.size for prompt in self.prompts]
        self._sizing = Sizing(self.order.batch_rows, new_tokens, self.answering.shape.estimate(new_tokens))
        self._probe = self.teller.probe
        self._base_bytes = self._probe.usage().used_bytes
        self._tokens = 0

    def run(self) -> Recorded:
        """Answer every row that has no answer yet; the record when all have."""
        record = self.work.read()
        for batch in record.failed:
            self._sizing = self._sizing.failed(len(batch.rows), batch.longest)
        waiting, number, pending = longest_first(self._lengths, record.rows), record.next_number, record.pending
        while waiting:
            batch = pending or self._compose(waiting, number)
            number, pending = max(number, batch.batch + 1), None
            self.teller.tell(batch=batch.batch, batch_rows=len(batch.rows), rows_done=len(self.prompts) - len(waiting), phase="")
            if self._answered(batch):
                done = frozenset(batch.rows)
                waiting = [row for row in waiting if row not in done]
                self.teller.tell(rows_done=len(self.prompts) - len(waiting), tokens=self._tokens, kept=batch.batch)
        return self.work.read()

    def _room_bytes(self) -> float:
        """What a batch may take beside the weights, under the limit that binds now."""
        budget = self._probe.budget(self.order.budget_bytes).budget_bytes
        self.teller.limit_bytes = budget
        return (1 - KEPT_FREE) * budget - self._base_bytes

    def _compose(self, waiting: Sequence[int], number: int) -> Composed:
        longest = self._lengths[waiting[0]]
        size = self._sizing.rows_that_fit(longest, self._room_bytes())
        batch = Composed(batch=number, rows=tuple(waiting[:size]), longest=longest)
        self.work.record(batch)
        return batch

    def _answered(self, batch: Composed) -> bool:
        """Whether its answers are kept now; where it did not fit, that is written down instead."""
        measures = self._sizing.could_bind(batch.longest, self._room_bytes())
        if measures:
            self.device.release_free_memory()
            self._probe.reset_peak()
        try:
            found = self.answering.answers(batch.rows, [self.prompts[row] for row in batch.rows])
        except Exception as exc:
            if memory_kind(exc) is None:
                raise
            self._did_not_fit(batch, exc)
            return False
        self.work.keep(batch.batch, [self._answer(row, *each) for row, each in zip(batch.rows, found, strict=True)])
        self._tokens += sum(made for _, _, made in found)
        if measures:
            taken = max(0, self._probe.usage().peak_bytes - self._base_bytes)
            self._sizing = self._sizing.measured(len(batch.rows), batch.longest, taken)
        return True

    def _answer(self, row: int, tokens: list[int], reason: Any, made: int) -> Answer:
        text = self.answering.text(tokens)
        return Answer(row=row, completion=text, prompt_tokens=self._lengths[row], tokens=made, finish_reason=reason)

    def _did_not_fit(self, batch: Composed, exc: Exception) -> None:
        """Raises MemoryExhausted: it was a single row."""
        why = f"{type(exc).__name__}: {exc}"[:300]
        traceback.clear_frames(exc.__traceback__)  # they hold keys, values and activations
        exc.__traceback__ = None
        self.device.release_free_memory()
        if len(batch.rows) == 1:
            raise too_large_alone(batch.rows[0], batch.longest, self.order, why, self.teller.limit_bytes)
        self.work.record(DidNotFit(batch=batch.batch, why=why))
        self._sizing = self._sizing.failed(len(batch.rows), batch.longest)
        self.teller.tell(note=f"{len(batch.rows)} rows of {batch.longest:,} tokens did not fit; fewer are answered together")
        self.teller.state.pop("note")


def _work(line: bytes, say: Say) -> dict[str, Any]:
    job = GenerateJob.model_validate_json(line)
    try:
        return generated(job.order, say)
    except OSError as exc:
        if memory_kind(exc) is not None:
            raise _no_room(exc) from exc
        raise StoreUnavailable(
            "the answers cannot be written", field="--output", value=f"{exc.strerror}", remedy="Free space; the same command goes on."
        ) from exc
    except (MemoryError, RuntimeError) as exc:
        if memory_kind(exc) is None:
            raise
        raise _no_room(exc) from exc


def _no_room(exc: Exception) -> MemoryExhausted:
    return MemoryExhausted(
        f"the model and the prompts do not fit into memory ({type(exc).__name__})", field="--memory",
        remedy="Give more memory, --dtype bfloat16, or a smaller model.",
    )  # fmt: skip


def generated(order: GenerateOrder, say: Say) -> dict[str, Any]:
    """Answer every row that has no answer and write the output; the work folder is held by whoever calls."""
    work, rows = WorkFolder(Path(order.output)), PromptRows(Path(order.prompts), order.prompt_field, order.prefix)
    kind = device_kind(order.device)
    device: LocalDevice = CpuDevice() if kind == "cpu" else CudaDevice(0)
    teller = Teller(say, device.probe())
    teller.tell(phase="loading the model")
    model = open_model(order.model, order.dtype, kind)
    teller.tell(phase="reading prompts")
    prompts = list(model.encoder.prompts(rows.prompts()))
    if not prompts:
        raise DataError("there are no prompts", field="--prompts", value=order.prompts, remedy="Give a file with at least one row.")
    checked(prompts, order.sampling.max_new_tokens, model.facts.max_positions, model.facts.vocab_size)
    teller.tell(rows=len(prompts), device=kind, dtype=model.dtype)
    answering = Answering(model, order.sampling, teller.beat)
    record = Generation(order, work, answering, prompts, device, teller).run()
    teller.tell(phase="writing")
    result = write_output(work, rows, order, record)
    return result.model_dump(mode="json")


def main() -> None:
    """Answer the parent. What is imported by now is never looked through for garbage again, which measured batches would wait for."""
    gc.freeze()
    answer_parent(_work)


if __name__ == "__main__":
    main()
