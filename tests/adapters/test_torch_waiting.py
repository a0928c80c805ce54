"""Gradients that wait over an `update`, with `GradScaler(optimizers=[...])`: each run equals a run in float32."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lossscale_torch import GradScaler
from tests.adapters.emulated_device import Emulated
from tests.adapters.torch_steps import EITHER_KIND, INF, one, ready, two

MAX_NORM = 0.5


def _as_lightning(scaler, optimizers, clip):
    """Call the scaler as Lightning's precision plugin does: each step of an optimizer ends in an update."""
    for optimizer in optimizers:
        _as_accelerate(scaler, [optimizer], clip)


def _as_accelerate(scaler, optimizers, clip):
    """Call the scaler as Accelerate does: a clip unscales all optimizers before the first step."""
    if clip:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        torch.nn.utils.clip_grad_norm_([param for group in groups for param in group["params"]], MAX_NORM)
    for optimizer in optimizers:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def _together(scaler, optimizers, clip):
    """Step all optimizers before one update."""
    if clip and optimizers:
        scaler.unscale_and_clip_(optimizers, MAX_NORM)
    for optimizer in optimizers:
        scaler.step(optimizer)
    if optimizers:
        scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad()


def _train(make_scaler, loop, periods, fused, clip, tries=None):
    """Train layers that share a loss, each with an optimizer that steps after so many batches; return parameters.

    In each fourth batch so many `tries` overflow. In float32 the optimizers are left out if all tries do.
    """
    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, 3) for _ in periods]
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.01, momentum=0.9, fused=fused) for layer in layers]
    scaler = make_scaler(optimizers)
    for batch in range(1, 13):
        inputs = torch.randn(4, 3)
        due = [each for each, period in zip(optimizers, periods, strict=True) if batch % period == 0]
        bad_tries = tries if tries and batch % 4 == 0 else 0
        for attempt in [None] if tries is None else scaler.attempts(retries=3):
            x = inputs
            for layer in layers:
                x = layer(x).tanh()
            scaler.scale(x.square().mean() * 10.0).backward()
            if scaler.is_enabled() and attempt is not None and attempt.number < bad_tries:
                layers[0].weight.grad[0] = INF
            left_out = due if bad_tries > 3 and not scaler.is_enabled() else []
            loop(scaler, [each for each in due if each not in left_out], clip)
            for optimizer in left_out:
                optimizer.zero_grad()
    return [param.detach() for layer in layers for param in layer.parameters()]


def _scaled(optimizers):
    return GradScaler("cpu", init_scale=1024.0, growth_interval=3, optimizers=optimizers)


def _in_float32(optimizers):
    return GradScaler("cpu", enabled=False)


def _require_float32(*arguments):
    scaled, expected = (_train(make, *arguments) for make in (_scaled, _in_float32))
    torch.testing.assert_close(scaled, expected, rtol=1e-5, atol=1e-6)


PERIODS = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([_together, _as_lightning, _as_accelerate]), PERIODS, st.booleans(), st.booleans())
def test_optimizers_of_any_periods(loop, periods, fused, clip):
    """Waiting gradients follow the scale while it grows."""
    _require_float32(loop, periods, fused, clip)


@pytest.mark.filterwarnings("ignore:the gradients of a step overflowed in 4 tries:UserWarning")
@settings(max_examples=60, deadline=None)
@given(PERIODS, st.booleans(), st.integers(0, 4))
def test_retries_and_loops_that_fail(periods, fused, tries):
    """Each try begins with the gradients that waited, at its own scale; they follow the scale after the loop, too."""
    _require_float32(_together, [1, *periods], fused, True, tries)


@EITHER_KIND
def test_gradients_on_a_device(fused):
    """Gradients follow the scale without a read, and an update reports the outcome of its own optimizer."""
    with Emulated("mps"):
        params, optimizers = two(fused, device="mps", lr=0.125)
        scaler = ready(device="mps", init_scale=64.0, growth_interval=2, optimizers=optimizers)
        for batch in range(8):
            for param in params:
                param.grad = scaler._scale.clone().reshape(1) + (0.0 if param.grad is None else param.grad)
            for param, optimizer in [*zip(params, optimizers, strict=True)][: 1 + (batch % 4 == 3)]:
                reads = Emulated.reads
                scaler.step(optimizer)
                info = scaler.update()
                assert Emulated.reads == reads or not fused
                assert info.applied_of(optimizer)
                param.grad = None
        assert ([param.item() for param in params], scaler.get_scale()) == ([0.0, 0.0], 64.0 * 2**5)


@pytest.mark.parametrize("way", ["load", "leave", "update"])
@EITHER_KIND
def test_gradients_that_were_unscaled_early(fused, way):
    """Loaded states, attempts that are left and updates multiply waiting gradients again, each parameter once."""
    params, optimizers = zip(*(one(fused) for _ in range(3)), strict=True)
    optimizers[1].add_param_group({"params": [params[2]]})
    scaler = ready(init_scale=4.0, growth_interval=1, optimizers=optimizers)
    for param in params:
        param.grad = torch.full((1,), 4.0)
    tries = scaler.attempts()
    next(tries)
    scaler.unscale_and_clip_(optimizers[1:], INF)
    if way == "leave":
        tries.close()
    elif way == "load":
        scaler.load_state_dict(GradScaler("cpu", init_scale=8.0).state_dict())
    else:
        scaler.step(optimizers[0])
        assert scaler.update(16.0).applied
        params[0].grad = None
        scaler.scale(torch.ones(()))
    assert [param.grad.item() for param in params[1:]] == [scaler.get_scale()] * 2
    for optimizer in optimizers[:2]:  # only an update needs another loss
        scaler.step(optimizer)
    assert scaler.update().applied
    assert [param.item() for param in params] == [0.0] * 3


@pytest.mark.parametrize("new_scale", [None, 16.0])
@pytest.mark.parametrize("calls", [["step"], ["unscale_", "skip"]])
@EITHER_KIND
def test_gradients_after_a_step_wait(fused, calls, new_scale):
    """Gradients of a second loss, before the update that changes the scale, follow the scale."""
    (param, other_param), (optimizer, other) = two(fused)
    scaler = ready(init_scale=64.0, growth_interval=1, optimizers=[optimizer, other])
    param.grad = torch.full((1,), 64.0)
    for call in calls:
        getattr(scaler, call)(optimizer)
    param.grad = None
    scaler.scale(torch.ones(()))
    param.grad, other_param.grad = torch.full((1,), 64.0), torch.full((1,), 64.0)
    scaler.step(other)
    scaler.update(new_scale)
    assert param.grad.item() == scaler.get_scale() == (new_scale or 128.0)


@pytest.mark.parametrize("is_joint", [False, True])
@EITHER_KIND
def test_two_overflows_of_one_batch(fused, is_joint):
    """Each update backs off by the overflow of its own optimizer; one that a joint clip has found counts for both."""
    params, optimizers = two(fused)
    scaler = ready(init_scale=64.0, optimizers=optimizers)
    for param, gradient in zip(params, [INF, 64.0 if is_joint else INF], strict=True):
        param.grad = torch.full((1,), gradient)
    scaler.unscale_and_clip_([*optimizers], INF) if is_joint else scaler.unscale_(optimizers[1])
    for scale, optimizer in zip([32.0, 16.0], optimizers, strict=True):
        scaler.step(optimizer)
        assert not scaler.update().applied_of(optimizer)
        assert scaler.get_scale() == scale
    assert [param.item() for param in params] == [1.0, 1.0]
