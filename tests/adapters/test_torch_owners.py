"""A gradient belongs to its parameter: it is divided once and counts once, however many optimizers have it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lossscale_core.errors import CallOrderError
from lossscale_torch import GradScaler
from tests.adapters.odd_optimizers import Delegating
from tests.adapters.torch_steps import CALLS, EITHER_KIND, INF, one, ready

SCALE = 1024.0
GRADIENTS = st.sampled_from([1.0, 2.0, 0.5, None, INF])
PARTS = st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=3)


def _setup(gradients, parts, fused):
    """Return named parameters with scaled gradients, an optimizer for each part of them, and a scaler."""
    params = [torch.nn.Parameter(torch.ones(2)) for _ in gradients]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = None if gradient is None else torch.full((2,), gradient * SCALE)
    named = [[(f"layer{i}", params[i]) for i in sorted(part)] for part in parts]
    return params, [torch.optim.SGD(each, lr=0.0, fused=fused) for each in named], ready(init_scale=SCALE)


def _gradients(params):
    return [None if param.grad is None else param.grad.tolist() for param in params]


@given(st.lists(GRADIENTS, min_size=4, max_size=4), PARTS, st.booleans(), st.sampled_from([0.5, INF]), st.booleans())
def test_joint_clips_of_shared_parameters(gradients, parts, is_listed_twice, max_norm, fused):
    """Norm, gradients and outcome of a joint clip are those of one optimizer with all parameters."""
    results = []
    for some in (parts, [set().union(*parts)]):
        params, optimizers, scaler = _setup(gradients, some, fused)
        norm = scaler.unscale_and_clip_(optimizers * (1 + is_listed_twice), max_norm)
        for optimizer in optimizers:
            scaler.step(optimizer)
        results.append([norm.item() if norm.isfinite() else None, _gradients(params), bool(scaler.update())])
    assert results[0] == results[1]


@given(PARTS.filter(lambda parts: len(parts) > 1), st.lists(st.sampled_from([*CALLS]), min_size=3, max_size=3))
@pytest.mark.parametrize("policy", [SCALE, "none"])
@EITHER_KIND
def test_no_gradient_is_divided_twice(fused, policy, parts, calls):
    """The second optimizer of a parameter is refused, unless it has no gradient, or the policy does not scale."""
    gradients = [2.0, None, 1.0, 0.5]
    _, optimizers, _ = _setup(gradients, parts, fused)
    scaler, divided = ready(policy=policy), set()
    for optimizer, part, call in zip(optimizers, parts, calls, strict=False):
        shared = sorted(i for i in part & divided if gradients[i] is not None)
        if shared and policy == SCALE:
            words = r"layer[023] belongs to two optimizers .*scaler\.unscale_and_clip_\(\[first, second\], max_norm\)"
            with pytest.raises(CallOrderError, match=words):
                (CALLS[call] if call != "step" else GradScaler.step)(scaler, optimizer)
            return
        CALLS[call](scaler, optimizer)
        scaler.step(optimizer)
        divided |= part
    assert scaler.update()


@EITHER_KIND
def test_new_gradients_of_shared_parameters(fused):
    """A second optimizer may divide the gradients of a loss that was scaled since the step of the first optimizer."""
    params, optimizers, scaler = _setup([1.0], [{0}, {0}], fused)
    for optimizer in optimizers:
        scaler.scale(torch.ones(()))
        params[0].grad = torch.full((2,), SCALE)
        scaler.step(optimizer)
        assert fused or params[0].grad.tolist() == [1.0, 1.0]
    assert scaler.update()


@pytest.mark.parametrize("first", ["unscale_", "step", "skip"])
@pytest.mark.parametrize("policy", [SCALE, "none"])
def test_an_optimizer_and_its_wrapper(first, policy):
    """A step of an optimizer after a call with its wrapper is refused, and so is a joint clip of both."""
    param, optimizer = one()
    scaler, wrapper = ready(policy=policy), Delegating(optimizer)
    param.grad = torch.full_like(param, scaler.get_scale())
    with pytest.raises(CallOrderError, match="pass an optimizer as the same object to each call"):
        ready(policy=policy).unscale_and_clip_([optimizer, wrapper], INF)
    getattr(scaler, first)(wrapper)
    with pytest.raises(CallOrderError, match="pass an optimizer as the same object to each call"):
        scaler.step(optimizer)
    assert param.grad.item() == (scaler.get_scale() if first == "skip" else 1.0)
