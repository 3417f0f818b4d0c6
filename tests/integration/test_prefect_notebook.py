"""The shipped notebook runs from top to bottom in a real kernel, with a live display and a result that shows itself."""

import re
from ast import literal_eval
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.integration
NOTEBOOK = Path(__file__).parents[2] / "deployments" / "notebooks" / "quickstart.ipynb"


# What somebody does next: the last call once more, then a value that the run was not born with.
AGAIN = """
import sys, time
began_s = time.monotonic()
again = finetune(run_id="quickstart", model="preset:llama-nano", data=str(notes.absolute()), store=store, max_steps=80, learning_rate=1e-3,
                 sequence_length=64, overrides={"device": "cpu", "training.segment_steps": 6, "training.warmup_steps": 6})
(time.monotonic() - began_s, again == longer, again.status)
"""
WRONG = AGAIN.replace("sequence_length=64", "sequence_length=32")


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The executed cells."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    setup = f"import os; os.environ.update(MEM_NOTEBOOK_STORE={str(folder / 'runs')!r}); os.environ.pop('PREFECT_API_URL', None)"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(setup))
    notebook.cells += [nbformat.v4.new_code_cell(AGAIN), nbformat.v4.new_code_cell(WRONG)]
    notebook.cells[-1].metadata["tags"] = ["raises-exception"]
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def html_of(cell: Any) -> list[str]:
    return [output["data"]["text/html"] for output in cell.outputs if "text/html" in output.get("data", {})]


def test_training_in_a_running_loop_shows_progress_and_a_result_with_pictures(cells: list[Any]) -> None:
    live, result = html_of(cells[2])
    line = live.split("monospace")[1]
    assert [part for part in ("step 60/60 100.0%", " · completed · ", " · validated 60") if part not in line] == []
    assert "Loss" in live
    assert "completed" in result
    assert re.search(r"validation \d\.\d+ over \d+ rows", result), "the quickstart holds rows out"
    assert result.count("<svg") == 2


def test_the_same_name_goes_on_and_wrong_values_are_named(cells: list[Any]) -> None:
    assert cells[3].outputs[-1]["data"]["text/plain"].startswith("(80, ")
    printed = "".join(output.get("text", "") for output in cells[4].outputs)
    assert printed.startswith("learning_rate: must be less than or equal to 10 (got 99); allowed: a number, null (> 0 and <= 10)")
    assert "Traceback" not in printed


def test_nothing_else_is_written_into_the_cells(cells: list[Any]) -> None:
    """Prefect's log lines belong to its own logs."""
    noise = [output["text"] for cell in cells[2:4] for output in cell.outputs if output.output_type == "stream"]
    assert noise == []


def test_a_finished_run_says_so_at_once_without_a_bar(cells: list[Any]) -> None:
    """From its journal: no server, no worker, no doctor."""
    (words,) = html_of(cells[5])
    assert "run quickstart is complete" in words
    assert "width" not in words
    wall_s, same, status = literal_eval(cells[5].outputs[-1]["data"]["text/plain"])
    assert (same, status) == (True, "completed")
    assert wall_s < 2


def test_an_error_shows_its_lines_instead_of_a_traceback(cells: list[Any]) -> None:
    (error,) = [output for cell in cells[6:] for output in cell.outputs if output.output_type == "error"]
    assert len(error["traceback"]) <= 3
    assert error["traceback"][0].startswith("RequestError: data.sequence_length: run quickstart was born with 64")
