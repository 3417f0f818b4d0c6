"""Hugging Face's Trainer inside a rank of a MEM run, in turns: so many steps of one, so many of the other, in the same process.

`InTurns` is a port for `WorkerSpec.on_built`. MEM's steps are those of its own loop, with all that it does beside forward, backward and
update; the Trainer's are those of `Trainer.train`. Both see the same rows, threads and model class. Only one of them runs at a time, so a
busy machine slows both alike, and the process's CPU time belongs to whoever's turn it is.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # with them the Trainer would make a group of its own


@dataclass(frozen=True)
class Block:
    """What one turn came to."""

    who: str
    wall_s: float
    cpu_s: float
    trained_tokens: int


@dataclass(frozen=True)
class InTurns:
    """`answer`: the file that blocks are written to; the first `warm_up` blocks of each are left out. `padded_rows`: the Trainer's own
    rows, in the order of their file; empty: those of the run, batch by batch the same. `lengthen`: the Trainer does so many times the
    steps in its turn, where its batches are smaller."""

    answer: str
    pairs: int
    block_steps: int
    warm_up: int = 2
    padded_rows: str = ""
    lengthen: int = 1
    torch_compile: bool = False

    def __call__(self, runner: Any) -> None:
        """Stand in front of the runner's step."""
        Turns(self, runner).begin()


class Turns:
    """Two threads of which one waits: the rank's own, which trains MEM's steps, and the Trainer's."""

    def __init__(self, asked: InTurns, runner: Any) -> None:
        self.asked, self.runner = asked, runner
        self.blocks: list[Block] = []
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._problem: BaseException | None = None
        self._steps, self._tokens = 0, 0
        self._began = (0.0, 0.0)

    def begin(self) -> None:
        """From now on MEM's steps are counted and the Trainer has its turn after each block of them."""
        step: Callable[..., None] = self.runner._step
        block_steps = self.asked.block_steps

        def counted_step(*arguments: Any) -> None:
            if self._steps == 0:
                self.start_clock()
            before = self.runner.position.tokens
            step(*arguments)
            self._steps, self._tokens = self._steps + 1, self._tokens + self.runner.position.tokens - before
            if self._steps == block_steps:
                self.stop_clock("MEM", self._tokens)
                self._steps = self._tokens = 0
                self._other_turn()

        self.runner._step = counted_step
        threading.Thread(target=self._trainer_thread, name="trainer", daemon=True).start()

    def start_clock(self) -> None:
        """A block begins."""
        self._began = (time.perf_counter(), time.process_time())

    def stop_clock(self, who: str, trained_tokens: int) -> None:
        """A block is over."""
        wall_s, cpu_s = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        self.blocks.append(Block(who, wall_s, cpu_s, trained_tokens))

    def _other_turn(self) -> None:
        import torch

        torch.compiler.set_stance("default")  # MEM's rank compiles nothing anew; the Trainer may
        self._go.release()
        self._done.acquire()
        if self.runner.engine.compiled:
            torch.compiler.set_stance("eager_on_recompile")
        if self._problem is not None:
            raise RuntimeError("the Trainer failed") from self._problem
        num = self.asked.warm_up
        kept = [block for who in ("MEM", "Trainer") for block in [each for each in self.blocks if each.who == who][num:]]
        Path(self.asked.answer).write_text(json.dumps([asdict(block) for block in kept]))

    # -- the Trainer's side ---------------------------------------------------------------------------------------------

    def wait_for_turn(self) -> None:
        """In the Trainer's thread: until MEM has done a block."""
        self._go.acquire()
        self.start_clock()

    def give_back(self, trained_tokens: int) -> None:
        """In the Trainer's thread: its block is over."""
        self.stop_clock("Trainer", trained_tokens)
        self._done.release()

    def _trainer_thread(self) -> None:
        try:
            self._go.acquire()
            for name in RANK_VARIABLES:
                os.environ.pop(name, None)
            trainer = make_trainer(self)
            trainer.train()
        except BaseException as exc:  # noqa: BLE001 - the rank's own thread tells it
            self._problem = exc
            self._done.release()


class Rows:
    """What the Trainer reads, row after row, as often as it asks. Labels that do not count are -100."""

    def __init__(self, turns: Turns) -> None:
        from mem_core.runtime.data.serving.dataset import TokenDataset

        own, self._training = turns.asked.padded_rows, turns.runner.request.training
        self._in_order = bool(own)
        self._data = TokenDataset.open(own) if own else turns.runner._data

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, place: int) -> dict[str, Any]:
        import torch

        from mem_core.runtime.data.serving.shards import COUNTS

        ((tokens, mask),) = self._data.rows([self._row(place)])
        ids = torch.from_numpy(tokens.astype(np.int64))
        labels = ids if mask is None else ids.masked_fill(torch.from_numpy((mask & COUNTS) == 0), -100)
        return {"input_ids": ids, "labels": labels}

    def _row(self, place: int) -> int:
        """Of the file's order, or of the order in which the run takes them."""
        from mem_core.runtime.data.serving.order import sample_ids

        if self._in_order:
            return place % len(self._data)
        batch, within = divmod(place, self._training.global_batch_size)
        return int(sample_ids(self._training.seed, batch, self._training.global_batch_size, len(self._data))[within])


def padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch padded to its longest row, as the Trainer's collators do."""
    from torch.nn.utils.rnn import pad_sequence

    ids, labels = ([row[name] for row in rows] for name in ("input_ids", "labels"))
    batch = {"input_ids": pad_sequence(ids, batch_first=True), "labels": pad_sequence(labels, batch_first=True, padding_value=-100)}
    if len({len(row) for row in ids}) > 1:
        batch["attention_mask"] = pad_sequence([row.new_ones(len(row)) for row in ids], batch_first=True)
    return batch


def model_of(turns: Turns) -> Any:
    """The same model anew, with adapters by peft where the run trains adapters: those modules, that rank."""
    from mem_core.runtime.models.build import build_model

    request, spec = turns.runner.request, turns.runner.spec
    model: Any = build_model(request.model, request.data.sequence_length, 0, spec.dtype, False)
    lora = request.model.lora
    if lora is None:
        return model
    from peft import LoraConfig, get_peft_model

    modules = "all-linear" if lora.target_modules == "auto" else list(lora.target_modules)
    return get_peft_model(model, LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=modules))


def make_trainer(turns: Turns) -> Any:
    """A Trainer as people set it up, without saving, logging or evaluating, that takes rows in order and waits for its turn."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class TakesTurns(TrainerCallback):
        """Counts steps and trained tokens of a block."""

        def __init__(self) -> None:
            self.steps = self.tokens = 0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            turns.start_clock()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.steps += 1
            if self.steps == turns.asked.block_steps * turns.asked.lengthen:
                turns.give_back(self.tokens)
                self.steps = self.tokens = 0
                turns.wait_for_turn()

    class InOrder(Trainer):
        """Rows as they come."""

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    counter = TakesTurns()

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = padded(rows)
        counter.tokens += int((batch["labels"][:, 1:] != -100).sum())
        return batch

    torch.set_num_threads(turns.runner.spec.num_threads)  # a new thread begins with the machine's
    request = turns.runner.request
    arguments = TrainingArguments(
        output_dir=turns.asked.answer + ".trainer", max_steps=10**6, per_device_train_batch_size=request.training.global_batch_size,
        use_cpu=True, save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True, max_grad_norm=1.0,
        optim="adamw_torch_fused", dataloader_pin_memory=False, remove_unused_columns=False, torch_compile=turns.asked.torch_compile,
    )  # fmt: skip
    return InOrder(model=model_of(turns), args=arguments, train_dataset=Rows(turns), data_collator=collate, callbacks=[counter])
