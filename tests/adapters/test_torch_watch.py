"""What a `GradScaler` logs by itself, what that costs, and what it does at the floor."""

import copy
import logging
import pickle

import pytest
import torch

from lossscale_core.errors import PolicyError, ScaleFloorError
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


def test_raise_stops_at_the_floor(caplog):
    """`update` raises once its step is complete, at each overflow there; a run that continues does so exactly."""
    policy = {"kind": "dynamic", "init_scale": 4.0}
    scaler = GradScaler("cpu", policy=policy, on_floor="raise")
    _run(scaler, FINE + NAN)
    for streak in (2, 3):
        with pytest.raises(ScaleFloorError, match=r"^loss_scale=1 has reached min_scale=1, .* pass on_floor='warn'\.$"):
            _run(scaler, NAN)
        assert scaler.last_step.overflow_streak == streak
    param = torch.nn.Parameter(torch.ones(()))
    with pytest.raises(ScaleFloorError):
        scaler.minimize(_Plain([param]), lambda: param * float("nan"))
    scaler.state_dict()  # a checkpoint is saved all the same
    _run(scaler, FINE)
    other = _run(GradScaler("cpu", policy=policy, on_floor="ignore"), FINE + NAN * 4 + FINE)
    assert scaler.state_dict() == other.state_dict()


def test_raise_after_a_fused_optimizer_waits_for_a_read():
    """The host learns of the floor where it reads the scale."""
    scaler = _far(policy="dynamic", on_floor="raise")
    with pytest.raises(ScaleFloorError, match="min_scale=1"):
        scaler.get_scale()


def test_ignore_says_nothing_at_the_floor(caplog):
    """For a policy with a floor in its usual place."""
    _run(GradScaler("cpu", policy="dynamic", on_floor="ignore"), NAN * 200)
    assert caplog.records == []
    with pytest.raises(PolicyError, match="on_floor='stop' must be"):
        GradScaler("cpu", on_floor="stop")


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


def test_an_update_without_a_step_raises_nothing():
    """The overflow that stands in a loaded state was counted before."""
    policy = {"kind": "dynamic", "init_scale": 2.0, "min_scale": 1.0}
    saved = _run(GradScaler("cpu", policy=policy), NAN).state_dict()
    scaler = GradScaler("cpu", policy=policy, on_floor="raise")
    scaler.load_state_dict(saved)
    optimizer = _Plain([torch.nn.Parameter(torch.ones(1))])
    scaler.scale(torch.ones(()))
    scaler.skip(optimizer)
    assert scaler.update().overflowed is False
    with pytest.raises(ScaleFloorError):
        _run(scaler, NAN)
