"""Fuzz subjects that MEM wrote itself and somebody damaged: run folders and caches. Made and used as those of `fuzz_inputs`."""

import json
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fuzz_inputs import damage
from law import DOCUMENTED, Broken
from mutations import bent_document, copy_tree

from flows.commands import policy as policy_commands
from flows.commands import report as report_commands
from flows.commands.checkpoints import list_checkpoints, verify_checkpoints
from flows.commands.inspection.finished import result_if_finished
from flows.commands.inspection.logs import run_logs, told
from flows.commands.inspection.runs import local_row
from mem_core.core.run.lease import read_lease
from mem_core.core.run.reconcile import reconcile
from mem_core.core.run.record import RunRecord, read_record
from mem_core.core.run.run_report import load_report_data
from mem_core.core.run.state_manager import StateManager
from mem_core.core.run.story import story_line
from mem_core.domain.errors import MemError
from mem_core.domain.plan import MemoryPlan
from mem_core.domain.request import DataSection, RuntimeRequest
from mem_core.infrastructure.settings import Settings
from mem_core.runtime.data.encoding.cache import HashCache, load_prepared
from mem_core.runtime.data.encoding.tokenize_process import prepare_here
from mem_core.runtime.data.reading.sources import resolve_files
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.data.values import PreparedData, PrepareJob
from mem_core.testing.checkpoint_run import Run as CheckpointRun
from mem_core.testing.checkpoint_run import proven
from mem_core.testing.synthetic_history import SyntheticRun

SETTINGS = Settings.from_environment({"MEM_HOME": "/nonexistent"})

# -- run records ------------------------------------------------------------------------------------------------------------------


def record_base(folder: Path) -> None:
    """A run folder with everything in it."""
    run = folder / "demo"
    SyntheticRun(num_steps=30, segment_steps=10).write(run)
    facts = {"device": "cpu", "dtype": "float32", "data_fingerprint": "", "model_fingerprint": ""}
    request = RuntimeRequest(run_id="demo", store=str(folder))
    state = StateManager.acquire(folder, "demo")
    state.write_record(RunRecord(run_id="demo", request=request, default_plan=MemoryPlan(micro_batch_rows=1), **facts))
    state.start_attempt(None)
    state.release()
    (run / "logs").mkdir()
    (run / "logs" / "rank-0.log").write_text("line\n")
    proven(CheckpointRun(run).attempt(), 10, 20)


def a_record(draw: random.Random, base: Path, folder: Path) -> Callable[[], str]:
    """One or two files of a run folder, damaged; all verbs that look, and the beginning of a start."""
    run_folder = folder / "demo"
    copy_tree(base / "demo", run_folder)
    paths = sorted(path for path in run_folder.rglob("*") if path.is_file())
    weighty = [path for path in paths if path.suffix in (".json", ".jsonl")]
    for path in draw.sample(weighty if draw.random() < 0.8 else paths, draw.choice((1, 1, 2))):
        if path.suffix == ".jsonl" and draw.random() < 0.7:
            lines = path.read_bytes().splitlines(keepends=True)
            number = draw.randrange(len(lines)) if lines else 0
            bent = bent_document(draw, lines[number] if lines else b"")
            path.write_bytes(b"".join((*lines[:number], bent, b"\n", *lines[number + 1 :])))
        else:
            damage(draw, path, folder)

    return partial(_told, run_folder)


def _told(folder: Path) -> str:
    """Each verb by itself: one that refuses does not keep the others from being tried."""
    refused = False
    for verb in LOOKS:
        try:
            verb(folder)
        except MemError as exc:
            if exc.exit_code not in DOCUMENTED or not exc.remedy:
                raise
            refused = True
    return "refused by some" if refused else "taken"


def _begin(folder: Path) -> None:
    """What a start does before it trains."""
    result_if_finished(folder, RuntimeRequest(run_id="demo", store=str(folder.parent)))
    state = StateManager.acquire(folder.parent, "demo")
    try:
        record = state.record()
        state.start_attempt(None)
        state.mend_record()
        state.lines()
        if record is not None:
            reconcile(record.request, record.request)
    finally:
        state.release()


LOOKS: tuple[Callable[[Path], object], ...] = (
    report_commands.run_status_text,
    lambda folder: report_commands.run_status(folder).model_dump_json(),
    load_report_data,
    lambda folder: list(run_logs(folder)),
    lambda folder: [story_line(line) for line in told(folder)[0]],
    lambda folder: local_row(folder).model_dump_json(),
    lambda folder: list_checkpoints(folder, as_json=True, settings=SETTINGS),
    lambda folder: verify_checkpoints(folder, as_json=True, settings=SETTINGS),
    lambda folder: json.dumps(policy_commands.replay_decisions(policy_commands.read_journal_files(folder)).report),
    lambda folder: json.dumps(policy_commands.explain_run(policy_commands.read_journal_files(folder)).report),
    read_record,
    read_lease,
    _begin,
)


# -- caches -----------------------------------------------------------------------------------------------------------------------


def _job(folder: Path) -> PrepareJob:
    data = DataSection.model_validate({"train": [str(folder / "rows.jsonl")], "validation": 0.2, "sequence_length": 16})
    return PrepareJob(data=data, tokenizer_source="preset:llama-nano", vocab_size=384, cache_dir=folder / "cache", parent_pid=0)


def cache_base(folder: Path) -> None:
    """Prepared data, as a start finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": f"row {number} with some words"}) + "\n" for number in range(40)))
    os.utime(folder / "rows.jsonl", (1_700_000_000, 1_700_000_000))
    prepared = prepare_here(_job(folder), lambda progress: None)
    (folder / "expected.json").write_text(json.dumps([prepared.fingerprint, _rows(prepared)]))


def _rows(prepared: PreparedData) -> list[list[int]]:
    with TokenDataset.open(prepared.train_dir) as data:
        return [tokens.tolist() for tokens, _ in data.rows(range(len(data)))]


def a_cache(draw: random.Random, base: Path, folder: Path) -> Callable[[], str]:
    """One or two files of the cache, damaged: what is given out holds the same rows, or it is made anew."""
    copy_tree(base, folder / "base")
    cache = folder / "base" / "cache"
    paths = sorted(path for path in cache.rglob("*") if path.is_file() and path.name != ".lock")
    for path in draw.sample(paths, draw.choice((1, 1, 2))):
        damage(draw, path, folder)
    fingerprint, expected = json.loads((base / "expected.json").read_bytes())

    def run() -> str:
        hashes = HashCache(cache)
        for file in resolve_files([str(folder / "base" / "rows.jsonl")], _job(folder / "base").data, "data.train"):
            hashes.get(file)
        prepared = load_prepared(cache, fingerprint)
        if prepared is None:
            return "made anew"
        if _rows(prepared) != expected:
            raise Broken("other rows were given out")
        return "same rows"

    return run
