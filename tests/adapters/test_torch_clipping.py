"""`unscale_and_clip_` and `clip_and_check_`: the results of torch's functions, with fewer reads and multiplications."""

import math

import numpy as np
import pytest
import torch

from lossscale_torch import clip_and_check_
from tests.adapters.emulated_device import Emulated
from tests.adapters.torch_steps import INF, ready


def _params(*grads):
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    return params


def _clipped(makes, grads, max_norm, norm_type=2.0, init_scale=2.0**10):
    """Return the norm, the parameters after a step of size 1, and the scale; several optimizers share a norm."""
    params = _params(*(grad * init_scale for grad in grads))
    optimizers = [make(params[number :: len(makes)]) for number, make in enumerate(makes)]
    scaler = ready(init_scale=init_scale)
    norm = scaler.unscale_and_clip_(optimizers if len(makes) > 1 else optimizers[0], max_norm, norm_type)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    return norm, params, scaler.get_scale()


SGD = {
    "foreach": lambda p: torch.optim.SGD(p, lr=1.0, foreach=True),
    "fused": lambda p: torch.optim.SGD(p, lr=1.0, fused=True),
}
EACH = pytest.mark.parametrize("make", SGD.values(), ids=SGD)
TOGETHER = [["foreach"], ["fused"], ["foreach", "foreach"], ["fused", "fused"], ["foreach", "fused"]]


@pytest.mark.parametrize("kinds", TOGETHER, ids=" and ".join)
@pytest.mark.parametrize("norm_type", [0.5, 1.0, 2.0, 3.0, INF])
@pytest.mark.parametrize("max_norm", [0.0, torch.tensor([0.1]), np.array(1e6)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_agrees_with_torch(kinds, norm_type, max_norm, dtype):
    """Norm, clipped gradients and parameters agree with those of `unscale_` and `clip_grad_norm_`."""
    if dtype in (torch.bfloat16, torch.complex64):  # torch's fused SGD leaves bfloat16 parameters as they are on a CPU
        kinds = ["foreach"] * len(kinds)
    torch.manual_seed(0)
    grads = [torch.randn(shape, dtype=dtype) for shape in ((3, 5), (7,), (100, 100), ())]
    # Several optimizers are clipped by the norm of all their gradients.
    norm, params, _ = _clipped([SGD[kind] for kind in kinds], grads, max_norm, norm_type)
    assert norm.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    tolerance = {"rtol": 2e-2, "atol": 1e-3} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 0.0}
    expected = _params(*grads)
    expected_norm = torch.nn.utils.clip_grad_norm_(expected, float(max_norm), norm_type)
    torch.testing.assert_close(norm, expected_norm.to(norm.dtype), **tolerance)
    for param, other in zip(params, expected, strict=True):
        torch.testing.assert_close(-param.detach(), other.grad, **tolerance)
        torch.testing.assert_close(param.grad, other.grad, **tolerance)


@pytest.mark.parametrize("order", [2.0, 8.0])
def test_an_overflow_skips_both_optimizers(order):
    """All parameters of a common clip stay, and the scale backs off, also if float64 may not hold the powers."""
    norm, params, scale = _clipped([SGD["foreach"]] * 2, [torch.ones(5), torch.tensor([1.0, math.nan])], 1.0, order)
    assert not torch.isfinite(norm)
    assert not any(param.any() for param in params)
    assert scale == 2.0**9


def test_a_refused_clip_changes_nothing():
    """If the gradients of one optimizer are refused, those of another keep their values."""
    params = _params(torch.ones(2), torch.ones(2, dtype=torch.float16))
    with pytest.raises(ValueError, match="FP16 gradients"):
        ready().unscale_and_clip_([torch.optim.SGD([param]) for param in params], 1.0)
    assert params[0].grad.tolist() == [1.0, 1.0]


EXTREMES = [
    *((size, 3, order, 2.0) for size, order in ((1e30, 2.0), (1e30, 3.0), (1e38, 2.0), (1e38, 16.0), (1e38, INF))),
    *((size, 5000, 2.0, scale) for size in (1e-25, 1e-22) for scale in (2.0**-12, 1.0, 2.0**10)),
    *((1.0, 3, order, 2.0**16) for order in (16.0, 64.0)),
    (1e60, 3, 2.0, 1.0),  # in float64
]


@EACH
@pytest.mark.parametrize(("size", "count", "order", "init_scale"), EXTREMES)
def test_powers_that_leave_their_dtype(make, size, count, order, init_scale):
    """The norm that clips gradients is exact even if their powers leave the dtype, also at a scale below 1."""
    dtype = torch.float64 if size > 1e38 else torch.float32
    grads = [torch.full((4,), size, dtype=dtype), torch.full((count,), size, dtype=dtype)]
    norm, params, scale = _clipped([make], grads, 1.0, order, init_scale)
    # If the powers leave float64, too, the norm is infinite, and the gradients are clipped to 0.
    exact = INF if (size, order) == (1e38, 16.0) else size * (4 + count) ** (1 / order)
    assert norm.item() == pytest.approx(exact, rel=1e-6)
    torch.testing.assert_close(-params[0].detach(), grads[0] * min(1.0, 1.0 / (exact + 1e-6)), rtol=1e-6, atol=0.0)
    assert scale == init_scale


# --- clip_and_check_


@pytest.mark.parametrize("bad", [None, INF, float("nan")])
@pytest.mark.parametrize("max_norm", [0.5, 1e6, INF])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_clip_and_check_agrees_with_torch(dtype, max_norm, bad):
    """Norm and gradients agree with `clip_grad_norm_` in float64; gradients that are not finite stay unchanged."""
    torch.manual_seed(0)
    grads = [torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else None) for shape in ((3, 5), (), (0,))]
    params = _params(*(grad.to(dtype) for grad in grads))
    if bad is not None:
        params[0].grad[1, 2] = bad
    params.append(torch.nn.Parameter(torch.ones(2)))  # without a gradient
    expected = _params(*(p.grad.to(torch.complex128 if dtype.is_complex else torch.float64) for p in params[:3]))
    norm, grads_finite = clip_and_check_((param for param in [*params, params[0]]), max_norm)  # once given twice
    assert (norm.dtype, norm.shape, grads_finite.dtype, grads_finite.shape) == (torch.float32, (), torch.bool, ())
    assert bool(grads_finite) == bool(norm.isfinite()) == (bad is None)
    if bad is None:
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(expected, max_norm).float())
    for param, other in zip(params, expected, strict=False):
        torch.testing.assert_close(param.grad, other.grad.to(dtype), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [3.0, 3e38, INF])
def test_clip_and_check_never_waits(value, dtype):
    """The norm and the flag are on the device, also if squares leave float32."""
    with Emulated("cuda") as device:
        param = torch.nn.Parameter(torch.ones(4, device="cuda", dtype=dtype))
        param.grad = torch.full((4,), value, device="cuda", dtype=dtype)
        norm, grads_finite = clip_and_check_([param], 1.0)
        assert device.reads == 0
        assert norm.device.type == grads_finite.device.type == "cuda"
        assert bool(grads_finite) is math.isfinite(value)
        assert param.grad.tolist() == pytest.approx([0.5 if math.isfinite(value) else INF] * 4)
