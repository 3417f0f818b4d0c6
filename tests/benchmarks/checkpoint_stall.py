"""Training stall of MEM's save ÷ DeepSpeed's own `save_checkpoint` of the same state, plus time to validate and to restore.

    python tests/benchmarks/checkpoint_stall.py [--model preset:llama-small | FOLDER] [--rounds 3]

One process, one engine: A (MEM: collect and fork), B (DeepSpeed with its own torch checkpoint engine), in alternation; each
A waits for its writer before B begins, so that neither pays for the other. Prints medians with their spread, and the ratio of each pair.
"""

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import parsed, spread

from mem_core.infrastructure.settings import Settings, child_environment
from mem_core.runtime.checkpoint_manager.ports import CheckpointScope
from mem_core.testing.checkpoint_run import manager_of


def measure(arguments: argparse.Namespace, scratch: Path) -> dict[str, list[float]]:
    """Build the engine, take one step so that the optimizer has state, then save in alternation."""
    import numpy as np
    import torch
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    from mem_core.domain.checkpoint import CheckpointDraft, CheckpointExpectation, TrainingPosition
    from mem_core.domain.plan import Hyperparams, MemoryPlan
    from mem_core.domain.request import CheckpointSection, RuntimeRequest
    from mem_core.runtime.checkpoint_manager.inspection.validator import IntegrityValidator
    from mem_core.runtime.deepspeed.engine import Engine, initialise_distributed
    from mem_core.runtime.deepspeed.engine_config import engine_config
    from mem_core.runtime.deepspeed.snapshot import Snapshot
    from mem_core.runtime.models.build import build_model
    from mem_core.runtime.ranks.local.places import local_place
    from mem_core.runtime.ranks.worker.protocol import Saved

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.set_num_threads(1)
    request = RuntimeRequest.model_validate({"run_id": "stall", "model": {"source": arguments.model}, "parallel": {"zero_stage": 1}})
    initialise_distributed(local_place(scratch, "cpu", 0, 1))
    model = build_model(request.model, 64, 0, "float32", False)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    config = engine_config(request, "float32", MemoryPlan(micro_batch_rows=1), Hyperparams(), num_parameters)
    engine = Engine(model, config, request.training)
    ids = torch.from_numpy(np.arange(64)[None].astype(np.int64))
    engine.backward(engine.forward(input_ids=ids).logits.float().logsumexp(-1).mean())
    engine.step()
    ours_engine = engine.raw.checkpoint_engine
    scope = CheckpointScope(scratch / "run", "stall", 1, CheckpointSection(), CheckpointExpectation(num_ranks=1, zero_stage=1))
    manager = manager_of(scope, IntegrityValidator())
    (scratch / "run").mkdir()
    ours, theirs, validate, restore = [], [], [], []
    for number in range(1, arguments.rounds + 1):
        staging = manager.new_staging(number)
        replies: queue.SimpleQueue[Saved] = queue.SimpleQueue()
        started_s = time.perf_counter()
        snapshot = Snapshot(number, *engine.collect_state(staging), replies.put)
        snapshot.write_forked(room_bytes=1 << 40)
        ours.append(time.perf_counter() - started_s)
        saved = replies.get()
        assert not saved.error, saved.error
        position = TrainingPosition(applied_steps=number, batch_index=1)
        manager.commit(number, staging, CheckpointDraft(position=position, weights_digest=f"{number:064x}"))
        started_s = time.perf_counter()
        assert manager.validate(number).valid
        validate.append(time.perf_counter() - started_s)
        engine.raw.checkpoint_engine = TorchCheckpointEngine(engine.raw._config)
        started_s = time.perf_counter()
        engine.raw.save_checkpoint(str(scratch / "theirs"), tag=str(number), save_latest=False)
        theirs.append(time.perf_counter() - started_s)
        engine.raw.checkpoint_engine = ours_engine
        started_s = time.perf_counter()
        engine.load(manager.path_of(number), position, Hyperparams())
        restore.append(time.perf_counter() - started_s)
        shutil.rmtree(scratch / "theirs")
        manager.rotate()
    medians = {"mem_stall_s": ours, "deepspeed_s": theirs, "validate_s": validate, "restore_s": restore}
    ratios = [mine / deepspeed for mine, deepspeed in zip(ours, theirs, strict=True)]
    return {**medians, "ratio": ratios, "parameters": [float(num_parameters)]}


def main() -> None:
    """Run the measurement in a process with a worker's environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="preset:llama-small")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parsed(parser, model="preset:llama-nano", rounds=2)
    if arguments.child:
        with tempfile.TemporaryDirectory() as scratch:
            print(json.dumps(measure(arguments, Path(scratch))), flush=True)
        os._exit(0)
    environment = child_environment(Settings.from_environment(), device="cpu")
    command = [sys.executable, __file__, "--child", "--model", arguments.model, "--rounds", str(arguments.rounds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    for name, value in answer.items():
        print(f"{name:14} {spread(value) if name != 'parameters' else f'{value[0]:,.0f}'}")


if __name__ == "__main__":
    main()
