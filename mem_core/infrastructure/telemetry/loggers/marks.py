"""How far a server has taken a run's figures: a small file in the run folder, so that no point is sent twice over any number of starts."""

from pathlib import Path

from pydantic import Field, ValidationError

from mem_core.domain.units import Value
from mem_core.infrastructure.storage.reading import RECORD_LIMIT_BYTES, read_regular
from mem_core.infrastructure.storage.writing import replace_text


class Mark(Value):
    """`token` names the run before the server does; `*_until` is the last step that the server has for certain, `*_sending` the last one
    of a batch whose answer may have been lost."""

    token: str
    run_id: str = ""
    experiment_id: str = ""
    address: str = Field(default="", description="For people, without credentials.")
    steps_until: int = 0
    steps_sending: int = 0
    evaluated_until: int = 0
    evaluated_sending: int = 0


def read_mark(path: Path) -> Mark | None:
    """What was written last; None where there is none or it cannot be read."""
    try:
        return Mark.model_validate_json(read_regular(path, RECORD_LIMIT_BYTES))
    except (OSError, ValidationError):
        return None


def write_mark(path: Path, mark: Mark) -> None:
    """Replace it as a whole, durably. Raises OSError."""
    path.parent.mkdir(exist_ok=True)
    replace_text(path, mark.model_dump_json(indent=1))
