"""Gradients beyond float32 and torch's usual layouts, and devices that lack what a CPU has."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lossscale_core.errors import PolicyError
from lossscale_torch import GradScaler

EITHER_WAY = pytest.mark.parametrize("clips", [False, True], ids=["unscaled", "clipped"])


def _param(grad, value=1.0):
    param = torch.nn.Parameter(torch.full(grad.shape, value, dtype=grad.dtype))
    param.grad = grad
    return param


@pytest.fixture(params=[torch.float64, torch.bfloat16, torch.float16], ids=str)
def default_dtype(request):
    """Another default dtype than float32, for one test."""
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("fused", [False, True])
@EITHER_WAY
def test_another_default_dtype(default_dtype, fused, clips):
    """The loss scale is float32 whatever new tensors are, and grows, backs off and unscales."""
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float32))
    optimizer = torch.optim.SGD([param], lr=1.0, fused=fused)
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    for value, expected, scale in ((1.0, 1.0, 2048.0), (float("inf"), 0.0, 1024.0), (1.0, 1.0, 2048.0)):
        optimizer.zero_grad()
        scaler.scale((param * value).sum()).backward()
        before = param[0].item()
        if clips:
            scaler.unscale_and_clip_(optimizer, float("inf"))
            scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
        assert before - param[0].item() == expected
        assert scaler.get_scale() == scale
    assert scaler._scale.dtype is torch.float32


def test_a_float64_norm_beyond_float32():
    """It comes back in float64 and finite."""
    param = _param(torch.full((4,), 1e60, dtype=torch.float64))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    norm = scaler.unscale_and_clip_(optimizer, 1.0)
    assert (norm.dtype, norm.item()) == (torch.float64, pytest.approx(2e60))
    torch.testing.assert_close(param.grad, torch.full((4,), 0.5, dtype=torch.float64))


@pytest.mark.parametrize("bad", [False, True])
def test_a_gradient_beside_one_of_a_device_without_an_index(bad):
    """`meta` stands for MPS, XLA and other devices with the index of the CPU."""
    on_cpu = _param(torch.tensor([1024.0, float("inf") if bad else 1024.0]))
    elsewhere = torch.nn.Parameter(torch.ones(2, device="meta"))
    elsewhere.grad = torch.ones(2, device="meta")
    for params in ([on_cpu, elsewhere], [elsewhere, on_cpu]):
        on_cpu.grad = torch.tensor([1024.0, float("inf") if bad else 1024.0])
        optimizer = torch.optim.SGD(params, lr=1.0)
        scaler = GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        flags = scaler._found_inf_per_device(optimizer)
        assert flags[torch.device("cpu")].item() == float(bad)
        assert on_cpu.grad[0].item() == 1.0
        assert flags[torch.device("meta")].is_meta


@pytest.mark.parametrize("max_norm", [float("nan"), -1.0, True, "1", None])
def test_a_norm_that_cannot_be_clipped_to(max_norm):
    """It is an error, and nothing has happened."""
    param = _param(torch.full((2,), 1024.0))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(PolicyError, match=r"max_norm=.* must be a number from 0; pass"):
        scaler.unscale_and_clip_(optimizer, max_norm)
    scaler.step(optimizer)
    assert (param == 0.0).all()


@pytest.mark.parametrize("max_norm", [torch.tensor(8.0), torch.tensor([8.0]), np.float64(8.0), np.array(8.0), 8])
def test_a_norm_may_be_an_array_of_one_number(max_norm):
    """As a step from a config or a schedule may have it."""
    param = _param(torch.full((2,), 12.0), value=0.0)
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = GradScaler("cpu", policy="none")
    scaler.scale(torch.ones(()))
    norm = scaler.unscale_and_clip_(optimizer, max_norm)
    scaler.step(optimizer)
    torch.testing.assert_close(norm, torch.tensor(12.0 * 2**0.5))
    torch.testing.assert_close(param.detach().norm(), torch.tensor(8.0))


# -- what a device may lack --------------------------------------------------------------------------------------------


class _WithoutFloat64(TorchDispatchMode):
    """Refuses float64 tensors, which MPS and Intel Arc do not have."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation unless it makes one."""
        result = operation(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.dtype is torch.float64:
                raise TypeError(f"{operation} made a float64 tensor, which this device does not have")
        return result


class _WaitingCopies(TorchDispatchMode):
    """Refuses non-blocking copies to the host, which may be read before the device has written them."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation unless it is one; `meta` stands for the device, and a copy of it holds zeros."""
        kwargs = dict(kwargs or {})
        if operation is torch.ops.aten._to_copy.default and str(kwargs.get("device")) == "cpu":
            if kwargs.pop("non_blocking", False):
                raise RuntimeError(
                    "a non-blocking copy to the host: code that reads it at once reads what was there before"
                )
            if args[0].is_meta:
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        return operation(*args, **kwargs)


class _Fused(torch.optim.Optimizer):
    """What a fused optimizer is to a scaler."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("size", [1.0, 1e30])
def test_nothing_needs_float64(norm_type, device, size):
    """Steps, clipping, norms of squares that overflow, ordinary on a host and fused on a device without values."""
    params = [torch.nn.Parameter(torch.zeros(3, device=device)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=1.0) if device == "cpu" else _Fused(params)
    scaler = GradScaler(device, init_scale=1024.0, growth_interval=1)
    with _WithoutFloat64():
        for call in (scaler.unscale_and_clip_, None):
            scaler.scale(torch.ones((), device=device))
            for param in params:
                param.grad = torch.full_like(param, size)
            if call is not None:
                call(optimizer, 1.0, norm_type)
            scaler.step(optimizer)
            scaler.update()


def test_no_copy_to_the_host_is_read_before_it_is_there():
    """Gradients on another device than the loss scale, as with optimizers that keep their state on the host."""
    params = [torch.nn.Parameter(torch.zeros(3, device="meta")), torch.nn.Parameter(torch.zeros(3))]
    optimizer = _Fused(params)
    scaler = GradScaler("cpu", init_scale=1024.0)
    for param in params:
        param.grad = torch.ones_like(param)
    with _WaitingCopies():
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
