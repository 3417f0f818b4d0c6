"""Make question-and-answer chats out of the docstrings of Python's standard library.

    python deployments/models/docstring_pairs.py OUTPUT_FOLDER

Writes `train.jsonl` and `held_out.jsonl`: one chat a line, `{"messages": [{"role": "user", ...}, {"role": "assistant", ...}]}`, where
the user asks "What does textwrap.dedent do?" and the assistant answers with the first paragraph of its docstring. The same Python
writes the same bytes.
"""

import argparse
import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

MODULES = (
    "argparse", "ast", "base64", "bisect", "calendar", "collections", "configparser", "contextlib", "copy", "csv", "dataclasses",
    "datetime", "decimal", "difflib", "email.message", "enum", "fnmatch", "fractions", "functools", "glob", "gzip", "hashlib",
    "heapq", "html", "inspect", "io", "ipaddress", "itertools", "json", "logging", "math", "operator", "os", "os.path", "pathlib",
    "pickle", "platform", "pprint", "queue", "random", "re", "shelve", "shlex", "shutil", "signal", "socket", "statistics",
    "string", "struct", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "timeit", "tokenize", "traceback", "types",
    "unicodedata", "urllib.parse", "uuid", "warnings", "weakref", "zipfile", "zlib",
)  # fmt: skip
EVERY_HELD_OUT = 8
LEAST_LETTERS, MOST_LETTERS = 30, 320


def first_paragraph(docstring: str) -> str:
    """The docstring's first paragraph of prose on one line; signatures that some C functions begin with are left out."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in inspect.cleandoc(docstring).split("\n\n")]
    return next((paragraph for paragraph in paragraphs if paragraph.endswith(".") and "->" not in paragraph), "")


def documented(module_name: str) -> Iterator[tuple[str, str]]:
    """Dotted name and first paragraph of every public function and class that ``module_name`` offers."""
    module = importlib.import_module(module_name)
    own = [name for name, member in vars(module).items() if getattr(member, "__module__", None) == module_name]
    for name in sorted(getattr(module, "__all__", own)):
        member = getattr(module, name, None)
        # Its own docstring: an instance or a class without one would show that of its class or base.
        told = vars(member).get("__doc__") if inspect.isclass(member) else getattr(member, "__doc__", None)
        if name.startswith("_") or not isinstance(told, str) or not (inspect.isclass(member) or inspect.isroutine(member)):
            continue
        answer = first_paragraph(told)
        if LEAST_LETTERS <= len(answer) <= MOST_LETTERS:
            yield f"{module_name}.{name}", answer


def chats() -> list[dict[str, list[dict[str, str]]]]:
    """All chats, one for each answer that differs, ordered by module and name."""
    by_answer: dict[str, str] = {}
    for module_name in MODULES:
        for name, answer in documented(module_name):
            by_answer.setdefault(answer, name)
    return [
        {"messages": [{"role": "user", "content": f"What does {name} do?"}, {"role": "assistant", "content": answer}]}
        for answer, name in by_answer.items()
    ]


def write(folder: Path) -> tuple[Path, Path]:
    """`train.jsonl` and `held_out.jsonl` in ``folder``: every eighth chat is held out."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps(chat) + "\n" for chat in chats()]
    train, held_out = folder / "train.jsonl", folder / "held_out.jsonl"
    train.write_text("".join(row for number, row in enumerate(rows) if number % EVERY_HELD_OUT))
    held_out.write_text("".join(rows[::EVERY_HELD_OUT]))
    return train, held_out


def main() -> None:
    """Read the command line and write both files."""
    parser = argparse.ArgumentParser(description="Make question-and-answer chats out of the standard library's docstrings.")
    parser.add_argument("output", type=Path, help="the folder for train.jsonl and held_out.jsonl")
    for path in write(parser.parse_args().output):
        print(path)


if __name__ == "__main__":
    main()
