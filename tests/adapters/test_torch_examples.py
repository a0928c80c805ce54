"""The PyTorch examples, as real runs: they learn in float16, skip overflows as a whole, continue from a checkpoint."""

import runpy
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from lossscale_core.errors import CheckpointWarning
from tests.adapters.test_torch_distributed import _local, _on_ranks
from tests.adapters.torch_programs import bits
from tests.torch_versions import HAS_FSDP2_ON_CPU

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = {"torch_plain", "torch_ddp", "torch_fsdp2"}


def _main(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


def _assert_healthy(accuracy, scaler, steps):
    counts = scaler.metrics()
    assert accuracy > 0.85
    assert counts["steps"] == steps
    assert 0 < counts["skipped_steps"] < 20
    assert scaler.diagnose().startswith("healthy: ")


def test_no_example_is_left_out():
    """Each example is run here."""
    assert {path.stem for path in EXAMPLES.glob("torch_*.py")} == PROGRAMS


@pytest.mark.usefixtures("one_thread")
def test_the_plain_loop_learns_and_resumes(tmp_path, capsys):
    """A run that was stopped and started again is bit for bit one that was not; its log has each step's scale."""
    main = _main("torch_plain")
    accuracy, training = main(100, folder=tmp_path / "whole")
    _assert_healthy(accuracy, training.scaler, 100)
    main(40, folder=tmp_path / "halves")
    _, resumed = main(100, folder=tmp_path / "halves")
    assert bits(*(part.state_dict() for part in resumed.parts)) == bits(*(part.state_dict() for part in training.parts))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == lines[2]
    assert len([*(tmp_path / "whole").glob("events.*")]) == 1


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
    assert bits(_local(resumed)) == bits(_local(model))


def _train(rank, world_size, folder):
    warnings.simplefilter("error", CheckpointWarning)  # pytest's filters end where its process does
    _train_in_ddp(rank)
    if HAS_FSDP2_ON_CPU:
        _train_in_fsdp2(rank, folder)


def test_they_learn_on_two_ranks(tmp_path):
    """DDP's ranks end with the same weights; a run of FSDP2 continues from its sharded checkpoint, bit for bit."""
    _on_ranks(2, partial(_train, folder=tmp_path))
