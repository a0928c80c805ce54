"""Every public call on a device that lacks float64 and CUDA's own kernels; and the same numbers as on the host."""

import contextlib
import math
from typing import Any

import pytest
import torch

from lossscale_core import SpikeGuard
from lossscale_torch import GradScaler, all_finite, init_state, overflow_report, scale, select, unscale
from tests.adapters.emulated_device import Emulated, OnDevice
from tests.adapters.torch_steps import CALLS, INF

GRADS = [1.0, 2.0, INF, 1.0, 1e18, 1.0, 50.0, 1.0, float("nan"), 2.0]
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.5),
    "fused sgd": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.5, fused=True),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.5, fused=True),
}
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
PLACES = [("mps", "sgd"), ("mps", "fused sgd"), ("xpu", "fused adamw")]


def _run(device: str, kind: str, call: str, **settings: Any) -> tuple[Any, ...]:
    """Take steps with given gradients; return the outcomes, the weights and what the optimizer keeps, and the state."""
    params = [torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    optimizer = OPTIMIZERS[kind](params)
    scaler = GradScaler(device, init_scale=4.0, growth_interval=2, **settings)
    applied = []
    for size in GRADS:
        scaler.scale(torch.ones((), device=device))
        for param in params:
            param.grad = torch.full((3,), size, device=device) * scaler.get_scale()
        CALLS[call](scaler, optimizer)
        scaler.step(optimizer)
        applied.append(bool(scaler.update().applied))
    kept = [each for state in optimizer.state.values() for each in state.values() if each is not None]
    values = [each.detach().cpu().flatten().tolist() for each in (*params, *kept)]
    return applied, values, scaler.state_dict()


@pytest.mark.parametrize("guard", [None, SpikeGuard(warmup=2)], ids=["unguarded", "guarded"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("device", "kind"), [*PLACES, *(pytest.param("cuda", kind, marks=GPU) for kind in OPTIMIZERS)])
def test_each_step_is_that_of_the_host(device, kind, call, guard):
    """Outcomes, weights, moments, state and guard are those of the CPU; nothing needs what the device lacks."""
    expected = _run("cpu", kind, call, guard=guard)
    with contextlib.nullcontext() if device == "cuda" else Emulated(device):
        found = _run(device, kind, call, guard=guard)
    assert found[0] == expected[0]
    # torch's fused AdamW computes 1 - beta2 in float32 on one of the two and in float64 on the other: 1.3e-5 apart.
    tolerance = 2e-5 if (device, kind) == ("cuda", "fused adamw") else 1e-5
    for weights in zip(found[1], expected[1], strict=True):
        assert weights[0] == pytest.approx(weights[1], rel=tolerance)
    assert {**found[2], "guard": None} == {**expected[2], "guard": None}
    if guard is not None:
        assert found[2]["guard"] == pytest.approx(expected[2]["guard"], rel=1e-5)


@pytest.mark.parametrize("call", CALLS)
def test_a_norm_with_squares_that_overflow_is_a_spike(call):
    """Where float64 is missing, too: finite gradients of 1e30 are refused by the guard, and are not an overflow."""
    with Emulated("mps"):
        param = torch.nn.Parameter(torch.ones(3, device="mps"))
        optimizer = torch.optim.SGD([param], lr=0.5, fused=True)
        scaler = GradScaler("mps", init_scale=4.0, guard=SpikeGuard(warmup=2))
        for size in (1.0, 1e30, 1.0, 1.0, 1e30, INF):  # the first 1e30 comes while the guard accepts any norm
            scaler.scale(torch.ones((), device="mps"))
            param.grad = torch.full((3,), size * 4.0, device="mps")
            CALLS[call](scaler, optimizer)
            scaler.step(optimizer)
            info = scaler.update()
            assert (bool(info.spiked), bool(info.overflowed)) == (size == 1e30, size == INF)
        guard = scaler.state_dict()["guard"]
        assert (guard["mean"], guard["norms"]) == (pytest.approx(3.0**0.5), 3)


@pytest.mark.parametrize("order", [2.0, 3.0, INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_norm_of_gradients_on_a_device_without_float64_and_on_the_host(dtype, order):
    """It is computed where the loss scale is; one on the host may be of float64, and beyond float32."""
    with Emulated("mps"):
        for on_host, applied in ((3.0, True), (1e20, True), (1e50, dtype is torch.float64), (math.nan, False)):
            params = [torch.nn.Parameter(torch.ones(2, dtype=dtype)), torch.nn.Parameter(torch.ones(2, device="mps"))]
            params[0].grad = torch.tensor([4.0 * on_host, 0.0], dtype=dtype)
            params[1].grad = torch.tensor([16.0, 0.0], device="mps")
            optimizer = torch.optim.SGD(params, lr=1.0)
            scaler = GradScaler("mps", init_scale=4.0)
            scaler.scale(torch.ones((), device="mps"))
            norm = scaler.unscale_and_clip_(optimizer, 1.0, order)
            scaler.step(optimizer)
            assert scaler.update().applied is applied
            assert norm.isfinite() or on_host != 3.0
            exact = 4.0 if order == INF else (3.0**order + 4.0**order) ** (1.0 / order)
            assert norm.item() == pytest.approx(exact) or on_host != 3.0


def test_bfloat16_on_cuda_is_read_once_and_not_written_by_a_check():
    """torch's kernel does not support it there: one norm checks the gradients, and only a clip multiplies them."""
    with Emulated("cuda") as seen:
        params = [torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16, device="cuda")) for _ in range(2)]
        scaler = GradScaler("mps", init_scale=8.0)  # this build of torch has no CUDA
        scaler.place_on("cuda")
        for call, multiplies in (("clip", 1), ("check", 0), ("verb", 0)):
            optimizer = torch.optim.SGD(params, lr=1.0)
            for param in params:
                param.grad = torch.full_like(param, 8.0)
            seen.calls.clear()
            if call == "clip":
                scaler.unscale_and_clip_(optimizer, 1.0)
            elif call == "check":
                scaler._check_inf_per_device(optimizer)
            else:
                assert bool(all_finite([param.grad for param in params]))
            names = [str(each) for each in seen.calls]
            assert sum("_foreach_norm" in name for name in names) == 1, (call, names)
            assert sum("_foreach_mul_" in name for name in names) == multiplies, (call, names)


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_the_verbs_and_the_report(device):
    """They give what they give on the host, for float16 too, and the verbs never wait."""
    with Emulated(device) as seen:
        state = init_state("dynamic", device=device)
        grads = {"w": torch.ones(3, device=device, dtype=torch.float16), "b": torch.full((2,), INF, device=device)}
        unscaled, scaled, finite = unscale(grads, state), scale(grads["w"], state), all_finite(grads)
        chosen = select(all_finite([grads["w"]]), grads, grads)
        assert seen.reads == 0
        assert isinstance(unscaled["w"], OnDevice)
        assert unscaled["w"].cpu().tolist() == [2.0**-16] * 3
        assert scaled.cpu().tolist() == [2.0**16] * 3
        assert not bool(finite)
        assert chosen["w"].cpu().tolist() == [1.0] * 3
        param = torch.nn.Parameter(torch.ones(2, device=device))
        param.grad = grads["b"]
        assert "b" in str(overflow_report([("b", param)]))
