"""The public address of the automations: `python -m flows.automations deployments/automations.yaml`. The deployments that are there get
their forms for people on the way."""

import sys
from pathlib import Path

from flows.server.automations import apply_automations
from flows.server.forms_of_deployments import apply_forms

__all__ = ["apply_automations", "apply_forms"]

if __name__ == "__main__":
    print("\n".join([*apply_automations(Path(sys.argv[1])), *apply_forms()]))
