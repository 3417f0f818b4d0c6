"""A model folder that was made of a checkpoint: what it holds, and how one is asked for."""

from typing import Literal

from pydantic import Field

from mem_core.domain.units import Value

EXPORT_FOLDER = "export"
MARK_NAME = "mem_export.json"
ExportDtype = Literal["auto", "float32", "bfloat16", "float16"]


class ExportOrder(Value):
    """What the exporting process is asked to do. Paths are absolute; `key` is the manifest key, empty where there is none."""

    checkpoint: str
    run_folder: str
    output: str
    dtype: ExportDtype = Field(default="auto", description="auto: that of the model that training began with.")
    merge: bool = Field(default=False, description="Adapters are put into the model, which is written whole.")
    cache_dir: str = ""
    key: str = ""


class ExportMark(Value):
    """`mem_export.json` inside the folder, by which it is known again."""

    run_id: str
    step: int
    dtype: str
    weights_digest: str
    files: dict[str, int] = Field(default={}, description="Name -> bytes of every other file.")


class ExportSummary(Value):
    """The export at the end of a run: where it is, or why there is none."""

    step: int
    folder: str = ""
    dtype: str = ""
    weights_digest: str = ""
    problem: str = ""
