"""Every row of the table of differences in docs/torch.md, shown on both sides: torch's own scaler and ours."""

import warnings

import pytest
import torch

from lossscale_torch import GradScaler
from tests.adapters.odd_optimizers import Delegating
from tests.adapters.torch_steps import ready, take_step
from tests.torch_versions import TORCH

DIFFERENCES = {}


def difference(row, torchs, ours):
    """Register a program under a row of the table: with torch's scaler it ends in `torchs`, with ours in `ours`."""

    def register(program):
        DIFFERENCES.setdefault(row, []).append((program, torchs, ours))
        return program

    return register


def _one(grad=None, **kwargs):
    grad = torch.full((1,), 1024.0) if grad is None else grad
    param = torch.nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))  # dense, whatever the gradient is
    param.grad = grad
    return param, torch.optim.SGD([param], lr=1.0, **kwargs)


def _ready(make_scaler, **kwargs):
    return ready(make_scaler, **{"init_scale": 1024.0, **kwargs})


def _train(scaler, steps=1, value=1024.0):
    """Take whole steps with a gradient of this value, and return the scaler."""
    for _ in range(steps):
        take_step(scaler, _one()[1], value)
    return scaler


@difference("sums flags; a fused optimizer ignores an overflow if the sum is 2", float("-inf"), 0.0)
def _flags(make_scaler):
    param, optimizer = _one(torch.tensor([float("inf")]), fused=True)
    scaler = _ready(make_scaler)
    scaler.unscale_(optimizer)
    for flag in scaler._found_inf_per_device(optimizer).values():
        flag.fill_(2.0)
    scaler.step(optimizer)
    return param.item()


@difference("the scale may reach 0 or infinity", (0.0, float("inf")), (2.0**-126, 2.0**126))
def _bounds(make_scaler):
    smallest = _train(make_scaler("cpu", init_scale=2.0**-140), 12, float("inf")).get_scale()
    largest = _train(make_scaler("cpu", init_scale=2.0**127, growth_interval=1), 12).get_scale()
    return smallest, float("inf") if largest == 2.0**127 else largest


@difference("a growth interval lowered below the count is never reached", 1024.0, 2048.0)
def _lowered(make_scaler):
    scaler = _train(_ready(make_scaler, growth_interval=10), 4)
    scaler.set_growth_interval(2)
    return _train(scaler, 2).get_scale()


@difference("sparse duplicates are checked one by one (float32)", [float("-inf"), 0.0], [0.0, 0.0])
def _sparse(make_scaler):
    param, optimizer = _one(torch.sparse_coo_tensor([[0, 0]], [3e38, 3e38], (2,), check_invariants=True))
    _ready(make_scaler, init_scale=1.0).step(optimizer)
    return param.tolist()


NOT_IMPLEMENTED = "NotImpl" if TORCH >= (2, 10) else "Runtime"


@difference("complex gradients are not implemented, nor bfloat16 ones on CUDA", NOT_IMPLEMENTED, [-1 - 2j])
def _complex(make_scaler):
    param, optimizer = _one(torch.tensor([1024 + 2048j]))
    _ready(make_scaler).step(optimizer)
    return param.tolist()


@difference("float16 gradients are refused, and the message does not name them", False, True)
def _half(make_scaler):
    _, optimizer = _one(torch.ones(1, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"^Attempting to unscale FP16 gradients") as caught:
        _ready(make_scaler).step(optimizer)
    return "parameter 0 of group 0" in str(caught.value)


@difference("a float16 loss with a dimension stays float16", (torch.float16, float("inf")), (torch.float32, 2.0**17))
def _half_loss(make_scaler):
    scaled = make_scaler("cpu").scale(torch.full((1,), 2, dtype=torch.float16))
    return scaled.dtype, scaled.item()


@difference("an optimizer without gradients is an `AssertionError`", "AssertionError: No inf checks", 1024.0)
def _no_gradients(make_scaler):
    scaler = _ready(make_scaler)
    _, optimizer = _one()
    optimizer.zero_grad()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


@difference("`unscale_` before there are gradients makes the step an error", "AssertionError: No inf checks", -1.0)
def _early(make_scaler):
    param, optimizer = _one()
    optimizer.zero_grad()
    scaler = make_scaler("cpu", init_scale=1024.0)
    loss = scaler.scale(param.sum())
    scaler.unscale_(optimizer)
    loss.backward()
    scaler.step(optimizer)
    return param.item()


@difference("multiplies a scale and a factor in float64", 3.299999952316284, 3.3000001907348633)
def _factor(make_scaler):
    return _train(make_scaler("cpu", init_scale=3.0, growth_factor=1.1, growth_interval=1)).get_scale()


@difference("takes a scale of 0 or NaN, a negative factor, a fractional interval", (0.0, -1.0), "PolicyError")
def _settings(make_scaler):
    scaler = make_scaler("cpu", init_scale=0.0, backoff_factor=-1.0)
    return scaler.get_scale(), scaler.get_backoff_factor()


@difference(
    "after `unscale_`, `zero_grad` and another loss, `step` applies scaled gradients",
    -1024.0,
    "CallOrderError: step() was given gradients that are still scaled",
)
def _given_up(make_scaler):
    param, optimizer = _one()
    scaler = _ready(make_scaler)
    scaler.unscale_(optimizer)
    optimizer.zero_grad()
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    return param.item()


@difference("`update` returns None", None, True)
def _update(make_scaler):
    info = take_step(_ready(make_scaler), _one()[1], 1024.0)
    return info and info.applied


@difference("`backward` of a loss that was scaled before an `update` is an error", "RuntimeError: one of", 1025.0)
def _late(make_scaler):
    param, optimizer = _one()
    scaler = _ready(make_scaler)
    late = scaler.scale(param.sum())
    scaler.step(optimizer)
    scaler.update()
    late.backward()
    return param.grad.item()


@difference("a wrapper that delegates to a fused optimizer applies scaled gradients", -1024.0, -1.0)
def _wrapper(make_scaler):
    param, optimizer = _one(fused=True)
    _ready(make_scaler).step(Delegating(optimizer))
    return param.item()


@difference("after an interrupted fused step, gradients are divided twice", -(2.0**-10), -1.0)
def _interrupted(make_scaler):
    param, optimizer = _one(fused=True)
    scaler = _ready(make_scaler)

    def interrupt(*_):
        handle.remove()
        raise KeyboardInterrupt

    handle = optimizer.register_step_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        scaler.step(optimizer)
    scaler.step(optimizer)
    return param.item()


@difference(
    "if the first step overflows, fused SGD begins with momentum that was never written, often NaN", "nan", "-1.0"
)
def _unwritten(make_scaler):
    param, optimizer = _one(torch.tensor([float("inf")]), fused=True, momentum=0.9)
    scaler = _ready(make_scaler, backoff_factor=0.5)
    torch.use_deterministic_algorithms(True)  # it fills new memory with NaN
    try:
        scaler.step(optimizer)
    finally:
        torch.use_deterministic_algorithms(False)
    scaler.update()
    take_step(scaler, optimizer, 512.0)
    return str(param.item())


@difference("gradients are divided without a warning if no loss was scaled since the last `update`", 0, 1)
def _not_scaled(make_scaler):
    scaler = _ready(make_scaler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            scaler.step(_one()[1])
            scaler.update()
    return sum("no loss was scaled since the last update" in str(each.message) for each in caught)


@difference(
    "a loss that one scaler scales twice gets gradients that are too large",
    2.0**20,
    "CallOrderError: this loss is scaled",
)
def _scaled_twice(make_scaler):
    scaler = make_scaler("cpu", init_scale=1024.0)
    return scaler.scale(scaler.scale(torch.ones(()))).item()


@difference(
    "an optimizer and its wrapper, or two with one parameter, divide gradients twice", 2.0**-10, "CallOrderError"
)
def _divided_twice(make_scaler):
    param, optimizer = _one()
    scaler = _ready(make_scaler)
    scaler.unscale_(Delegating(optimizer))
    scaler.unscale_(optimizer)
    return param.grad.item()


def _outcome(program, make_scaler, expected):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return program(make_scaler)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return text[: len(expected)] if isinstance(expected, str) else text


CASES = [(row, *case) for row, cases in DIFFERENCES.items() for case in cases]


@pytest.mark.parametrize(("row", "program", "torchs", "ours"), CASES, ids=[case[1].__name__[1:] for case in CASES])
def test_both_sides(row, program, torchs, ours):
    """Each scaler ends in its column of the row."""
    assert _outcome(program, torch.amp.GradScaler, torchs) == torchs, row
    assert _outcome(program, GradScaler, ours) == ours, row
