"""The shipped notebook runs from top to bottom in a real kernel, with a live display and a result that shows itself."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.integration
NOTEBOOK = Path(__file__).parents[2] / "deployments" / "notebooks" / "quickstart.ipynb"


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The executed cells."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    setup = f"import os; os.environ.update(MEM_NOTEBOOK_STORE={str(folder / 'runs')!r}); os.environ.pop('PREFECT_API_URL', None)"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(setup))
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def html_of(cell: Any) -> list[str]:
    return [output["data"]["text/html"] for output in cell.outputs if "text/html" in output.get("data", {})]


def test_training_in_a_running_loop_shows_progress_and_a_result_with_pictures(cells: list[Any]) -> None:
    live, result = html_of(cells[2])
    assert "step 60/60" in live
    assert "Loss" in live
    assert "completed" in result
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
