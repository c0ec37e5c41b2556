"""Notebooks run from top to bottom, and are kept without outputs."""

import os
import sys

import nbformat
import pytest

from tests.support.shell import RANK_VARIABLES, REPOSITORY

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


@each_notebook
def test_a_notebook_is_stripped_and_short(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert len(notebook.cells) < 30
    assert notebook.cells[0].source.startswith("# ")
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@each_notebook
@pytest.mark.parametrize("strategy", ["fsdp_ulysses", "torchtitan"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_notebook_runs(path, strategy, tmp_path, monkeypatch):
    """In short form, started in the notebook's own folder as Jupyter does; its cells check their results."""
    from nbclient import NotebookClient

    monkeypatch.setenv("LRE_NOTEBOOK_SHORT", "1")
    monkeypatch.setenv("LRE_NOTEBOOK_ROOT", str(tmp_path))
    monkeypatch.setenv("LRE_NOTEBOOK_STRATEGY", strategy)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), *sys.path]))
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()
    executed = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count is not None for cell in executed)
    assert not any(output.output_type == "error" for cell in executed for output in cell.outputs)
    # The plot.
    assert any("image/png" in output.get("data", {}) for cell in executed for output in cell.outputs)
