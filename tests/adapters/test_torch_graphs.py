"""Loops that replay a graph: torch's documented recipes, on a recording stand-in everywhere and on CUDA where it is."""

import contextlib

import pytest
import torch

from lossscale_torch import GradScaler
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
    if device == "cpu":
        with RecordedGraph() as graph:
            yield graph
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
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
    weight, optimizer = _one_weight(device)
    scaler = make_scaler(device, init_scale=4.0, growth_interval=2)
    factor = torch.ones((), device=device)
    with _warming_up(device):
        scaler.scale((weight * factor).sum()).backward()
    optimizer.zero_grad(set_to_none=True)
    with _capture(device) as graph:
        scaler.scale((weight * factor).sum()).backward()
    seen = []
    for value in (1.0, 1.0, float("inf"), 1.0, float("nan"), 1.0, 1.0):
        factor.fill_(value)
        weight.grad.zero_()
        graph.replay()
        before = weight[0].item()
        scaler.step(optimizer)
        scaler.update()
        seen.append((before - weight[0].item(), scaler._scale.item(), scaler._growth_tracker.item()))
    assert seen == [(1, 4, 1), (1, 8, 0), (0, 4, 0), (1, 4, 1), (0, 2, 0), (1, 2, 1), (1, 4, 0)]


@ON_EACH_DEVICE
@AGAINST_TORCH
@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_a_recorded_step_and_update_of_a_fused_optimizer(make, make_scaler, device):
    """After three steps of warm-up they replay as they run: parameters, scale and tracker, growth and backoff."""
    values = [1.0, 2.0, 0.5, 1.0, float("inf"), 0.25, 3.0, 1.0]
    outcomes = []
    for is_recorded in (False, True):
        weight, optimizer = _one_weight(device, make)
        scaler = make_scaler(device, init_scale=128.0, growth_interval=2)
        scaler._lazy_init_scale_growth_tracker(torch.device(device))
        weight.grad = torch.zeros_like(weight)
        graph = None
        for step, value in enumerate(values):
            weight.grad.fill_(value * scaler.get_scale())
            if step == 3 and is_recorded:
                with _capture(device) as graph:
                    scaler.step(optimizer)
                    scaler.update()
                if device == "cpu":  # the stand-in runs while it records; a CUDA graph does not
                    continue
            if graph is not None:
                graph.replay()
            else:
                with _warming_up(device):
                    scaler.step(optimizer)
                    scaler.update()
        outcomes.append((weight.tolist(), scaler.get_scale(), scaler.state_dict()["_growth_tracker"]))
    assert outcomes[0] == outcomes[1]


@ON_EACH_DEVICE
@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_a_whole_recorded_step(make, device):
    """Loss, backward, `step` and `update` in one graph are torch's own run without one, every counter included."""
    values = [1.0] * 5 + [float("inf"), 1.0, float("nan"), float("-inf"), 1.0, 1.0, 1.0]
    expected_weight, expected_optimizer = _one_weight(device, make)
    expected = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2)
    weight, optimizer = _one_weight(device, make)
    scaler = GradScaler(device, init_scale=2.0**10, growth_interval=2)
    factor = torch.ones((), device=device)
    graph = None
    for step, value in enumerate(values):
        factor.fill_(value)
        expected_optimizer.zero_grad()
        expected.scale((expected_weight * factor).sum()).backward()
        expected.step(expected_optimizer)
        expected.update()
        optimizer.zero_grad(set_to_none=graph is None)
        if step == 3:
            with _capture(device) as graph:
                scaler.scale((weight * factor).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
            if device == "cuda":
                graph.replay()
        elif graph is not None:
            graph.replay()
        else:
            with _warming_up(device):
                scaler.scale((weight * factor).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
        assert weight.tolist() == expected_weight.tolist(), step
        assert scaler.get_scale() == expected.get_scale(), step
        assert scaler.state_dict()["_growth_tracker"] == expected.state_dict()["_growth_tracker"], step
    numbers = scaler.metrics()
    assert (int(numbers["steps"]), int(numbers["skipped_steps"])) == (len(values), 3)


@ON_EACH_DEVICE
@AGAINST_TORCH
def test_only_the_step_is_recorded(make_scaler, device):
    """The loss is scaled again each time, and the recorded step reads the scale as it then is."""
    weight, optimizer = _one_weight(device, FUSED["sgd"])
    scaler = make_scaler(device, init_scale=4.0, growth_interval=1)
    with _warming_up(device):
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    weight.grad.zero_()
    scaler.scale(weight.sum()).backward()
    with _capture(device) as graph:
        scaler.step(optimizer)
        scaler.update()
    if device == "cuda":
        graph.replay()
    for step in range(3):
        weight.grad.zero_()
        scaler.scale(weight.sum()).backward()
        before = weight[0].item()
        graph.replay()
        assert before - weight[0].item() == 1.0
        assert scaler.get_scale() == 2.0 ** (5 + step)


@ON_EACH_DEVICE
def test_a_state_loaded_between_replays_takes_effect(device):
    """Tensors are written in place, so the graph continues from the checkpoint."""
    weight, optimizer = _one_weight(device, FUSED["sgd"])
    scaler = GradScaler(device, init_scale=4.0, growth_interval=2)
    saved = GradScaler("cpu", init_scale=64.0, growth_interval=2).state_dict()
    with _warming_up(device):
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad(set_to_none=True)
    with _capture(device) as graph:
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    scaler.load_state_dict(saved)
    for expected in (64.0, 128.0):
        weight.grad.zero_()
        before = weight[0].item()
        graph.replay()
        assert before - weight[0].item() == 1.0
        assert scaler.get_scale() == expected
    scaler.update(2.0)
    weight.grad.zero_()
    graph.replay()
    assert (weight.grad[0].item(), scaler.get_scale()) == (1.0, 2.0)


@ON_EACH_DEVICE
@AGAINST_TORCH
def test_two_optimizers_of_one_recorded_loss(make_scaler, device):
    """Each unscales by the scale of the last replay."""
    weights, optimizers = zip(*(_one_weight(device) for _ in range(2)), strict=True)
    scaler = make_scaler(device, init_scale=4.0, growth_interval=1)
    with _warming_up(device):
        scaler.scale(sum(weights).sum()).backward()
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    with _capture(device) as graph:
        scaler.scale(sum(weights).sum()).backward()
    for _ in range(3):
        before = [weight[0].item() for weight in weights]
        for weight in weights:
            weight.grad.zero_()
        graph.replay()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert [old - weight[0].item() for old, weight in zip(before, weights, strict=True)] == [1.0, 1.0]


@ON_EACH_DEVICE
@AGAINST_TORCH
def test_a_user_skips_a_replayed_step(make_scaler, device):
    """Unscaled, looked at, left out: the gradients of the next replay are new ones."""
    weight, optimizer = _one_weight(device)
    scaler = make_scaler(device, init_scale=1024.0)
    with _capture(device) as graph:
        scaler.scale(weight.sum()).backward()
    weight.grad.zero_()
    graph.replay()
    scaler.unscale_(optimizer)
    scaler.update()
    weight.grad.zero_()
    graph.replay()
    scaler.step(optimizer)
    assert weight.tolist() == [0.0] * 3


@ON_EACH_DEVICE
@AGAINST_TORCH
@pytest.mark.parametrize("zeroes", [False, True])
def test_a_critic_steps_more_often_than_the_replayed_generator(make_scaler, device, zeroes):
    """Both are unscaled at every replay, one is stepped at some: what was unscaled before is not what is there now."""
    weights, optimizers = zip(*(_one_weight(device) for _ in range(2)), strict=True)
    scaler = make_scaler(device, init_scale=1024.0)
    with _capture(device) as graph:
        scaler.scale(sum(weights).sum()).backward()
    for iteration in range(3):
        for weight in weights:
            weight.grad.zero_() if zeroes else weight.grad.data.zero_()  # with a new version, or without one
        graph.replay()
        before = weights[1][0].item()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        for optimizer in optimizers[: 2 if iteration else 1]:
            scaler.step(optimizer)
        assert before - weights[1][0].item() == (1.0 if iteration else 0.0)
        scaler.update()


@ON_EACH_DEVICE
@AGAINST_TORCH
def test_one_loss_replayed_and_one_eager(make_scaler, device):
    """Two updates an iteration, each of which changes the scale."""
    weights, optimizers = zip(*(_one_weight(device) for _ in range(2)), strict=True)
    scaler = make_scaler(device, init_scale=1024.0, growth_interval=1)
    with _capture(device) as graph:
        scaler.scale(weights[0].sum()).backward()
    for _ in range(4):
        weights[0].grad.zero_()
        graph.replay()
        before = [weight[0].item() for weight in weights]
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[1].zero_grad()
        scaler.scale((weights[0] * 0.0 + weights[1]).sum()).backward()
        scaler.step(optimizers[1])
        scaler.update()
        assert [old - weight[0].item() for old, weight in zip(before, weights, strict=True)] == [1.0, 1.0]


@ON_EACH_DEVICE
@AGAINST_TORCH
def test_a_hand_made_loss_after_replayed_steps(make_scaler, device):
    """The scale that the replays have left is the one that counts."""
    weight, optimizer = _one_weight(device, FUSED["sgd"])
    scaler = make_scaler(device, init_scale=4.0, growth_interval=1)
    with _warming_up(device):
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    weight.grad.zero_()
    scaler.scale(weight.sum()).backward()
    with _capture(device) as graph:
        scaler.step(optimizer)
        scaler.update()
    for _ in range(2):
        weight.grad.zero_()
        scaler.scale(weight.sum()).backward()
        graph.replay()
    weight.grad.zero_()
    (weight.sum() * scaler.get_scale()).backward()
    before = weight[0].item()
    scaler.step(optimizer)
    assert before - weight[0].item() == 1.0


@pytest.mark.parametrize("name", ["_scale", "_growth_tracker"])
def test_a_tensor_that_somebody_keeps_stays_the_one(name):
    """Through steps, growth, backoff, a new scale and a loaded state."""
    weight, optimizer = _one_weight("cpu")
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    scaler.scale(weight.sum()).backward()
    kept = getattr(scaler, name)
    scaler.step(optimizer)
    scaler.update()
    scaler.update(16.0)
    scaler.load_state_dict({**scaler.state_dict(), "growth_tracker": 0})
    assert getattr(scaler, name) is kept
    if name == "_scale":
        assert kept.item() == 16.0


@pytest.mark.gpu
@CUDA_ONLY
def test_a_recorded_clip():
    """Norm, clip, step and update replay without a wait."""
    weight, optimizer = _one_weight("cuda", FUSED["sgd"])
    scaler = GradScaler("cuda", init_scale=4.0, growth_interval=1)
    with _warming_up("cuda"):
        scaler.scale(weight.sum()).backward()
        scaler.unscale_and_clip_(optimizer, 0.5)
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad(set_to_none=True)
    with _capture("cuda") as graph:
        scaler.scale(weight.sum()).backward()
        norm = scaler.unscale_and_clip_(optimizer, 0.5)
        scaler.step(optimizer)
        scaler.update()
    for _ in range(3):
        before = weight.detach().clone()
        weight.grad.zero_()
        graph.replay()
        assert norm.item() == pytest.approx(3.0**0.5)
        assert (before - weight).norm().item() == pytest.approx(0.5, rel=1e-4)
