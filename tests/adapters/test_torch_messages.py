"""Every error and every warning of the scaler and its reports, in three tables: a program, the kind, and the words."""

import pickle
import warnings

import pytest
import torch

from lossscale_core import DynamicScaling, SpikeGuard
from lossscale_core.errors import CheckpointWarning, PolicyError
from lossscale_torch import GradScaler, init_state, scale
from lossscale_torch.hooks import Guard
from tests.adapters.torch_steps import Legacy, ready

INF, NAN = float("inf"), float("nan")
TORCHS = torch.amp.GradScaler("cpu").state_dict()


def _sgd(**kwargs):
    """Return an optimizer of one parameter with a gradient."""
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    return torch.optim.SGD([param], lr=1.0, **kwargs)


def _pickled_in_a_step(make, optimizer):
    scaler = ready(make)
    scaler.unscale_(optimizer)
    pickle.dumps(scaler)


def _backward_late(make, optimizer):
    scaler, param = make("cpu", growth_interval=1), torch.nn.Parameter(torch.ones(1))
    late = scaler.scale(param.sum())
    scaler.step(optimizer)
    scaler.update()
    late.backward()


def _csr():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of its beta state
        param = torch.nn.Parameter(torch.eye(2).to_sparse_csr())
    param.grad = param.detach().clone()
    return torch.optim.SGD([param])


def _said(message, words):
    """Return whether a message holds each of these words, which dots divide."""
    return all(each in message for each in words.split(" ... "))


AS_TORCH = {
    "a closure": (lambda make, o: ready(make).step(o, closure=print), RuntimeError, "Closure use is not currently"),
    "a number as loss": (lambda make, o: make("cpu").scale(5), ValueError, "outputs must be a Tensor or an iterable"),
    "a late backward pass": (_backward_late, RuntimeError, "modified by an inplace operation"),
    "an empty state": (lambda make, o: make("cpu").load_state_dict({}), RuntimeError, "source state dict is empty"),
    "a state of one key": (lambda make, o: make("cpu").load_state_dict({"scale": 1.0}), KeyError, "growth_factor"),
    "two new scales": (lambda make, o: ready(make).update(torch.ones(2)), AssertionError, "should be a float or"),
    "pickled in a step": (_pickled_in_a_step, AssertionError, "may only be pickled"),
    "a growth of 1": (lambda make, o: make("cpu", growth_factor=1.0), AssertionError, "growth factor must be > 1.0"),
    "a backoff of 1": (lambda make, o: make("cpu", backoff_factor=1.0), AssertionError, "factor must be < 1.0"),
}


@pytest.mark.parametrize(("program", "error", "words"), AS_TORCH.values(), ids=AS_TORCH)
@pytest.mark.parametrize("make", [GradScaler, torch.amp.GradScaler], ids=["ours", "torch"])
def test_errors_that_are_torchs(make, program, error, words):
    """The same type and the same words, from torch's scaler and from ours."""
    with pytest.raises(error) as caught:
        program(make, _sgd())
    assert _said(str(caught.value), words)


def _settings(words, *args, error=PolicyError, **settings):
    return lambda: GradScaler("cpu", *args, **settings), error, words


def _wrong_type(words, **settings):
    return _settings(words, error=TypeError, **settings)


def _device(error, words, value):
    return lambda: GradScaler(value), error, words


def _loss(words, outputs):
    return lambda: GradScaler("cpu").scale(outputs), ValueError, f"iterable of Tensors. It is {words}; pass the loss"


def _not_optimizer(call, given):
    return call, TypeError, f"was given a {given}, which has no param_groups; it takes an optimizer; pass the torch"


def _max_norm(value):
    words = f"max_norm={value!r} must be a number from 0; pass"
    return lambda: ready().unscale_and_clip_(_sgd(), value), PolicyError, words


def _norm_type(value):
    words = "norm_type= ... must be above 0; pass 2.0"
    return lambda: OFF_SCALER.unscale_and_clip_(_sgd(), 0.5, value), PolicyError, words


def _new_scale(value):
    given = "ensor" if isinstance(value, torch.Tensor) else repr(value)
    words = f"new_scale should be a float ... It is ... {given} ... pass a positive number, or a tensor of one element"
    return lambda: ready().update(value), AssertionError, words


def _attach(words, x, aux_loss):
    return lambda: GradScaler("cpu").attach(x, aux_loss), TypeError, words


LINEAR, ONES = torch.nn.Linear(1, 1), torch.ones(3)
OFF_SCALER = GradScaler("cpu", enabled=False)
BOTH = (
    "policy='none' and init_scale=1024.0, growth_factor=4.0 are both given; pass either policy= or init_scale, "
    "growth_factor, backoff_factor and growth_interval, as in policy=DynamicScaling(init_scale=1024.0, growth_factor=4"
)
NO_NUMBER = "must be a number such as 2.0**16; for a policy, pass policy=..."
A_HOOK = "hooks= was given ... it takes objects of lossscale_torch.hooks.Hook; derive a class from it"
TWO_GUARDS = "one guard, and 2 were given; pass one of them, as guard="
NO_INTERVAL = "NoScaling() has no growth_interval; make the scaler with another policy"
ERRORS = {
    "a scale of NaN": _settings("init_scale=nan must be a number from 2**-126 to 2**126, where ... ; pass", NAN),
    "the name of a policy as scale": _settings(f"init_scale='dynamic' {NO_NUMBER}", "dynamic"),
    "a policy as scale": _settings(f"init_scale=DynamicScaling( ... {NO_NUMBER}", DynamicScaling()),
    "two guards": _settings(TWO_GUARDS, guard=SpikeGuard(), hooks=[Guard(SpikeGuard())]),
    "no guard": _settings("guard=1 must be a SpikeGuard; pass SpikeGuard()", guard=1),
    "a policy and a scale": _settings(BOTH, 1024.0, 4.0, policy="none"),
    "no interval": (lambda: GradScaler("cpu", policy="none").set_growth_interval(3), PolicyError, NO_INTERVAL),
    "a scale as device": _device(TypeError, "write GradScaler('cuda', init_scale=65536.0)", 2.0**16),
    "a policy as device": _device(TypeError, "must name a device type ... policy=", {"kind": "none"}),
    "protect a name": _wrong_type("takes modules, and 'm' is not one; pass", protect=["m"]),
    "a module that waits": _wrong_type("GradScaler() was given a Linear, which has no param_groups", optimizers=LINEAR),
    "a function as hook": _wrong_type(A_HOOK, hooks=[print]),
    "a loss of a number": _loss("3", 3),
    "the verb's loss of text": (lambda: scale("loss", init_state("dynamic")), TypeError, "'loss' is not a number"),
    "a module stepped": _not_optimizer(lambda: ready().step(LINEAR), "Linear"),
    "parameters clipped": _not_optimizer(lambda: ready().unscale_and_clip_(LINEAR.parameters(), 1.0), "generator"),
    "a second step": (
        lambda: [scaler.step(optimizer) for scaler, optimizer in [(ready(), _sgd())] * 2],
        RuntimeError,
        "If that step was interrupted, end it by scaler.update()",
    ),
    "no optimizers": (lambda: ready().unscale_and_clip_([], 1.0), ValueError, "empty list ... pass an optimizer"),
    **{f"a largest norm of {value!r}": _max_norm(value) for value in (NAN, -1.0, True, "1", None)},
    **{f"a norm of order {order}": _norm_type(order) for order in (0.0, -1.0, -INF, NAN)},
    "a module clipped without a scaler": _not_optimizer(lambda: OFF_SCALER.unscale_and_clip_(LINEAR, 1.0), "Linear"),
    "a CSR gradient": (lambda: ready().unscale_(_csr()), TypeError, "shape (2, 2) has the layout torch.sparse_csr"),
    "a guard without gradients": (lambda: ready(guard=SpikeGuard()).update(), AssertionError, "No inf checks were"),
    **{f"a new scale of {value}": _new_scale(value) for value in (0.0, -1.0, NAN, "8", True, ONES)},
    **{f"a new scale in a tensor, {value}": _new_scale(torch.tensor(value)) for value in (0.0, -1.0, NAN, -INF)},
    "a new scale with a graph": _new_scale(torch.ones(1, requires_grad=True)),
    "a number attached": _attach("aux_loss is float", ONES, 0.5),
    "attached to whole numbers": _attach("x is a torch.int32 tensor", ONES.int(), ONES),
}


@pytest.mark.parametrize(("program", "error", "words"), ERRORS.values(), ids=ERRORS)
def test_errors(program, error, words):
    """Each says what was given, the rule and what to do; a policy's error has no other one behind it."""
    with pytest.raises(error) as caught:
        program()
    assert _said(str(caught.value), words), str(caught.value)
    assert error is not PolicyError or caught.value.__cause__ is caught.value.__context__ is None


def _stepped():
    """Return an optimizer that has taken a step, and has gradients."""
    optimizer = _sgd(momentum=0.9)
    optimizer.step()
    return optimizer


def _after_a_step():
    """Return a scaler that has scaled the loss of its first step only."""
    scaler = ready()
    scaler.step(_sgd())
    scaler.update()
    scaler.get_scale()  # which Accelerate does, and does not count
    return scaler


def _saved(words, policy=None, **saved):
    return lambda: GradScaler("cpu", policy=policy).load_state_dict({**TORCHS, **saved}), CheckpointWarning, words


NO_CUDA = "CUDA is not available.  Disabling."
OFF = f"{NO_CUDA}  This turns policy=, protect= off, too; pass the device that computes, as in GradScaler('cpu')"
NO_LOSS = (
    "no loss was scaled since the last update() ... pass each loss through scaler.scale ... optimizers=[first, second]"
)
OTHER = "backoff_factor was 0.25 ... interval was 7"
BOUNDED = DynamicScaling(max_scale=2.0**20)
BEYOND = "new_scale=1e+30 is beyond the bounds of the policy, and becomes 2**20"
NEW = "starts over with a loss scale of 2**16; make one scaler for all steps, before the loop; ... load_state_dict"
WARNINGS = {
    "no CUDA": (lambda: GradScaler(), UserWarning, NO_CUDA),
    "no CUDA for options": (lambda: GradScaler(policy="none", protect=[torch.nn.ReLU()]), UserWarning, OFF),
    "a large scale": (lambda: GradScaler("cpu", 1e38), UserWarning, "is beyond the bounds of ... and becomes 2**126"),
    "no scaled loss": (lambda: _after_a_step().step(_sgd()), UserWarning, NO_LOSS),
    "a new scale beyond the bounds": (lambda: ready(policy=BOUNDED).update(1e30), UserWarning, BEYOND),
    "other settings than the saved ones": _saved(OTHER, "dynamic", growth_interval=7, backoff_factor=0.25),
    "a scaler for each step": (lambda: ready().step(_stepped()), CheckpointWarning, NEW),
    "an old optimizer": (lambda: ready().step(Legacy([ONES])), FutureWarning, "stop passing itself as a keyword"),
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
