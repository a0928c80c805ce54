"""The notebooks, run in a kernel of their own: every cell works, and nothing that a run printed is stored in them.

The site shows the outputs in docs/_site/notebooks, which `python -m tests.adapters.test_torch_notebooks` writes.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))
SHOWN = {path.stem: path for path in sorted((ROOT / "docs/_site/notebooks").glob("*.json"))}


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    """Return a notebook as it is stored."""
    return nbformat.read(request.param, as_version=nbformat.NO_CONVERT)


def _executed(notebook, folder):
    """Run a notebook; return the outputs of each cell."""
    NotebookClient(notebook, resources={"metadata": {"path": str(folder)}}, timeout=240).execute()
    return [cell.get("outputs", []) for cell in notebook.cells]


def _shown(outputs):
    """Return what the page shows of each cell: its text, and its picture."""
    shown = []
    for cell in outputs:
        data = [each.get("data", {}) for each in cell]
        svg = "".join(each.get("image/svg+xml", "") for each in data)
        printed = "".join(each.get("text", "") for each in cell)
        values = "".join(each.get("text/plain", "") for each in data if "image/svg+xml" not in each)
        shown.append({"text": (printed + values).strip(), "svg": svg})
    return shown


def test_a_notebook_is_stored_without_outputs(notebook):
    """A change of it is a change of its text or its code."""
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [(cell.outputs, cell.execution_count) for cell in cells] == [([], None)] * len(cells)


def test_a_notebook_runs(notebook, request, tmp_path, monkeypatch):
    """It runs from top to bottom, where its own assertions hold, and draws a picture; the site shows what it prints."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the threads of several test workers would wait for each other
    outputs = _executed(notebook, tmp_path)
    made = [each for cell in outputs for each in cell]
    assert any("image/png" in each.get("data", ()) or "image/svg+xml" in each.get("data", ()) for each in made)
    assert "healthy: " in made[-1].data["text/plain"]
    name = request.node.callspec.params["notebook"].stem
    if name in SHOWN:
        assert _shown(outputs) == json.loads(SHOWN[name].read_text(encoding="utf-8"))


def test_the_site_shows_the_outputs_of_the_notebook_that_needs_no_gpu():
    """Those of the other one depend on the machine."""
    assert [*SHOWN] == ["range_report"]


if __name__ == "__main__":
    for name, path in SHOWN.items():
        (source,) = (each for each in NOTEBOOKS if each.stem == name)
        with TemporaryDirectory() as folder:
            shown = _shown(_executed(nbformat.read(source, as_version=nbformat.NO_CONVERT), folder))
        path.write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")
