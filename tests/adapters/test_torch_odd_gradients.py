"""Gradients beyond float32 and torch's usual layouts, and devices that lack what a CPU has."""

from functools import partial

import pytest
import torch

from lossscale_torch import GradScaler, all_finite
from tests.adapters.torch_steps import EITHER_KIND, INF, ready

EITHER_WAY = pytest.mark.parametrize("clips", [False, True], ids=["unscaled", "clipped"])


@EITHER_KIND
@EITHER_WAY
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_another_default_dtype(dtype, fused, clips, request):
    """The loss scale is float32 whatever new tensors are, and grows, backs off and unscales."""
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=1.0, fused=fused)
    torch.set_default_dtype(dtype)
    request.addfinalizer(partial(torch.set_default_dtype, torch.float32))
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    for value, moved, scale in ((1.0, 1.0, 2048.0), (INF, 0.0, 1024.0), (1.0, 1.0, 2048.0)):
        optimizer.zero_grad()
        scaler.scale((param * value).sum()).backward()
        before = param[0].item()
        if clips:
            scaler.unscale_and_clip_(optimizer, INF)
        scaler.step(optimizer)
        scaler.update()
        assert (before - param[0].item(), scaler.get_scale()) == (moved, scale)


GRADS = {
    "float64": torch.tensor([1.0, 1e60], dtype=torch.float64),
    "bfloat16": torch.tensor([1.0, -2.0], dtype=torch.bfloat16),
    "complex": torch.tensor([1.0 - 2.0j, 3.0j]),
    "lazily conjugated": torch.tensor([1.0 - 2.0j, 3.0j]).conj(),
    "sparse with duplicates": torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,)),
    "sparse and empty": torch.sparse_coo_tensor(torch.zeros((1, 0), dtype=torch.int64), torch.zeros(0), (3,)),
    "empty": torch.zeros(0),
    "not contiguous": torch.arange(6.0).reshape(2, 3).t(),
}


@pytest.mark.parametrize("bad", [1.0, INF, float("nan")])
@pytest.mark.parametrize("kind", GRADS)
@EITHER_WAY
def test_gradients_of_every_kind(kind, bad, clips):
    """Beside one of float32, each is unscaled in its own dtype and layout, and skips the step if it is not finite."""
    grads = [torch.full((2,), 1024.0), GRADS[kind] * 1024.0 * bad]
    if kind == "lazily conjugated":  # a product is not
        grads[1] = grads[1].conj().resolve_conj().conj()
    beside, param = (torch.nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype)) for grad in grads)
    beside.grad, param.grad = grads
    optimizer, scaler = torch.optim.SGD([beside, param], lr=1.0), ready(init_scale=1024.0)
    if clips:
        scaler.unscale_and_clip_(optimizer, INF)
    scaler.step(optimizer)
    is_finite = bad == 1.0 or "empty" in kind
    assert scaler.update().applied == is_finite
    assert param.grad.layout is GRADS[kind].layout
    expected = (-GRADS[kind].to_dense() if is_finite else GRADS[kind].to_dense() * 0.0).resolve_conj()
    torch.testing.assert_close(param.detach(), expected, rtol=1e-6, atol=0.0)
    assert beside.tolist() == [-1.0 if is_finite else 0.0] * 2


def test_sparse_duplicates_overflow_in_sums():
    """They are found; the sum is what a step would add."""
    sparse = torch.sparse_coo_tensor([[0, 0]], [3e38, 3e38], (2,), check_invariants=True)
    assert not all_finite([torch.ones(2), sparse])
    assert all_finite([torch.ones(2), sparse / 2.0])
