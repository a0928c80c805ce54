"""The notebooks, run in a kernel of their own: every cell works, and nothing that a run printed is stored in them."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    """Return a notebook as it is stored."""
    return nbformat.read(request.param, as_version=nbformat.NO_CONVERT)


def test_a_notebook_runs(notebook, tmp_path, monkeypatch):
    """It is stored without outputs, runs from top to bottom, where its own assertions hold, and draws a picture."""
    nbformat.validate(notebook)
    assert not any(cell.outputs or cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the threads of several test workers would wait for each other
    NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}, timeout=240).execute()
    made = [each for cell in notebook.cells for each in cell.get("outputs", [])]
    assert any("image/png" in each.get("data", ()) or "image/svg+xml" in each.get("data", ()) for each in made)
    assert "healthy: " in made[-1].data["text/plain"]
