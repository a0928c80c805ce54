"""What tests of PyTorch share: a parameter with its optimizer, marks for both kinds of optimizers, and comparisons."""

import copy
import pickle

import pytest
import torch
from torch import nn

from lossscale_core.errors import OverflowStreakError
from lossscale_torch import GradScaler
from lossscale_torch.hooks import Hook
from tests.adapters.emulated_device import Emulated

INF = float("inf")
EITHER_KIND = pytest.mark.parametrize("fused", [False, True], ids=["ordinary", "fused"])
COPIES = pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])

CALLS = {
    "step": lambda scaler, optimizer: None,
    "unscale_": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "unscale_and_clip_": lambda scaler, optimizer: scaler.unscale_and_clip_(optimizer, 1.0),
}
"""What a loop may call between backward and `step`."""


def one(fused=False, device="cpu", lr=1.0, **settings):
    """Return a parameter of one element, 1.0, and its optimizer; a gradient of 1.0 moves it to 0.0."""
    param = torch.nn.Parameter(torch.ones(1, device=device))
    return param, torch.optim.SGD([param], lr=lr, fused=fused, **settings)


def two(fused=False, **settings):
    """Return two parameters, and their optimizers."""
    return zip(*(one(fused, **settings) for _ in range(2)), strict=True)


def ready(make=GradScaler, *, device="cpu", **settings):
    """Return a scaler that has scaled a loss, so that optimizers can be stepped."""
    scaler = make(device, **settings)
    scaler.scale(torch.ones((), device=device))
    return scaler


def take_step(scaler, optimizer, grad, new_scale=None):
    """Take a step of an optimizer of one parameter, with a gradient of these elements; return its outcome."""
    (param,) = optimizer.param_groups[0]["params"]
    scaler.scale(torch.ones((), device=param.device))
    param.grad = torch.full_like(param, grad)
    scaler.step(optimizer)
    return scaler.update(new_scale)


def take_steps(params, optimizers, scaler, *sizes, prepare=()):
    """Take a step of each optimizer, with gradients of these sizes; return its outcome."""
    for param, size in zip(params, sizes, strict=True):
        param.grad = torch.full_like(param, size * scaler.get_scale())
    scaler.scale(torch.ones((), device=params[0].device))
    for call, *args in [*prepare, *((scaler.step, each) for each in optimizers)]:
        call(*args)
    return scaler.update()


def guarded_steps(optimizer, sizes):
    """Take steps of a guarded optimizer of one parameter; return a letter for each, and an error, reads and values.

    The letter is a if the step was applied, s if it was skipped, p if it was a spike, and e if it raised an error.
    """
    (param,) = optimizer.param_groups[0]["params"]
    letters, rows = "", []
    for size in sizes:
        param.grad = torch.full_like(param, size)
        reads, text = Emulated.reads, ""
        try:
            optimizer.step()
        except (OverflowStreakError, RuntimeError) as error:
            text = str(error)
        reads, info = Emulated.reads - reads, optimizer.last_step
        assert not (info and text)
        assert not hasattr(optimizer, "found_inf")
        letters += "e" if text else "a" if info else "p" if info.spiked else "s"
        values = [param, *optimizer.state[param].values()]
        rows.append((text, reads, [value.item() for value in values if value is not None]))
    return letters, rows


def same(first, second):
    """Return whether all tensors of two collections are the same, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def copies(tensors):
    """Return copies of tensors."""
    return [each.detach().clone() for each in tensors]


class Veto(Hook):
    """Returns its value as its veto, counts the steps that it saw, and notes its calls."""

    def __init__(self, name="veto", calls=None, value=False):
        self.name, self.value, self.steps = name, value, 0
        self.calls = [] if calls is None else calls

    def before_step(self, scaler, step):
        """Return the veto."""
        self.calls.append((self.name, "before", id(step.optimizer)))
        return self.value

    def after_step(self, scaler, step):
        """Note the call."""
        self.calls.append((self.name, "after", id(step.optimizer)))

    def after_update(self, scaler, info):
        """Count the step."""
        self.steps += 1
        self.calls.append((self.name, "update", bool(info.applied)))

    def state_dict(self):
        """Save the count."""
        return {self.name: self.steps}

    def load_state_dict(self, state_dict):
        """Restore the count, if there is one."""
        self.steps = state_dict.get(self.name, 0)


class Legacy(torch.optim.SGD):
    """An optimizer of torch's older contract, as in Apex: it is handed the scaler, and asks it for what it needs."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, *, grad_scaler=None):
        """Unscale and step with the scaler's own methods."""
        record = grad_scaler._per_optimizer_states[id(self)]
        if record["stage"].name == "READY":
            grad_scaler.unscale_(self)
        return grad_scaler._maybe_opt_step(super(), record)


class Loop:
    """A model with buffers, an optimizer and a scaler."""

    def __init__(self, fused=False, protects=False, model=None, **settings):
        torch.manual_seed(0)
        self.model = model if model is not None else nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, fused=fused)
        settings = {"init_scale": 2.0**10, **settings} if "policy" not in settings else settings
        protects = self.model if protects is True else protects or ()
        self.scaler = GradScaler("cpu", protect=protects, **settings)

    def backward(self, batch=None, factor=1.0):
        """Scale a loss, and give the model its gradients."""
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(torch.randn(8, 4) if batch is None else batch).square().mean() * factor).backward()

    def step(self, is_bad=False, batch=None, factor=1.0):
        """Take a step, whose gradients overflow if it is bad."""
        self.backward(batch, factor)
        if is_bad:
            self.model[0].weight.grad.fill_(INF)
        self.scaler.step(self.optimizer)
        return self.scaler.update()

    def retry(self, bad_tries=0, **settings):
        """Take a step with tries that overflow before one that does not; return what is known of the tries."""
        for attempt in self.scaler.attempts(self.model, **settings):
            self.step(is_bad=attempt.number < bad_tries)
        return attempt

    def buffers(self):
        """Return copies of the buffers."""
        return copies(self.model.buffers())
