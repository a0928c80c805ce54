"""Every public call on a device that lacks float64 and CUDA's own kernels; and the same numbers as on the host."""

from typing import Any

import pytest
import torch

from lossscale_core import SpikeGuard
from lossscale_torch import (
    GradScaler,
    all_finite,
    init_state,
    overflow_report,
    range_report,
    scale,
    select,
    unscale,
)
from tests.adapters.emulated_device import Emulated, OnDevice
from tests.adapters.test_torch_odd_gradients import _WithoutFloat64

INF = float("inf")
GRADS = [1.0, 2.0, INF, 1.0, 1e18, 1.0, 50.0, 1.0, float("nan"), 2.0]
GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)
CALLS = {
    "step": lambda scaler, optimizer: scaler.step(optimizer),
    "unscale_": lambda scaler, optimizer: (scaler.unscale_(optimizer), scaler.step(optimizer)),
    "unscale_and_clip_": lambda scaler, optimizer: (scaler.unscale_and_clip_(optimizer, 1.0), scaler.step(optimizer)),
    "clip_and_step": lambda scaler, optimizer: scaler.clip_and_step(optimizer, 1.0),
}


def _run(device: str, fused: bool, call: str, **settings: Any) -> tuple[Any, ...]:
    """Take steps with given gradients; return the outcomes, the weights and the state."""
    params = [torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=0.5, fused=fused)
    scaler = GradScaler(device, init_scale=4.0, growth_interval=2, **settings)
    applied = []
    for size in GRADS:
        scaler.scale(torch.ones((), device=device))
        for param in params:
            param.grad = torch.full((3,), size, device=device) * scaler.get_scale()
        CALLS[call](scaler, optimizer)
        applied.append(bool(scaler.update().applied))
    return applied, [param.detach().cpu().tolist() for param in params], scaler.state_dict(), scaler.metrics().keys()


@pytest.mark.parametrize("device", ["mps", GPU])
@pytest.mark.parametrize("guard", [None, SpikeGuard(warmup=2)], ids=["unguarded", "guarded"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fused", [False, True])
def test_each_step_is_that_of_the_host(fused, call, guard, device):
    """Outcomes, weights, state and guard are those of the CPU; nothing needs what the device lacks."""
    expected = _run("cpu", fused, call, guard=guard)
    if device == "cuda":
        found = _run(device, fused, call, guard=guard)
    else:
        with Emulated(device):
            found = _run(device, fused, call, guard=guard)
    assert found[0] == expected[0]
    for weights in zip(found[1], expected[1], strict=True):
        assert weights[0] == pytest.approx(weights[1], rel=1e-5)
    assert {**found[2], "guard": None} == {**expected[2], "guard": None}
    if guard is not None:
        assert found[2]["guard"] == pytest.approx(expected[2]["guard"], rel=1e-5)


@pytest.mark.parametrize("call", CALLS)
def test_a_norm_whose_squares_overflow_is_a_spike(call):
    """Where float64 is missing, too: finite gradients of 1e30 are refused by the guard, and are not an overflow."""
    with Emulated("mps"):
        param = torch.nn.Parameter(torch.ones(3, device="mps"))
        optimizer = torch.optim.SGD([param], lr=0.5, fused=True)
        scaler = GradScaler("mps", init_scale=4.0, guard=SpikeGuard(warmup=2))
        for size in (1.0, 1e30, 1.0, 1.0, 1e30, INF):  # the first 1e30 comes while the guard accepts any norm
            scaler.scale(torch.ones((), device="mps"))
            param.grad = torch.full((3,), size * 4.0, device="mps")
            CALLS[call](scaler, optimizer)
            info = scaler.update()
            assert (bool(info.spiked), bool(info.overflowed)) == (size == 1e30, size == INF)
        guard = scaler.state_dict()["guard"]
        assert (guard["mean"], guard["norms"]) == (pytest.approx(3.0**0.5), 3)


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_the_verbs_and_the_report(device):
    """They give what they give on the host, for float16 too."""
    with Emulated(device):
        state = init_state("dynamic", device=device)
        grads = {"w": torch.ones(3, device=device, dtype=torch.float16), "b": torch.full((2,), INF, device=device)}
        assert isinstance(unscale(grads, state)["w"], OnDevice)
        assert scale(grads["w"], state).cpu().tolist() == [2.0**16] * 3
        assert not bool(all_finite(grads))
        assert select(all_finite([grads["w"]]), grads, grads)["w"].cpu().tolist() == [1.0] * 3
        param = torch.nn.Parameter(torch.ones(2, device=device))
        param.grad = grads["b"]
        assert "b" in str(overflow_report([("b", param)]))


class _Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))

    def forward(self, factor: float) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return self.layers(torch.ones(4, 4) * factor).float().square().mean()


@pytest.mark.parametrize("fused", [False, True])
def test_retries_protection_and_the_range_report_need_no_float64(fused):
    """What runs a backward pass is run on the CPU, where no tensor may be one of float64."""
    torch.manual_seed(0)
    model = _Normed()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = GradScaler("cpu", init_scale=2.0**40, protect=[model])
    with _WithoutFloat64():
        assert scaler.minimize(optimizer, lambda: model(1.0), retries=40, max_norm=1.0).applied
        assert not scaler.minimize(optimizer, lambda: model(INF), retries=1).applied
        report = range_report(model, lambda: model(1.0))
    assert report.init_scale is not None
    assert all(bool(buffer.isfinite().all()) for buffer in model.buffers())
