"""`mem`'s command line: verbs and their arguments, RUN as id or folder, errors for people and for machines."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.cli import build_parser
from flows.commands.inspection.finished import result_if_finished
from flows.commands.output import print_result, report_error, run_folder
from mem_core.domain.errors import Interrupted, RequestError
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult

MEM = Path(sys.executable).with_name("mem")


@pytest.mark.parametrize(
    "words",
    [
        "train request.yaml --set training.max_steps=5 --set store=./x --json",
        "doctor -",
        "status run --store ./runs --json",
        "report run",
        "logs run",
        "stop run --wait 3",
        "checkpoints list run --json",
        "checkpoints verify run",
        "checkpoints export run",
        "policy evaluate request.yaml --directive -",
        "policy replay run",
        "policy explain run",
        "drill request.yaml --seed 3",
        "prove-resume request.yaml",
        "serve",
    ],
)
def test_the_verbs_of_the_design_are_there(words: str) -> None:
    assert build_parser().parse_args(words.split()).verb == words.split()[0]


def parsers(parser: argparse.ArgumentParser, name: str = "mem") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every verb that does something, under its whole name."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not inner:
        yield name, parser
    for action in inner:
        for word, below in action.choices.items():
            yield from parsers(below, f"{name} {word}")


def test_every_verb_speaks_to_programs() -> None:
    """But the one whose output is a script for a shell."""
    silent = [name for name, parser in parsers(build_parser()) if "--json" not in parser.format_help()]
    assert silent == ["mem completion"]


@pytest.mark.parametrize("words", ["", "trian request.yaml", "train", "status", "checkpoints", "stop run --wait soon"])
def test_what_is_no_command_is_refused_with_usage(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(words.split())
    assert caught.value.code == 2
    assert "usage: mem" in capsys.readouterr().err


def test_run_is_a_folder_where_it_is_one_and_an_id_below_the_store_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "store" / "a" / "journal").mkdir(parents=True)
    assert run_folder(str(tmp_path / "store" / "a"), "./runs") == tmp_path / "store" / "a"
    assert run_folder("a", str(tmp_path / "store")) == tmp_path / "store" / "a"
    assert run_folder("./nowhere/a", "./runs") == Path("nowhere/a")


def test_an_error_is_one_line_for_people_and_one_object_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    error = RequestError("is wrong", field="training.seed", value=-1, bound=">= 0", remedy="Use 0.")
    assert report_error(error, as_json=True) == 64
    out, err = capsys.readouterr()
    assert err == "mem: training.seed: is wrong (got -1); allowed: >= 0. Use 0.\n"
    assert json.loads(out) == {"status": "failed", "exit_code": 64, "error": "RequestError", "message": str(error)}
    assert report_error(Interrupted("stopped", remedy="Again."), as_json=True) == 75
    assert json.loads(capsys.readouterr().out)["status"] == "interrupted"


def test_people_read_standard_error_and_machines_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    result = RunResult(status="completed", run_id="run", applied_steps=3, weights_digest="a" * 64)
    print_result(result, as_json=False)
    out, err = capsys.readouterr()
    assert out == ""
    assert "run run: completed" in err
    print_result(result, as_json=True)
    assert RunResult.model_validate_json(capsys.readouterr().out) == result


def test_a_run_that_never_trained_has_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(RunResult(status="failed", run_id="run", exit_code=66, message="no data"), as_json=True)
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out)["message"] == "no data"


def test_a_run_that_does_not_exist_is_not_finished(tmp_path: Path) -> None:
    assert result_if_finished(tmp_path / "run", RuntimeRequest(run_id="run")) is None


def test_help_needs_nothing_heavy_and_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    done = subprocess.run([str(MEM), "--help"], capture_output=True, text=True, timeout=30, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "prove-resume" in done.stdout


@pytest.mark.parametrize(
    "line",
    [
        "compare a b --output=~/page.html", "fork a b --output=~/fork.yaml", "init --output=~/request.yaml", "export a --output=~/model",
        "checkpoints export a --output=~/model", "train ~/request.yaml", "doctor ~/request.yaml", "serve --file=~/prefect.yaml",
        "policy evaluate ~/request.yaml --directive=~/reply.json",
    ],
)  # fmt: skip
def test_a_path_on_the_command_line_follows_the_one_rule(line: str) -> None:
    """`~` is the home folder, behind `=` too, where no shell puts it in."""
    values = [str(value) for value in vars(build_parser().parse_args(line.split())).values()]
    assert [value for value in values if value.startswith(str(Path.home()))]
    assert not [value for value in values if value.startswith("~")]
