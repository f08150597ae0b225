"""The notebook runs from top to bottom, and is committed with what it printed and drew."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
from helpers import skip_module_without
from repository import PACKAGE, ROOT, output_of

skip_module_without("nbclient", "ipykernel", "matplotlib", "sklearn", "tqdm")

NOTEBOOK = ROOT / "docs" / "examples" / "two_gpus.ipynb"
ACCURACIES = re.compile(r"unsynchronized: test loss [\d.]+, accuracy ([\d.]+)%\n *synchronized: .* accuracy ([\d.]+)%")


def assert_complete(notebook: Any) -> None:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "4 replicas on ['cpu', 'cpu', 'cpu', 'cpu']" in text
    assert "\ninterrupted\n" in text
    accuracies = ACCURACIES.search(text)
    assert accuracies is not None, text
    unsynchronized, synchronized = map(float, accuracies.groups())
    assert synchronized > unsynchronized + 3


@pytest.fixture
def notebook() -> Any:
    import nbformat

    return nbformat.read(NOTEBOOK, 4)


def test_notebook_has_the_outputs_of_a_run_from_top_to_bottom(notebook):
    assert_complete(notebook)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_notebook_runs_from_top_to_bottom(notebook, tmp_path):
    import nbformat

    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(notebook, tmp_path / "copy.ipynb")
    # In a process of its own: the client leaves an event loop open.
    client = [sys.executable, "-c", "from nbclient.cli import main; main()"]
    options = ["copy.ipynb", "--inplace", "--timeout=240", "--NotebookClient.coalesce_streams=True"]
    output_of([*client, *options], tmp_path, PYTHONPATH=str(PACKAGE.parent))
    assert_complete(nbformat.read(tmp_path / "copy.ipynb", 4))
