"""Answers to a file of prompts, from the owner's side: what is there already, one process at a time that answers, what follows its death.

Nothing heavy is imported here. Whatever kills this process or the other one, the same order again goes on and comes to the same file.
"""

import hashlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mem_core.core.inference.recorded import DidNotFit, Recorded
from mem_core.domain.errors import DataError, EnvironmentUnfit, InternalError, MemoryExhausted, RequestError, StoreUnavailable
from mem_core.domain.results.generation import GenerateOrder, GenerationResult
from mem_core.domain.units import Value, format_bytes
from mem_core.infrastructure.machine.observe import usable_cores
from mem_core.infrastructure.settings import Settings, child_environment
from mem_core.infrastructure.storage.reading import open_regular
from mem_core.infrastructure.telemetry.live import Rate
from mem_core.infrastructure.telemetry.progress import Progress, ProgressView
from mem_core.runtime.inference.child import Child, Died
from mem_core.runtime.inference.opening import model_identity
from mem_core.runtime.inference.output import WAY_OUT, finish, finished_before, refuse_changed
from mem_core.runtime.inference.work_folder import WorkFolder

PROGRAM = "mem_core.runtime.inference.generate_process"
MOST_DEATHS = 5  # in a row without an answer between them


class GenerateJob(Value):
    """What the answering process is asked to do."""

    order: GenerateOrder
    parent_pid: int


def generate(order: GenerateOrder, settings: Settings, progress: Progress) -> GenerationResult:
    """Answer every row of the prompts once; `order.output` appears whole, or what is there already is answered at once.

    Raises:
        RequestError: the model cannot be used, or other answers stand there. DataError: prompts that cannot be answered. RunHeld:
        another process writes these answers. MemoryExhausted: one row, or the model, does not fit. EnvironmentUnfit: the answering
        process was killed again and again. StoreUnavailable: nothing can be written.
    """
    output = Path(order.output)
    if output.is_dir() or not output.parent.is_dir():
        what = "this is a folder" if output.is_dir() else "its folder is not there"
        raise RequestError(what, field="--output", value=output, remedy="Give the path of a file in a folder that is there.")
    identity = identity_of(order)
    try:
        work = WorkFolder(output)
        if not work.path.exists() and (found := finished_before(output, identity)) is not None:
            return found
        with work.held() as lock:
            finish(work, output)  # of whoever was killed in the middle of it
            found = finished_before(output, identity)
            if found is not None:
                work.remove()
                return found
            _begin(work, identity, output)
            result = _Supervision(order, settings, progress, work, lock).run()
            finish(work, output)
            return result
    except OSError as exc:
        raise StoreUnavailable(
            "the answers cannot be written or read", field="--output", value=f"{output}: {exc.strerror or exc}",
            remedy="Free space or give another --output; the same command goes on.",
        ) from exc  # fmt: skip


def _begin(work: WorkFolder, identity: dict[str, str], output: Path) -> None:
    try:
        before = work.identity()
    except ValueError as exc:
        raise RequestError("its partial folder is damaged", field="--output", value=work.path, remedy=WAY_OUT) from exc
    if before is None or not work.has_batches():  # what failed before its first batch holds nobody to its settings
        work.begin(identity)
    else:
        refuse_changed(before, identity, output)


def identity_of(order: GenerateOrder) -> dict[str, str]:
    """All that decides the answers, by content and by name of what it is. Reads every file of the model and the prompts.

    Raises:
        RequestError: no such model. DataError: no such prompts.
    """
    try:
        with open_regular(order.prompts) as file:
            prompts = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as exc:
        raise DataError(
            f"the prompts cannot be read: {exc.strerror}", field="--prompts", value=order.prompts, remedy="Give a file of JSONL."
        ) from exc
    sampling = {name: str(value) for name, value in order.sampling.model_dump().items()}
    named = {"prompt field": order.prompt_field or "recognised", "prefix": order.prefix, "dtype": order.dtype, "device": order.device}
    return {"model": model_identity(order.model), "prompts": prompts, **sampling, **named}


@dataclass
class _Supervision:
    """One order under the eyes of its owner."""

    order: GenerateOrder
    settings: Settings
    progress: Progress
    work: WorkFolder
    lock: int
    rate: Rate = field(default_factory=Rate)
    tokens: int = 0
    deaths: int = 0

    def run(self) -> GenerationResult:
        """Processes until one has finished; each that dies is followed by another, in bounds."""
        job = GenerateJob(order=self.order, parent_pid=os.getpid()).model_dump_json()
        while True:
            child = Child(PROGRAM, self._environment(), (self.lock,))
            before = len(self.work.read().answered)
            answer = child.ask(job, self._told)
            if not isinstance(answer, Died):
                return GenerationResult.model_validate(answer)
            record = self.work.read()
            self.deaths = 1 if len(record.answered) > before else self.deaths + 1
            self._follow(answer, record, child.told)

    def _environment(self) -> dict[str, str]:
        device = "cpu" if self.order.device == "cpu" else "cuda"
        return child_environment(self.settings, device=device, threads_per_rank=usable_cores())

    def _follow(self, died: Died, record: Recorded, told: dict[str, Any]) -> None:
        """What the next process will find; nothing to add where the batch is to be tried as it was.

        Raises:
            MemoryExhausted, EnvironmentUnfit, InternalError: there is no use in a next one.
        """
        pending = record.pending
        if pending is None and died.memory:
            raise MemoryExhausted(
                f"the model and the prompts do not fit into memory: the process was {died.how}", field="--memory",
                bound=format_bytes(told["limit_bytes"]) if told.get("limit_bytes") else "",
                remedy="Give more memory, --dtype bfloat16, or a smaller model.",
            )  # fmt: skip
        if not died.memory and not died.killed:
            raise InternalError(f"the answering process {died.words()}\n", remedy="Report this with the lines above.")
        for_memory = died.memory or self.deaths >= MOST_DEATHS
        num_rows = len(pending.rows) if pending is not None else 0
        if pending is not None and for_memory and num_rows > 1:
            why = f"the process was {died.how}"
            self.work.record(DidNotFit(batch=pending.batch, why=why))
            self.progress.note(f"{why} at {num_rows} rows of {pending.longest:,} tokens; fewer are answered together")
            self.deaths = 0
            return
        if pending is not None and died.memory:
            raise too_large_alone(min(pending.rows), pending.longest, self.order, f"the process was {died.how}")
        if self.deaths >= MOST_DEATHS:
            raise EnvironmentUnfit(
                f"the answering process was {died.how} {self.deaths} times without an answer between",
                remedy="Find out who kills it (dmesg); the same command goes on.",
            )
        self.progress.note(f"the answering process was {died.how}; another one goes on")

    def _told(self, told: dict[str, Any]) -> None:
        if told.get("note"):
            self.progress.note(str(told["note"]))
        self.rate.add(time.monotonic(), int(told.get("tokens", 0)))
        self.progress.update(
            ProgressView(
                step=int(told.get("rows_done", 0)), total_steps=int(told.get("rows", 0)), tokens_per_s=self.rate.per_s(),
                memory_bytes=told.get("peak_bytes"), memory_limit_bytes=int(told.get("limit_bytes") or 0),
                phase=str(told.get("phase", "")), unit="row",
            )
        )  # fmt: skip


def too_large_alone(row: int, longest: int, order: GenerateOrder, why: str, limit_bytes: int = 0) -> MemoryExhausted:
    """The ending of a row that does not fit even by itself."""
    return MemoryExhausted(
        f"row {row + 1:,} does not fit into memory by itself ({why})",
        field="--prompts",
        value=f"{longest:,} tokens and up to {order.sampling.max_new_tokens:,} new ones",
        bound=format_bytes(limit_bytes) if limit_bytes else "",
        remedy="Give more memory or --dtype bfloat16, lower --max-new-tokens, or leave the row out. What is answered stays.",
    )
