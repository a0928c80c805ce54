"""Errors and warnings of the package that no test of behaviour meets: a program, the kind, and the words."""

import pickle

import pytest
import torch

from lossscale_core import DynamicScaling, SpikeGuard
from lossscale_core.errors import CheckpointWarning, PolicyError
from lossscale_torch import GradScaler, overflow_report, range_report
from lossscale_torch.hooks import Guard
from lossscale_torch.testing import check_training_loop
from tests.adapters.torch_steps import ready

NAN = float("nan")
LINEAR, ONES = torch.nn.Linear(1, 1), torch.ones(3)
OFF_SCALER = GradScaler("cpu", enabled=False)


def _sgd(**kwargs):
    """Return an optimizer of one parameter with a gradient."""
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    return torch.optim.SGD([param], lr=1.0, **kwargs)


def _pickled_in_a_step(make, optimizer):
    scaler = ready(make)
    scaler.unscale_(optimizer)
    pickle.dumps(scaler)


def _said(message, words):
    """Return whether a message holds each of these words, which dots divide."""
    return all(each in message for each in words.split(" ... "))


AS_TORCH = {
    "a closure": (lambda make, o: ready(make).step(o, closure=print), RuntimeError, "Closure use is not currently"),
    "a number as loss": (lambda make, o: make("cpu").scale(5), ValueError, "outputs must be a Tensor or an iterable"),
    "an empty state": (lambda make, o: make("cpu").load_state_dict({}), RuntimeError, "source state dict is empty"),
    "a state of one key": (lambda make, o: make("cpu").load_state_dict({"scale": 1.0}), KeyError, "growth_factor"),
    "two new scales": (lambda make, o: ready(make).update(torch.ones(2)), AssertionError, "should be a float or"),
    "pickled in a step": (_pickled_in_a_step, AssertionError, "may only be pickled"),
    "a growth of 1": (lambda make, o: make("cpu", growth_factor=1.0), AssertionError, "growth factor must be > 1.0"),
}


@pytest.mark.parametrize(("program", "error", "words"), AS_TORCH.values(), ids=AS_TORCH)
@pytest.mark.parametrize("make", [GradScaler, torch.amp.GradScaler], ids=["ours", "torch"])
def test_errors_that_are_torchs(make, program, error, words):
    """The same type and the same words, from torch's scaler and from ours."""
    with pytest.raises(error) as caught:
        program(make, _sgd())
    assert _said(str(caught.value), words)


def _second_step():
    scaler, optimizer = ready(), _sgd()
    scaler.step(optimizer)
    scaler.step(optimizer)


def _two_guards():
    GradScaler("cpu", guard=SpikeGuard(), hooks=[Guard(SpikeGuard())])


def _report(change):
    return lambda: range_report(LINEAR, lambda: change(LINEAR(torch.ones(2, 1))))


BOTH = "policy='none' and init_scale=1024.0, growth_factor=4.0 are ... policy=DynamicScaling(init_scale=1024.0, growth"
NEW_SCALE = "new_scale should be a float ... pass a positive number, or a tensor of one element"
GIVEN_MODULE = "was given a Linear, which has no param_groups ... pass the torch"
ERRORS = {
    "a scale of NaN": (lambda: GradScaler("cpu", NAN), PolicyError, "init_scale=nan must be a number from 2**-126"),
    "a scale of infinity": (lambda: GradScaler("cpu", float("inf")), PolicyError, "init_scale=inf must be a number"),
    "a policy as scale": (lambda: GradScaler("cpu", DynamicScaling()), PolicyError, "for a policy, pass policy=..."),
    "a policy and a scale": (lambda: GradScaler("cpu", 1024.0, 4.0, policy="none"), PolicyError, BOTH),
    "two guards": (_two_guards, PolicyError, "one guard, and 2 were given; pass one of them, as guard="),
    "no interval": (lambda: GradScaler("cpu", policy="none").set_growth_interval(3), PolicyError, "no growth_interval"),
    "a scale as device": (lambda: GradScaler(2.0**16), TypeError, "write GradScaler('cuda', init_scale=65536.0)"),
    "protect a name": (lambda: GradScaler("cpu", protect=["m"]), TypeError, "takes modules, and 'm' is not one; pass"),
    "a function as hook": (lambda: GradScaler("cpu", hooks=[print]), TypeError, "hooks= was given ... derive a class"),
    "a module that waits": (lambda: GradScaler("cpu", optimizers=LINEAR), TypeError, f"GradScaler() {GIVEN_MODULE}"),
    "a module, disabled": (lambda: OFF_SCALER.unscale_and_clip_(LINEAR, 1.0), TypeError, GIVEN_MODULE),
    "a module that steps": (lambda: ready().step(LINEAR), TypeError, f"step() {GIVEN_MODULE}"),
    "a second step": (_second_step, RuntimeError, "If that step was interrupted, end it by scaler.update()"),
    "no optimizers": (lambda: ready().unscale_and_clip_([], 1.0), ValueError, "empty list ... pass an optimizer"),
    "a negative norm": (lambda: OFF_SCALER.unscale_and_clip_(_sgd(), -1.0), PolicyError, "max_norm=-1.0 must be"),
    "an order of NaN": (lambda: OFF_SCALER.unscale_and_clip_(_sgd(), 1.0, NAN), PolicyError, "above 0; pass 2.0"),
    "a new scale of 0": (lambda: ready().update(0.0), AssertionError, f"{NEW_SCALE} ... It is 0.0"),
    "a new scale of NaN": (lambda: ready().update(torch.tensor(NAN)), AssertionError, f"{NEW_SCALE} ... ensor"),
    "a new scale with a graph": (lambda: ready().update(torch.ones(1, requires_grad=True)), AssertionError, NEW_SCALE),
    "a number attached": (lambda: GradScaler("cpu").attach(ONES, 0.5), TypeError, "aux_loss is float ... pass an"),
    "attached to integers": (lambda: GradScaler("cpu").attach(ONES.int(), ONES), TypeError, "x is a torch.int32"),
    "no loop": (lambda: check_training_loop(lambda scaler: None), TypeError, "returned None; return an object with"),
    "a report of a state": (lambda: overflow_report([("w", 1.0)]), TypeError, "iterable of tuple ... pass model."),
    "a report of a number": (_report(lambda out: out.sum().item()), TypeError, "loss_fn returned float ... return the"),
    "a report of two losses": (_report(lambda out: out), ValueError, "returned shape (2, 1) ... return its mean or"),
    "a report without graph": (_report(lambda out: out.sum().detach()), ValueError, "no graph ... undetached"),
}


@pytest.mark.parametrize(("program", "error", "words"), ERRORS.values(), ids=ERRORS)
def test_errors(program, error, words):
    """Each says what was given and what to do; a policy's error has no other one behind it."""
    with pytest.raises(error) as caught:
        program()
    assert _said(str(caught.value), words), str(caught.value)
    assert error is not PolicyError or caught.value.__cause__ is caught.value.__context__ is None


def _step_without_a_loss():
    scaler = ready()
    scaler.step(_sgd())
    scaler.update()
    scaler.get_scale()  # which Accelerate does, and does not count
    scaler.step(_sgd())


def _scaler_for_each_step():
    optimizer = _sgd(momentum=0.9)
    optimizer.step()
    ready().step(optimizer)


def _other_settings():
    saved = {**torch.amp.GradScaler("cpu").state_dict(), "growth_interval": 7, "backoff_factor": 0.25}
    GradScaler("cpu", policy="dynamic").load_state_dict(saved)


NO_CUDA = "CUDA is not available.  Disabling."
OFF = f"{NO_CUDA}  This turns policy=, protect= off, too; pass the device that computes, as in GradScaler('cpu')"
NO_LOSS = "no loss was scaled since the last update() ... through scaler.scale ... optimizers=[first, second]"
BOUNDED = DynamicScaling(max_scale=2.0**20)
BEYOND = "new_scale=1e+30 is beyond the bounds of the policy, and becomes 2**20"
NEW = "starts over with a loss scale of 2**16; make one scaler for all steps, before the loop; ... load_state_dict"
WARNINGS = {
    "no CUDA": (lambda: GradScaler(), UserWarning, NO_CUDA),
    "no CUDA for options": (lambda: GradScaler(policy="none", protect=[torch.nn.ReLU()]), UserWarning, OFF),
    "a large scale": (lambda: GradScaler("cpu", 1e38), UserWarning, "is beyond the bounds of ... and becomes 2**126"),
    "no scaled loss": (_step_without_a_loss, UserWarning, NO_LOSS),
    "a new scale beyond the bounds": (lambda: ready(policy=BOUNDED).update(1e30), UserWarning, BEYOND),
    "other settings than the saved ones": (_other_settings, CheckpointWarning, "factor was 0.25 ... interval was 7"),
    "a scaler for each step": (_scaler_for_each_step, CheckpointWarning, NEW),
}


@pytest.mark.parametrize(("program", "category", "words"), WARNINGS.values(), ids=WARNINGS)
def test_warnings(program, category, words):
    """Each comes once, and points to the line of the caller."""
    if NO_CUDA in words and torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA; there the warning is not due")
    with pytest.warns(category) as caught:
        program()
    (warning,) = caught
    assert _said(str(warning.message), words), str(warning.message)
    assert warning.filename == __file__
    assert warning.lineno in {line for *_, line in program.__code__.co_lines()}
