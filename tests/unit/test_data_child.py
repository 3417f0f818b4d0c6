"""The process that works on data is watched: its end is seen also where the end of its pipe never comes."""

import os
import subprocess
import sys
import time

import pytest

from mem_core.domain.errors import DataError, InternalError
from mem_core.runtime.data.child import NoAnswer, ask_child, error_from_json, error_to_json, messages

KEEPS_THE_PIPE = """
import os, subprocess, sys
holder = subprocess.Popen(["sleep", "30"])
print('{"progress": 1}', flush=True)
print(f'{{"answer": {holder.pid}}}', flush=True)
print('{"cut', end="", flush=True)
"""


def start(program: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def close(child: "subprocess.Popen[bytes]") -> None:
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
    child.kill()
    child.wait()


def test_a_grandchild_that_holds_the_pipe_keeps_nobody_waiting() -> None:
    """All that was said before the end arrives, but for a line that was never finished."""
    child = start(KEEPS_THE_PIPE)
    began_s = time.monotonic()
    try:
        said = list(messages(child))
        assert time.monotonic() - began_s < 20, "the grandchild lives for 30 s"
        assert [next(iter(message)) for message in said] == ["progress", "answer"]
        os.kill(said[1]["answer"], 9)
    finally:
        close(child)


def test_a_process_that_never_answers_is_given_up() -> None:
    child = start("import time; time.sleep(60)")
    try:
        with pytest.raises(NoAnswer):
            list(messages(child, limit_s=0.3))
    finally:
        close(child)


def test_an_answer_of_many_blocks_is_one() -> None:
    child = start("""print('{"answer": "' + "x" * 3_000_000 + '"}')""")
    try:
        assert [len(message["answer"]) for message in messages(child)] == [3_000_000]
    finally:
        close(child)


def test_a_program_that_ends_without_an_answer_is_an_error_of_ours() -> None:
    with pytest.raises(InternalError, match="ended with code 1"):
        ask_child("mem_core.nothing.here", "{}")
    with pytest.raises(InternalError, match="ended with code 0"):
        ask_child("keyword", "{}")


def test_errors_cross_whole() -> None:
    error = DataError("no such file", field="data.train", value="x", bound="files", remedy="Check the path")
    assert str(error_from_json(error_to_json(error))) == str(error)
