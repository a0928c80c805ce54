"""The notebooks, run in a kernel of their own: every cell works, and nothing that a run printed is stored in them.

The site shows the outputs in docs/_site/notebooks, which `python -m tests.adapters.test_torch_notebooks` writes.
"""

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))
SHOWN = ROOT / "docs/_site/notebooks"


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
        png = "".join(each.get("image/png", "").replace("\n", "") for each in data)
        printed = "".join(each.get("text", "") for each in cell)
        values = "".join(
            each.get("text/plain", "") for each in data if not each.keys() & {"image/svg+xml", "image/png"}
        )
        shown.append({"text": (printed + values).strip(), "svg": svg, "png": png})
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
    committed, drawn = json.loads((SHOWN / f"{name}.json").read_text(encoding="utf-8")), _shown(outputs)
    if name == "float16_on_a_t4":  # it trains: accuracies, scales and pixels are those of a machine and its versions
        committed, drawn = map(_without_numbers, (committed, drawn))
    assert drawn == committed


def _without_numbers(shown):
    return [{"text": re.sub(r"\d+", "0", cell["text"]), "draws": bool(cell["png"])} for cell in shown]


if __name__ == "__main__":
    for source in NOTEBOOKS:
        with TemporaryDirectory() as folder:
            shown = _shown(_executed(nbformat.read(source, as_version=nbformat.NO_CONVERT), folder))
        (SHOWN / f"{source.stem}.json").write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")
