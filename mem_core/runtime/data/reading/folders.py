"""The data files of a folder: those that a Hugging Face `save_to_disk` lists, or all with names of data. Pure but for looking."""

import os
from collections.abc import Iterable
from pathlib import Path

from mem_core.domain.errors import DataError
from mem_core.infrastructure.storage.reading import read_json, why
from mem_core.runtime.data.reading.globbing import matching_files
from mem_core.runtime.data.reading.kinds import DATA_SUFFIXES, plain_suffix

STATE_NAME = "state.json"
SPLITS_NAME = "dataset_dict.json"
_MOST_BYTES = 2**26
_REMEDY = "Give files or a glob such as folder/*.jsonl"


def files_of_folder(folder: str, field: str) -> list[str]:
    """Paths of a folder's data files, in the order of their names; of a saved dataset in the order that it lists them in.

    Raises:
        DataError: it has none, has files of several kinds, is a set of several splits, or lists what is not below it.
    """
    root = Path(folder)
    if (root / SPLITS_NAME).is_file():
        names = ", ".join(f"{folder.rstrip('/')}/{name}" for name in _splits(root, field))
        raise DataError("this folder holds several splits", field=field, value=folder, bound=names, remedy="Name one of them")
    if (root / STATE_NAME).is_file():
        return _saved(root, field)
    return one_kind(folder, matching_files(os.path.join(folder, "**")), field)


def one_kind(folder: str, paths: Iterable[str], field: str) -> list[str]:
    """Those with names of data among the files below a folder.

    Raises:
        DataError: none, or of several kinds.
    """
    found = sorted(path for path in paths if plain_suffix(path) in DATA_SUFFIXES)
    kinds = sorted({plain_suffix(path) for path in found})
    if not found:
        known = ", ".join(sorted(DATA_SUFFIXES))
        raise DataError("this folder holds no file with a name of data", field=field, value=folder, bound=known, remedy=_REMEDY)
    if len(kinds) > 1:
        globs = ", ".join(f"{folder.rstrip('/')}/**/*{kind}*" for kind in kinds)
        raise DataError("this folder holds files of several kinds", field=field, value=folder, bound=globs, remedy="Name those you mean")
    return found


def _saved(root: Path, field: str) -> list[str]:
    state = _json(root / STATE_NAME, field)
    entries = state.get("_data_files") if isinstance(state, dict) else None
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{STATE_NAME} lists no data files", field=field, value=str(root), remedy="Save the dataset again")
    if isinstance(state, dict) and state.get("_indices_files"):
        raise DataError(
            "the saved dataset has an index of its own, which is not read", field=field, value=str(root),
            remedy="Save it again after flatten_indices()",
        )  # fmt: skip
    paths: list[str] = []
    for entry in entries:
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not name or os.path.basename(name) != name:
            raise DataError(f"{STATE_NAME} lists what is no file of the folder", field=field, value=str(root), remedy="Save it again")
        paths.append(str(root / name))
    return paths


def _splits(root: Path, field: str) -> list[str]:
    content = _json(root / SPLITS_NAME, field)
    names = content.get("splits") if isinstance(content, dict) else None
    return [str(name)[:40] for name in names][:8] if isinstance(names, list) else []


def _json(path: Path, field: str) -> object:
    try:
        return read_json(path, _MOST_BYTES)
    except (OSError, ValueError) as exc:
        raise DataError(f"{path.name} cannot be read: {why(exc)}", field=field, value=str(path.parent), remedy="Save it again") from exc
