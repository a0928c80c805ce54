"""Every public call on a device that lacks float64 and CUDA's own kernels; and the same numbers as on the host."""

import contextlib
import math
from typing import Any

import pytest
import torch

from lossscale_core import SpikeGuard
from lossscale_torch import GradScaler, all_finite, init_state, scale, select, unscale
from tests.adapters.emulated_device import Emulated
from tests.adapters.torch_steps import CALLS, INF, ready

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
def test_each_step_is_the_hosts(device, kind, call, guard):
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
def test_overflowing_squares_are_a_spike(call):
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
def test_a_norm_on_two_devices(dtype, order):
    """It is computed where the loss scale is, without float64; a gradient on the host may be beyond float32."""
    with Emulated("mps"):
        for on_host, applied in ((3.0, True), (1e50, dtype is torch.float64), (math.nan, False)):
            params = [torch.nn.Parameter(torch.ones(2, dtype=dtype)), torch.nn.Parameter(torch.ones(2, device="mps"))]
            params[0].grad = torch.tensor([4.0 * on_host, 0.0], dtype=dtype)
            params[1].grad = torch.tensor([16.0, 0.0], device="mps")
            optimizer, scaler = torch.optim.SGD(params, lr=1.0), ready(device="mps", init_scale=4.0)
            norm = scaler.unscale_and_clip_(optimizer, 1.0, order)
            scaler.step(optimizer)
            assert scaler.update().applied is applied
            exact = 4.0 if order == INF else (3.0**order + 4.0**order) ** (1.0 / order)
            assert norm.item() == pytest.approx(exact) or on_host != 3.0


def test_bfloat16_on_cuda_is_read_once():
    """torch's kernel does not support it there: one norm checks the gradients, and only a clip multiplies them."""
    with Emulated("cuda") as seen:
        param = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16, device="cuda"))
        scaler, optimizer = GradScaler("mps", init_scale=8.0), torch.optim.SGD([param], lr=1.0)
        scaler.place_on("cuda")  # this build of torch has no CUDA
        for call, multiplies in (
            (lambda: scaler._check_inf_per_device(optimizer), 0),
            (lambda: all_finite([param.grad]), 0),
            (lambda: scaler.unscale_and_clip_(optimizer, 1.0), 1),
        ):
            param.grad = torch.full_like(param, 8.0)
            seen.calls.clear()
            call()
            names = " ".join(str(each) for each in seen.calls)
            assert (names.count("_foreach_norm"), names.count("_foreach_mul_")) == (1, multiplies)


def test_the_verbs_without_float64():
    """They give what they give on the host, for float16 too, and never wait."""
    with Emulated("mps") as seen:
        state = init_state("dynamic", device="mps")
        grads = {"w": torch.ones(3, device="mps", dtype=torch.float16), "b": torch.full((2,), INF, device="mps")}
        unscaled, scaled, finite = unscale(grads, state), scale(grads["w"], state), all_finite(grads)
        chosen = select(all_finite([grads["w"]]), grads, grads)
        assert seen.reads == 0
        assert [each["w"].tolist() for each in (unscaled, chosen)] == [[2.0**-16] * 3, [1.0] * 3]
        assert (scaled.tolist(), bool(finite)) == ([2.0**16] * 3, False)
        assert all_finite([grads["w"], torch.ones(2)])  # on two devices
