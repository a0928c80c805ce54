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
def test_a_joint_clip_takes_each_parameter_once(gradients, parts, is_listed_twice, max_norm, fused):
    """Norm, gradients and outcome are those of one optimizer with all parameters."""
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
def test_no_gradient_is_divided_twice_in_a_step(fused, policy, parts, calls):
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
def test_an_optimizer_may_divide_new_gradients_of_a_shared_parameter(fused):
    """Another loss was scaled since the step of the first optimizer."""
    params, optimizers, scaler = _setup([1.0], [{0}, {0}], fused)
    for optimizer in optimizers:
        scaler.scale(torch.ones(()))
        params[0].grad = torch.full((2,), SCALE)
        scaler.step(optimizer)
        assert fused or params[0].grad.tolist() == [1.0, 1.0]
    assert scaler.update()


@pytest.mark.parametrize("policy", [SCALE, "none"])
@pytest.mark.parametrize("is_wrapper_first", [False, True])
@pytest.mark.parametrize("first", [*CALLS, None])
@pytest.mark.parametrize("second", ["unscale_", "step", "unscale_and_clip_"])
def test_an_optimizer_and_its_wrapper_are_one(first, second, is_wrapper_first, policy):
    """Whatever is called with one of them in a step, a call with the other, or a joint clip of both, is refused."""
    param, optimizer = one()
    names = [optimizer, Delegating(optimizer)][:: -1 if is_wrapper_first else 1]
    scaler, arguments = ready(policy=policy), [names[1]]
    param.grad = torch.full_like(param, scaler.get_scale())
    if first is not None:
        CALLS[first](scaler, names[0])
        if first == "step":
            scaler.step(names[0])
    elif second == "unscale_and_clip_":
        arguments = [names]
    else:
        scaler.unscale_(names[0])
    with pytest.raises(CallOrderError, match="pass an optimizer as the same object to each call"):
        getattr(scaler, second)(*arguments, *([INF] if "clip" in second else []))
    assert arguments == [names] or param.grad.item() == pytest.approx(1.0, rel=1e-5)
