"""What a `GradScaler` logs by itself, what that costs, and what it does at the limit of a streak."""

import contextlib
import logging
import math

import pytest
import torch

from lossscale_core import DynamicScaling
from lossscale_core.errors import OverflowStreakError
from lossscale_torch import GradScaler, _watch
from tests.adapters.emulated_device import Emulated, EmulatedCopy
from tests.adapters.torch_steps import EITHER_KIND, one, take_step

NAN, FINE = [math.nan], [1.0]


@pytest.fixture(autouse=True)
def _log_everything(caplog):
    caplog.set_level(logging.INFO, "lossscale")


def _run(scaler, grads, fused=False, device="cpu"):
    """Take a step with each of these gradients, as a plain loop does, which reads nothing."""
    _, optimizer = one(fused, device)
    for grad in grads:
        take_step(scaler, optimizer, grad)
    return scaler


def _events(caplog):
    return [(record.event, record.steps) for record in caplog.records]


def test_the_log_waits_for_no_device(caplog):
    """After a fused optimizer it comes when the state is read, once."""
    with Emulated("mps") as device:
        scaler = _run(GradScaler("mps"), NAN * 40, fused=True, device="mps")
        assert (device.reads, _events(caplog)) == (0, [])
        for _ in range(3):
            scaler.state_dict()
            scaler.diagnose()
    assert _events(caplog) == [("skipping too often", 40)]


@EITHER_KIND
@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_a_plain_loop_is_logged(device, fused, caplog, monkeypatch):
    """In a loop that reads nothing, overflows that do not end and a scale at its floor are logged."""
    # On a device the log comes when a copy of the state has arrived.
    monkeypatch.setattr(_watch, "LateCopy", EmulatedCopy)
    with Emulated("mps") as seen:
        _run(GradScaler(device), NAN * 3 + FINE * 100, fused, device)
        assert _events(caplog) == []
        _run(GradScaler(device), NAN * 200, fused, device)
        assert seen.reads == 0 or not fused
    assert _events(caplog) == [("skipping too often", 32), ("stuck at min_scale", 160)]


@EITHER_KIND
@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_known_streaks_are_errors(device, fused):
    """At the limit, and again only after another streak; on a device nothing is raised where nothing is read."""
    with Emulated("mps"):
        scaler = GradScaler(device, policy=DynamicScaling(max_overflow_streak=3))
        _run(scaler, NAN * 2, fused, device)
        is_known = not fused or device == "cpu"
        with pytest.raises(OverflowStreakError) if is_known else contextlib.nullcontext():
            _run(scaler, NAN, fused, device)
        _run(scaler, FINE + NAN * 2, fused, device)
        assert scaler.state_dict()["overflow_streak"] == 2


def test_a_bad_loss_is_said_once(caplog):
    """Once in the log, and by diagnose after such a step; an overflow of the gradients alone says nothing."""
    (param, optimizer), scaler = one(), GradScaler("cpu", init_scale=1024.0)

    def step(factor, grad=1.0):
        scaler.scale([param.sum(), factor * param.sum()])
        param.grad = torch.full((1,), grad * factor)
        scaler.step(optimizer)
        return scaler.update()

    step(1.0, grad=math.inf)
    assert not caplog.records
    assert not step(math.nan)
    assert not step(math.inf)
    (record,) = caplog.records
    assert (record.event, record.levelname) == ("bad_loss", "WARNING")
    assert record.getMessage().startswith("lossscale, step 2: the loss itself is NaN or infinite: no loss scale")
    assert "the loss itself is NaN or infinite" in scaler.diagnose()
    assert step(1.0)
    assert "the loss itself" not in scaler.diagnose()


def test_missing_gradients_are_logged_once(caplog):
    """After twenty updates of an optimizer that never has gradients; nothing is counted."""
    scaler = GradScaler("cpu")
    for _ in range(45):
        scaler.scale(torch.ones(()))
        scaler.step(one()[1])
        assert scaler.update().applied
    assert [each.getMessage()[:40] for each in caplog.records] == ["20 updates in a row found no gradient in"]
    assert (scaler.get_scale(), scaler.metrics()["steps"]) == (2.0**16, 0)
