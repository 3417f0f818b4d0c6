"""Makes a real DeepSpeed checkpoint: `launch(folder, stage, num_ranks)` starts gloo ranks of this same file and waits for them.

The model is small on purpose (a few kilobytes a file), so that a thousand damaged copies can be judged in a test. Each rank
writes `<folder>/step-<k>/...` for k = 1, 2; rank 0 adds `<folder>/facts.json` with the parameters (name -> shape).
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from mem_core.infrastructure.machine.build import remove_stale_locks
from mem_core.infrastructure.settings import Settings

LAUNCH_TIMEOUT_S = 420


def launch(folder: Path, stage: int, num_ranks: int, dtype: str = "float32") -> dict[str, list[int]]:
    """Train two steps and save after each. Returns name -> shape of the trained parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # A build that somebody killed leaves a lock behind, and every later one waits for it in silence: MEM's own folder is swept first.
    remove_stale_locks(Settings.from_environment().torch_extensions_dir)
    ranks = [_start_rank(folder, stage, num_ranks, rank, port, dtype) for rank in range(num_ranks)]
    try:
        codes = [rank.wait(LAUNCH_TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(codes):
        logs = "\n".join((folder / f"rank-{rank}.log").read_text()[-3000:] for rank in range(num_ranks))
        raise RuntimeError(f"ranks ended with {codes}:\n{logs}")
    return json.loads((folder / "facts.json").read_text())


def _start_rank(folder: Path, stage: int, num_ranks: int, rank: int, port: int, dtype: str) -> subprocess.Popen[bytes]:
    venv_bin = str(Path(sys.executable).parent)
    env = {
        **os.environ, "DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PATH": f"{venv_bin}:{os.environ.get('PATH', '')}",
        "TORCH_EXTENSIONS_DIR": str(Settings.from_environment().torch_extensions_dir),
    }  # fmt: skip
    with (folder / f"rank-{rank}.log").open("wb") as log:
        return subprocess.Popen([sys.executable, __file__, str(folder), str(stage), dtype], env=env, stdout=log, stderr=log)


def _train_and_save(folder: Path, stage: int, dtype: str) -> None:
    import deepspeed
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Linear(8, 12), torch.nn.LayerNorm(12), torch.nn.Linear(12, 11))
    if dtype == "bfloat16":
        model = model.to(torch.bfloat16)
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    config = {
        "train_batch_size": 2 * int(os.environ["WORLD_SIZE"]),
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype == "bfloat16"},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    for step in (1, 2):
        tokens = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(step))
        loss = torch.nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.roll(1, 1).flatten())
        engine.backward(loss)
        engine.step()
        engine.save_checkpoint(str(folder), tag=f"step-{step}", client_state={"applied": step}, save_latest=False)
    if os.environ["RANK"] == "0":
        (folder / "facts.json").write_text(json.dumps(shapes))
    deepspeed.comm.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _train_and_save(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
