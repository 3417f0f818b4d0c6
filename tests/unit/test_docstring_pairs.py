"""The chats made from docstrings: the same bytes each time, questions that name what the answer is about, nothing held out that trains."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "deployments" / "models" / "docstring_pairs.py"


def made(folder: Path, hash_seed: str) -> tuple[bytes, bytes]:
    """Both files, by a Python whose sets and dicts of strings have an order of their own."""
    command = [sys.executable, "-W", "error", str(SCRIPT), str(folder)]
    subprocess.run(command, check=True, capture_output=True, env={"PYTHONHASHSEED": hash_seed})
    return (folder / "train.jsonl").read_bytes(), (folder / "held_out.jsonl").read_bytes()


def test_some_hundred_chats_the_same_each_time(tmp_path: Path) -> None:
    train, held_out = made(tmp_path / "one", "1")
    assert (train, held_out) == made(tmp_path / "two", "2")
    rows = [[json.loads(line)["messages"] for line in data.splitlines()] for data in (train, held_out)]
    assert len(rows[0]) > 400
    assert len(rows[1]) > 50
    answers = [[chat[1]["content"] for chat in chats] for chats in rows]
    assert len(set(answers[0] + answers[1])) == len(answers[0]) + len(answers[1]), "an answer that is held out does not train"
    by_question = {chat[0]["content"]: chat[1]["content"] for chat in rows[0] + rows[1]}
    assert by_question["What does textwrap.dedent do?"] == "Remove any common leading whitespace from every line in `text`."
    assert all([message["role"] for message in chat] == ["user", "assistant"] for chats in rows for chat in chats)
