"""A start examines twice within seconds: the second time the first answers count, while nothing that decides them has changed."""

import json
import os
import sys
from pathlib import Path

from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.settings import Settings
from mem_core.runtime.session.opening.engine_probe import probe_engine, stamps_of

ANSWER = json.dumps({"problems": [], "architecture": "A", "attention": "sdpa"})


def counting_program(folder: Path, answer: str) -> tuple[str, dict[str, str]]:
    """A module that stands in for the probe, notes each of its runs in `runs`, and the environment that finds it."""
    name = f"stand_in_{folder.name}".replace("-", "_")
    lines = f"import pathlib\nwith pathlib.Path({str(folder / 'runs')!r}).open('a') as file:\n    file.write('.')\n{answer}\n"
    (folder / f"{name}.py").write_text(lines)
    return name, dict(os.environ) | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}


def runs(folder: Path) -> int:
    path = folder / "runs"
    return len(path.read_text()) if path.exists() else 0


def asked(folder: Path, **sections: object) -> RuntimeRequest:
    (folder / "model").mkdir(exist_ok=True)
    values = {"run_id": "a", "store": str(folder), "device": "cpu", "model": {"source": str(folder / "model")}, **sections}
    return RuntimeRequest.model_validate(values)


def test_the_second_look_takes_the_first_ones_answer(tmp_path: Path) -> None:
    """Also where Prefect's variables were set in between; not where the request, a file of the model or the environment is another."""
    program, environ = counting_program(tmp_path, f"print({ANSWER!r})")
    request, settings = asked(tmp_path), Settings.from_environment(environ)
    first = probe_engine(request, settings, program=program)
    assert first is not None
    assert first.attention == "sdpa"
    again = Settings.from_environment(environ | {"PREFECT_API_URL": "http://127.0.0.1:1/api"})
    assert probe_engine(request, again, program=program) == first
    assert runs(tmp_path) == 1
    probe_engine(asked(tmp_path, deepspeed={"dump_state": True}), settings, program=program)
    assert runs(tmp_path) == 2
    (tmp_path / "model" / "config.json").write_text("{}")
    probe_engine(request, settings, program=program)
    assert runs(tmp_path) == 3
    probe_engine(request, Settings.from_environment(environ | {"PYTHONOPTIMIZE": "2"}), program=program)
    assert runs(tmp_path) == 4


def test_a_child_that_did_not_answer_is_asked_again(tmp_path: Path) -> None:
    """Killed or too slow: that says nothing of the request, and is not remembered."""
    program, environ = counting_program(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    for number in (1, 2):
        seen = probe_engine(asked(tmp_path), Settings.from_environment(environ), program=program)
        assert seen is not None
        assert seen.unknown
        assert runs(tmp_path) == number


def test_a_file_that_was_replaced_has_another_stamp(tmp_path: Path) -> None:
    """Also one of the same size and time."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"one")
    before, moment = stamps_of(tmp_path), path.stat()
    other = tmp_path / "other"
    other.write_bytes(b"two")
    os.utime(other, ns=(moment.st_atime_ns, moment.st_mtime_ns))
    other.replace(path)
    assert stamps_of(tmp_path) != before
