"""The examples and notebooks for PyTorch: real runs that learn in float16, and continue from a checkpoint."""

import runpy
import warnings
from functools import partial
from pathlib import Path

import nbformat
import pytest
import torch.distributed as dist
from nbclient import NotebookClient

from lossscale_core.errors import CheckpointWarning
from tests.adapters.torch_programs import bits
from tests.adapters.torch_ranks import local_parameters, on_ranks
from tests.torch_versions import HAS_FSDP2_ON_CPU

EXAMPLES = Path(__file__).parents[2] / "examples"


def _main(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


def _assert_healthy(accuracy, scaler, steps):
    assert accuracy > 0.85
    assert scaler.metrics()["steps"] == steps
    assert scaler.diagnose().startswith("healthy: ")


@pytest.mark.usefixtures("one_thread")
def test_the_plain_loop_learns_and_resumes(tmp_path):
    """A run that was stopped and started again equals a run without a stop, bit for bit."""
    main = _main("torch_plain")
    accuracy, training = main(60, folder=tmp_path / "whole")
    _assert_healthy(accuracy, training.scaler, 60)
    main(20, folder=tmp_path / "halves")
    _, resumed = main(60, folder=tmp_path / "halves")
    assert bits(*(part.state_dict() for part in resumed.parts)) == bits(*(part.state_dict() for part in training.parts))


def _train_in_ddp(rank):
    accuracy, model, scaler = _main("torch_ddp")(50)
    _assert_healthy(accuracy, scaler, 50)
    weights = [None] * dist.get_world_size()
    dist.all_gather_object(weights, bits(model.state_dict()))
    assert weights[0] == weights[1], rank


def _train_in_fsdp2(rank, folder):
    main = _main("torch_fsdp2")
    accuracy, model, scaler = main(50, folder=folder / "whole")
    _assert_healthy(accuracy, scaler, 50)
    main(20, folder=folder / "halves")
    _, resumed, _ = main(50, folder=folder / "halves")
    assert bits(local_parameters(resumed)) == bits(local_parameters(model))


def _train(rank, world_size, folder):
    warnings.simplefilter("error", CheckpointWarning)  # pytest's filters end where its process does
    _train_in_ddp(rank)
    if HAS_FSDP2_ON_CPU:
        _train_in_fsdp2(rank, folder)


def test_examples_learn_on_two_ranks(tmp_path):
    """The ranks of DDP end with the same weights; a run of FSDP2 continues from its sharded checkpoint, bit for bit."""
    on_ranks(2, partial(_train, folder=tmp_path))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("notebooks/*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    """A notebook is stored without outputs, runs from top to bottom, and draws a picture; its assertions hold."""
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    assert not any(cell.outputs or cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the threads of several test workers would wait for each other
    NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}, timeout=240).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any({"image/png", "image/svg+xml"} & output.get("data", {}).keys() for output in outputs)
    assert "healthy: " in outputs[-1].data["text/plain"]
