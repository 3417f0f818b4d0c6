"""The flows, by name: `from flows import endurance`. Loaded on first use, since importing Prefect takes seconds.

Called by people, notebooks, deployments and `mem`. A flow asks Prefect about its own run and calls tasks; it decides nothing else.
"""

from importlib import import_module
from typing import Any

_FLOWS = {
    "endurance": "flows.endurance_flow",
    "finetune": "flows.finetune_flow",
    "restore_drill": "flows.restore_drill_flow",
    "doctor": "flows.doctor_flow",
    "chaos_drill": "flows.chaos_drill_flow",
    "restart": "flows.restart_flow",
    "generate": "flows.generate_flow",
}


def __getattr__(name: str) -> Any:
    if name in _FLOWS:
        return getattr(import_module(_FLOWS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["chaos_drill", "doctor", "endurance", "finetune", "generate", "restart", "restore_drill"]
