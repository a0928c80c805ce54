"""Every public method at every moment of a step: the errors are torch's, and the next step is right."""

import io

import pytest
import torch

from lossscale_core import DynamicScaling
from lossscale_core.errors import CallOrderError
from lossscale_torch import GradScaler
from tests.adapters.emulated_device import Emulated
from tests.adapters.torch_steps import CALLS, COPIES, EITHER_KIND, one, take_step


def _interrupt(scaler, optimizer):
    with pytest.raises(KeyboardInterrupt):
        scaler.step(optimizer, closure_of_a_notebook=1)


def _backward(scaler, optimizer):
    scaler.scale(optimizer.param_groups[0]["params"][0].sum()).backward()


MOMENTS = {
    "before the first loss": (),
    "after a loss": ("scale",),
    "without gradients": ("scale", "zero_grad"),
    "after unscale_": ("scale", "unscale_"),
    "after a clip": ("scale", "unscale_and_clip_"),
    "after a step": ("scale", "step"),
    "after an interrupted step": ("scale", "interrupt"),
    "after skip": ("scale", "skip"),
    "after an update": ("scale", "step", "update"),
}
METHODS = {
    "scale": lambda scaler, optimizer: _backward(scaler, optimizer),
    "zero_grad": lambda scaler, optimizer: optimizer.zero_grad(),
    "unscale_": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "step": lambda scaler, optimizer: scaler.step(optimizer),
    "update": lambda scaler, optimizer: scaler.update(),
    "update to a number": lambda scaler, optimizer: scaler.update(4.0),
    "get_scale": lambda scaler, optimizer: scaler.get_scale(),
    "set_growth_interval": lambda scaler, optimizer: scaler.set_growth_interval(7),
    "set_growth_factor": lambda scaler, optimizer: scaler.set_growth_factor(4.0),
    "state_dict": lambda scaler, optimizer: scaler.state_dict(),
    "interrupt": _interrupt,
}
OUR_METHODS = {
    "load_state_dict": lambda scaler, optimizer: scaler.load_state_dict(GradScaler("cpu", 2.0).state_dict()),
    "unscale_and_clip_": lambda scaler, optimizer: scaler.unscale_and_clip_(optimizer, 100.0),
    "skip": lambda scaler, optimizer: scaler.skip(optimizer),
    "metrics": lambda scaler, optimizer: scaler.metrics(),
    "diagnose": lambda scaler, optimizer: scaler.diagnose(),
    "place_on": lambda scaler, optimizer: scaler.place_on("cpu"),
    "policy": lambda scaler, optimizer: setattr(scaler, "policy", DynamicScaling()),
    "optimizer_steps": lambda scaler, optimizer: scaler.optimizer_steps(),
    "repr": lambda scaler, optimizer: repr(scaler),
    "attach": lambda scaler, optimizer: scaler.attach(torch.ones(1, requires_grad=True), torch.ones(())),
    "attempts": lambda scaler, optimizer: [take_step(scaler, optimizer, 8.0) for _ in scaler.attempts()],
}
EARLY = "before the first loss", "without gradients"
"""The moments at which the optimizer has no gradients, which is an error of torch's only."""


class _Interruptible(torch.optim.SGD):
    def step(self, closure=None, **settings):
        if settings:
            raise KeyboardInterrupt
        return super().step(closure)


def _at(moment, make_scaler, fused, enabled):
    """Return a parameter of one element, its optimizer and its scaler at a moment of a step."""
    (param, _), scaler = one(), make_scaler("cpu", init_scale=8.0, enabled=enabled)
    optimizer = _Interruptible([param], lr=1.0, fused=fused)
    for name in MOMENTS[moment]:
        {**METHODS, **OUR_METHODS}[name](scaler, optimizer)
    return param, optimizer, scaler


def _error(call, *args):
    """Return the type of the error that a call raises, one of torch's, or None."""
    try:
        call(*args)
    except (AssertionError, RuntimeError) as error:
        return AssertionError if isinstance(error, AssertionError) else RuntimeError
    return None


@pytest.mark.filterwarnings("ignore:no loss was scaled:UserWarning")
@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
@EITHER_KIND
@pytest.mark.parametrize("method", [*METHODS, *OUR_METHODS])
@pytest.mark.parametrize("moment", MOMENTS)
def test_every_method_at_every_moment(moment, method, fused, enabled):
    """Each one works or raises torch's error; then `update` ends the step, and the next one is applied."""
    param, optimizer, scaler = _at(moment, GradScaler, fused, enabled)
    error = _error({**METHODS, **OUR_METHODS}[method], scaler, optimizer)
    if {method, *MOMENTS[moment]} <= METHODS.keys() and (moment not in EARLY or method == "update"):
        _, *theirs = _at(moment, torch.amp.GradScaler, fused, enabled)
        assert error is _error(METHODS[method], *reversed(theirs))
    elif moment in EARLY and not method.startswith("update"):
        assert error is None
    _error(scaler.update)
    optimizer.zero_grad()
    before = param.item()
    _backward(scaler, optimizer)
    scaler.step(optimizer)
    assert scaler.update()
    assert param.item() == before - 1.0


@pytest.mark.parametrize("calls", ["step skip", "skip step", "skip", "step", "step step", "clip"])
def test_a_disabled_scaler_says_whether_the_step_was_taken(calls):
    """Also if the loop skips the step besides."""
    (param, optimizer), scaler = one(), GradScaler("cpu", enabled=False)
    param.grad = torch.ones(1)
    for call in calls.split():
        {**METHODS, **OUR_METHODS, "clip": OUR_METHODS["unscale_and_clip_"]}[call](scaler, optimizer)
    info = scaler.update()
    assert bool(info) == (param.item() != 1.0 or calls == "clip")
    assert (info == bool(info), info == (not info), info != bool(info)) == (True, False, False)
    assert info == scaler.last_step == (*info,)


@EITHER_KIND
@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_a_growth_tracker_that_is_not_a_tensor(device, fused):
    """The next update raises the type of torch's error, and it can be replaced."""
    with Emulated("mps"):
        (_, optimizer), scaler = one(fused, device), GradScaler(device, init_scale=8.0)
        take_step(scaler, optimizer, 1.0)
        tracker, scaler._growth_tracker = scaler._growth_tracker, 0
        with pytest.raises(TypeError, match="must be"):
            take_step(scaler, optimizer, 1.0)
        scaler._growth_tracker = tracker
        assert take_step(scaler, optimizer, 1.0)


def test_two_scalers_may_scale_one_loss():
    """Only the same one twice is an error, also with another between."""
    first, second = GradScaler("cpu", 2.0), GradScaler("cpu", 4.0)
    loss = second.scale(first.scale(torch.ones(())))
    assert loss.item() == 8.0
    for scaler in (first, second):
        with pytest.raises(CallOrderError, match="scaled already"):
            scaler.scale(loss)


@COPIES
def test_the_mark_of_a_scaled_loss_names_one_scaler(copied):
    """A copy of the loss has the mark; a copy of the scaler has another one, and so have scalers made later."""
    scaler = GradScaler("cpu", 2.0)
    loss = copied(scaler.scale(torch.ones(())))
    with pytest.raises(CallOrderError, match="scaled already"):
        scaler.scale(loss)
    loss = copied(scaler).scale(loss)
    for _ in range(3):  # with the `id` of the scaler before
        loss = GradScaler("cpu", 2.0).scale(loss)
    torch.save(loss, file := io.BytesIO())
    file.seek(0)
    assert torch.load(file) == 2.0**5


@EITHER_KIND
def test_a_step_without_gradients_is_not_refused(fused):
    """The unscaled ones were dropped, and a loss of other parameters was scaled since."""
    param, optimizer, scaler = _at("after unscale_", GradScaler, fused, True)
    optimizer.zero_grad()
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert scaler.update()
    assert param.item() == 1.0


@EITHER_KIND
@pytest.mark.parametrize("call", ["unscale_", "unscale_and_clip_"])
def test_steps_that_are_begun_and_not_finished_are_reported(call, fused, caplog):
    """Once in the log, and by `diagnose` after such a step."""
    _, optimizer, scaler = _at("after an update", GradScaler, fused, True)
    for _ in range(100):
        _backward(scaler, optimizer)
        CALLS[call](scaler, optimizer)
        assert not scaler.update()
    assert [record.event for record in caplog.records] == ["unfinished_step"]
    assert "neither taken nor skipped" in scaler.diagnose()
    take_step(scaler, optimizer, 1.0)
    assert "neither" not in scaler.diagnose()
