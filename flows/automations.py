"""The public address of the automations: `python -m flows.automations deployments/automations.yaml`. The deployments that are there get
their forms for people on the way."""

import sys
from pathlib import Path

from flows.server.automations import apply_automations, apply_forms
from flows.server.serve import DEPLOYMENTS_FILE, load_flow, name_of, read_deployments

__all__ = ["apply_automations", "apply_forms"]

if __name__ == "__main__":
    shipped = {name_of(entry): load_flow(entry["entrypoint"]).parameters.model_dump() for entry in read_deployments(DEPLOYMENTS_FILE)}
    print("\n".join([*apply_automations(Path(sys.argv[1])), *apply_forms(shipped)]))
