"""Loops that replay a graph: torch's documented recipes, on a recording stand-in everywhere and on CUDA where it is."""

import contextlib
from contextlib import nullcontext

import pytest
import torch

from lossscale_core.errors import CallOrderError
from lossscale_torch import GradScaler
from tests.adapters.emulated_device import Emulated
from tests.adapters.recorded_graph import RecordedGraph

CUDA_ONLY = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; the stand-in runs the rest anywhere")
ON_EACH_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, CUDA_ONLY])])
AGAINST_TORCH = pytest.mark.parametrize("make_scaler", [GradScaler, torch.amp.GradScaler], ids=["ours", "torch"])
FUSED = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1.0, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True, capturable=params[0].is_cuda),
}


@contextlib.contextmanager
def _capture(device):
    """Record what runs inside; yield an object with `replay()`."""
    graph = RecordedGraph() if device == "cpu" else torch.cuda.CUDAGraph()
    with graph if device == "cpu" else torch.cuda.graph(graph):
        yield graph


@contextlib.contextmanager
def _warming_up(device):
    """Run what is inside on a side stream, as CUDA asks for before a capture."""
    if device == "cpu":
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def _one_weight(device, make=lambda params: torch.optim.SGD(params, lr=1.0)):
    weight = torch.nn.Parameter(torch.ones(3, device=device))
    return weight, make([weight])


@ON_EACH_DEVICE
@AGAINST_TORCH
def test_a_recorded_backward_follows_the_scale(make_scaler, device):
    """The recipe of torch's documentation: forward, `scale` and backward are replayed, `step` and `update` are not."""
    weights, optimizers = zip(*(_one_weight(device) for _ in range(2)), strict=True)
    scaler = make_scaler(device, init_scale=4.0, growth_interval=2)
    factor = torch.ones((), device=device)
    with _warming_up(device):
        scaler.scale((sum(weights) * factor).sum()).backward()
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    with _capture(device) as graph:
        scaler.scale((sum(weights) * factor).sum()).backward()
    seen = []
    for value in (1.0, 1.0, float("inf"), 1.0, float("nan"), 1.0, 1.0):
        factor.fill_(value)
        for weight in weights:
            weight.grad.zero_()
        graph.replay()
        before = weights[0][0].item()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert torch.equal(*weights)
        seen.append((before - weights[0][0].item(), scaler._scale.item(), scaler._growth_tracker.item()))
    assert seen == [(1, 4, 1), (1, 8, 0), (0, 4, 0), (1, 4, 1), (0, 2, 0), (1, 2, 1), (1, 4, 0)]


@ON_EACH_DEVICE
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_a_whole_recorded_step(make, clips, device):
    """Loss, backward, clip, `step` and `update` in one graph give what torch gives without one, in counters, too."""
    values = [1.0] * 5 + [float("inf"), 1.0, float("nan"), float("-inf"), 1.0, 1.0, 1.0]
    expected_weight, expected_optimizer = _one_weight(device, make)
    expected = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2)
    weight, optimizer = _one_weight(device, make)
    scaler = GradScaler(device, init_scale=2.0**10, growth_interval=2)
    factor = torch.ones((), device=device)
    graph = None

    def train(scaler, weight, optimizer):
        # The attached half of the loss takes the present scale at each replay, too.
        half, is_ours = weight * factor * 0.5, isinstance(scaler, GradScaler)
        scaler.scale((scaler.attach(half, half) if is_ours else half + half).sum()).backward()
        if clips and is_ours:
            scaler.unscale_and_clip_(optimizer, 0.5)
        elif clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_([weight], 0.5)
        scaler.step(optimizer)
        scaler.update()

    for step, value in enumerate(values):
        factor.fill_(value)
        expected_optimizer.zero_grad()
        train(expected, expected_weight, expected_optimizer)
        optimizer.zero_grad(set_to_none=graph is None)
        if step == 3:
            with _capture(device) as graph:
                train(scaler, weight, optimizer)
            if device == "cuda":
                graph.replay()
        elif graph is not None:
            graph.replay()
        else:
            with _warming_up(device):
                train(scaler, weight, optimizer)
        assert weight.tolist() == pytest.approx(expected_weight.tolist(), rel=1e-5 if clips else 0.0, abs=0.0), step
        assert scaler.get_scale() == expected.get_scale(), step
        assert scaler.state_dict()["_growth_tracker"] == expected.state_dict()["_growth_tracker"], step
    numbers = scaler.metrics()
    assert (int(numbers["steps"]), int(numbers["skipped_steps"])) == (len(values), 3)


def test_host_states_cannot_be_captured(monkeypatch):
    """Each replay would write it again; one step of a fused optimizer before the capture puts it on the device."""
    # What asks the driver of a GPU: without one a scaler for "cuda" is disabled.
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", bool)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", bool)
    with Emulated("cuda"):
        weight, optimizer = _one_weight("cuda", FUSED["sgd"])
        scaler = GradScaler("cuda", init_scale=4.0)
        needs_a_step = pytest.raises(CallOrderError, match="take one step with this optimizer before capturing one")
        for is_capturing, expected in ((True, needs_a_step), (False, nullcontext()), (True, nullcontext())):
            scaler.scale(torch.ones((), device="cuda"))
            weight.grad = torch.full((3,), 4.0, device="cuda")
            scaler.step(optimizer)
            with monkeypatch.context() as capturing, expected:
                capturing.setattr(torch.cuda, "is_current_stream_capturing", bool if not is_capturing else lambda: True)
                scaler.update()
        assert (scaler.get_scale(), scaler.state_dict()["steps"], weight.tolist()) == (4.0, 2, [-2.0] * 3)
