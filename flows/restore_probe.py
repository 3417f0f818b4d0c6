"""The restore drill's own process: `python -m flows.restore_probe RUN_FOLDER OWNER_PID` prints the verdict as one JSON object."""

import json
import sys
from pathlib import Path

from flows.checkpoint_commands import signature_key
from mem_core.domain.errors import NoValidCheckpoint
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.storage.disk import OsDisk
from mem_core.runtime.checkpoint_manager.catalog import Catalog
from mem_core.runtime.checkpoint_manager.validator import IntegrityValidator
from mem_core.runtime.worker_group.fork_server import die_with_parent


def main(argv: list[str]) -> int:
    """0 with a verdict, 74 where nothing was ever committed."""
    folder = Path(argv[0])
    die_with_parent(int(argv[1]))
    key = signature_key(Settings.from_environment())
    catalog = Catalog(OsDisk(), folder, folder.name, key)
    own = catalog.own()
    if not own:
        return NoValidCheckpoint.exit_code
    step = max(own)
    verdict = IntegrityValidator(signature_key=key)(catalog.path(step), own[step][0], "", "integrity")
    shown = verdict.model_dump(mode="json", include={"step", "level", "valid", "weights_digest", "duration_s"})
    print(json.dumps({**shown, "reasons": "; ".join(verdict.reasons)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
