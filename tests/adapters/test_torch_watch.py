"""What a `GradScaler` logs by itself, what that costs, and what it does at the floor."""

import copy
import logging
import pickle

import pytest
import torch

from lossscale_torch import GradScaler
from tests.adapters.test_torch_synchronisation import _FusedOnMeta, _Plain, _Synchronisations

NAN = [float("nan")]
FINE = [1.0]


@pytest.fixture(autouse=True)
def _log_everything(caplog):
    caplog.set_level(logging.INFO, "lossscale")


def _fused(params):
    return torch.optim.SGD(params, lr=0.1, fused=True)


EACH = pytest.mark.parametrize("make", [_Plain, _fused], ids=["ordinary", "fused"])


def _run(scaler, grads, make=_Plain, device="cpu"):
    """Take a step with each of these gradients, as a plain loop does, which reads nothing."""
    param = torch.nn.Parameter(torch.ones(1, device=device))
    optimizer = make([param])
    for grad in grads:
        scaler.scale(torch.ones((), device=device))
        param.grad = torch.full_like(param, grad)
        scaler.step(optimizer)
        scaler.update()
    return scaler


def _events(caplog):
    return [(record.event, record.steps) for record in caplog.records]


@EACH
def test_two_hundred_nans_are_logged(make, caplog):
    """A plain loop on a CPU, which reads nothing, says that overflows do not end, and that the floor is reached."""
    _run(GradScaler("cpu"), NAN * 200, make)
    assert _events(caplog) == [("below_one", 32), ("floor", 160)]
    assert all("look at the loss and the inputs first" in record.getMessage() for record in caplog.records)


@EACH
def test_a_healthy_run_says_that_it_is_calibrated(make, caplog):
    """One line, of the level INFO, which is only seen on request."""
    _run(GradScaler("cpu"), NAN * 3 + FINE * 100, make)
    assert _events(caplog) == [("calibrated", 32)]
    assert caplog.records[0].levelno == logging.INFO


def test_nothing_waits_for_a_device(caplog):
    """Looking at the state adds no synchronisation to that of the step; on a device without values nothing is read."""
    with _Synchronisations() as seen:
        _run(GradScaler("cpu"), NAN * 40)
    assert seen.count == 40
    with _Synchronisations() as seen:
        _run(GradScaler("cpu"), NAN * 40, _fused)
    assert seen.count == 0
    assert len(caplog.records) == 2
    _run(GradScaler("meta", policy="dynamic"), NAN * 40, _FusedOnMeta, device="meta")
    assert len(caplog.records) == 2


class _Far(torch.Tensor):
    """A tensor that is read only if its value is needed, as one on a device."""


def _far(**settings):
    """Return a scaler after forty overflows that only its device knows of."""
    scaler = GradScaler("cpu", **settings)
    scaler.scale(torch.ones(()))
    scaler._scale = torch.tensor(2.0**16).as_subclass(_Far)
    return _run(scaler, NAN * 40, _fused)


@pytest.mark.parametrize("read", [GradScaler.get_scale, GradScaler.state_dict, GradScaler.diagnose])
def test_a_state_on_a_device_is_logged_where_it_is_read(read, caplog):
    """A call that reads the scale to the host logs the events, once."""
    scaler = _far()
    assert caplog.records == []
    for _ in range(3):
        read(scaler)
    assert _events(caplog) == [("below_one", 40)]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_copy_says_nothing_twice(duplicate, caplog):
    """It remembers what was said, and what it says later is its own."""
    scaler = _run(GradScaler("cpu"), NAN * 40)
    _run(duplicate(scaler), NAN * 160)
    _run(scaler, NAN * 120)
    assert _events(caplog) == [("below_one", 32), ("floor", 160), ("floor", 160)]


def test_a_subclass_may_replace_update(caplog):
    """The methods of this class that it calls log; a disabled scaler logs nothing."""

    class Counting(GradScaler):
        updates = 0

        def update(self, *args):
            self.updates += 1
            return super().update(*args)

    assert _run(Counting("cpu"), NAN * 40).updates == 40
    assert _events(caplog) == [("below_one", 32)]
    _run(GradScaler("cpu", enabled=False), NAN * 40)
    assert len(caplog.records) == 1
