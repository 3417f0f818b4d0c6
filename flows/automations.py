"""The public address of the automations: `python -m flows.automations deployments/automations.yaml`."""

import sys
from pathlib import Path

from flows.server.automations import apply_automations

__all__ = ["apply_automations"]

if __name__ == "__main__":
    print("\n".join(apply_automations(Path(sys.argv[1]))))
