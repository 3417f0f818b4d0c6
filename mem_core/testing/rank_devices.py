"""Which devices a rank really uses: a callable for `WorkerSpec.on_built`, made with `functools.partial`, so that it pickles."""

import json
from pathlib import Path
from typing import Any


def tell_devices(runner: Any, folder: Path) -> None:
    """Write `<folder>/rank-N.json`: devices of the parameters, the current device, and bytes that this process holds on each device."""
    import torch

    devices = {str(parameter.device) for parameter in runner.engine.raw.module.parameters()}
    held = {f"cuda:{index}": torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count())}
    facts = {"parameters": sorted(devices), "current": torch.cuda.current_device(), "held_bytes": held}
    (folder / f"rank-{runner.place.rank}.json").write_text(json.dumps(facts))
