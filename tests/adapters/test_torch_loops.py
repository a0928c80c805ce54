"""Loops that differ from one loss, one step and one update: losses by hand, several optimizers, steps left out."""

import pytest
import torch

from lossscale_core.errors import CallOrderError
from lossscale_torch import GradScaler
from tests.adapters.recorded_graph import RecordedGraph
from tests.adapters.test_torch_other_packages import EITHER_KIND, _one


def _two(fused=False):
    return zip(*(_one(fused) for _ in range(2)), strict=True)


def _moved(param, call, *args):
    before = param.item()
    call(*args)
    return before - param.item()


# -- which scale the gradients have ------------------------------------------------------------------------------------

WAYS = {
    "scale": lambda scaler, loss: scaler.scale(loss),
    "get_scale": lambda scaler, loss: loss * scaler.get_scale(),
    "_scale": lambda scaler, loss: loss * scaler._scale,
    "attach": lambda scaler, loss: scaler.attach(torch.ones(1, requires_grad=True), loss).sum(),
}


@EITHER_KIND
@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize("second", WAYS)
def test_two_losses_and_an_update_after_each(first, second, fused):
    """However each was scaled, its gradients have the scale of then; nothing warns. A GAN is such a loop.

    Where a loss is multiplied by hand, `place_on` says so.
    """
    params, optimizers = _two(fused)
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    scaler.place_on("cpu")
    for number in range(1, 5):
        for way, param, optimizer in zip((first, second), params, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            WAYS[way](scaler, param.sum()).backward()
            assert _moved(param, scaler.step, optimizer) == 1.0
            scaler.update()
    assert scaler.get_scale() == 1024.0 * 2.0**8


@EITHER_KIND
@pytest.mark.parametrize("call", ["unscale_", "clip", "joint clip"])
def test_unscale_before_there_are_gradients(fused, call):
    """It finds nothing, so the optimizer stays ready: its gradients are unscaled and checked when they are there."""
    params, optimizers = _two(fused)
    scaler = GradScaler("cpu", init_scale=1024.0)
    for value, expected in ((1.0, 1.0), (float("inf"), 0.0)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(params[0].sum()).backward()
        loss = scaler.scale((params[1] * value).sum())
        if call == "unscale_":
            scaler.unscale_(optimizers[1])
        else:
            scaler.unscale_and_clip_(optimizers if call == "joint clip" else optimizers[1], 10.0)
        loss.backward()
        assert _moved(params[1], scaler.step, optimizers[1]) == expected
        scaler.update()


# -- several optimizers ------------------------------------------------------------------------------------------------


@EITHER_KIND
@pytest.mark.parametrize("bad", [0, 1])
def test_each_optimizer_tells_whether_it_moved(fused, bad):
    """`applied_of` is what a schedule or an average of one optimizer's parameters asks."""
    params, optimizers = _two(fused)
    scaler = GradScaler("cpu", init_scale=1024.0)
    for is_spoilt in (False, True, False):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(sum(params).sum()).backward()
        if is_spoilt:
            params[bad].grad.fill_(float("nan"))
        moves = [_moved(param, scaler.step, each) for param, each in zip(params, optimizers, strict=True)]
        info = scaler.update()
        assert [bool(info.applied_of(optimizer)) for optimizer in optimizers] == [move == 1.0 for move in moves]
        assert bool(info.applied) is all(moves) is not is_spoilt
        assert info._replace(overflow_streak=5).applied_of(optimizers[1 - bad]) == info.applied  # a copy of the fields
        with pytest.raises(CallOrderError, match=r"SGD that took no part .* pass the object that was passed to"):
            info.applied_of(_one()[1])
    assert scaler.get_scale() == 512.0


@EITHER_KIND
def test_an_update_after_each_of_two_optimizers(fused):
    """With `updates_per_step=2`, which Accelerate needs, one scale divides both, and one loss counts as one step."""
    params, optimizers = _two(fused)
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=1, updates_per_step=2)
    for value, moves, scale in ((1.0, (1.0, 1.0), 2048.0), (float("inf"), (0.0, 1.0), 1024.0)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale((params[0] * value + params[1]).sum()).backward()
        for param, optimizer, move in zip(params, optimizers, moves, strict=True):
            assert _moved(param, scaler.step, optimizer) == move
            scaler.update()
        assert (scaler.get_scale(), scaler.metrics()["steps"]) == (scale, 1 + (value != 1.0))


@EITHER_KIND
def test_a_joint_clip_before_an_update_after_each_of_two_optimizers(fused):
    """With `updates_per_step=2` what both were clipped by lasts until the step of the second."""
    params, optimizers = _two(fused)
    scaler = GradScaler("cpu", init_scale=1024.0, updates_per_step=2)
    scaler.scale(sum(params).sum()).backward()
    assert scaler.unscale_and_clip_(optimizers, 10.0).item() == pytest.approx(2.0**0.5)
    for param, optimizer in zip(params, optimizers, strict=True):
        assert _moved(param, scaler.step, optimizer) == 1.0
        assert scaler.update().applied


# -- steps that are left out or refused --------------------------------------------------------------------------------


@EITHER_KIND
@pytest.mark.parametrize("looks_first", [False, True])
def test_a_user_decides_to_skip(fused, looks_first):
    """Nothing moves, and `update` ends the step; what `unscale_` has found counts, an overflow, too."""
    param, optimizer = _one(fused)
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    for skips, value in ((True, 1.0), (False, 1.0), (True, 1.0), (True, float("inf"))):
        optimizer.zero_grad()
        scaler.scale((param * value).sum()).backward()
        if looks_first:
            scaler.unscale_(optimizer)
        assert _moved(param, scaler.skip if skips else scaler.step, optimizer) == (0.0 if skips else 1.0)
        info = scaler.update()
        assert bool(info.applied) is bool(info.applied_of(optimizer)) is not skips
        assert "no gradients" not in scaler.diagnose()
    assert info.overflow_streak == looks_first
    assert scaler.get_scale() == (2.0**12 if looks_first else 2.0**11)


def test_a_read_that_is_refused_decides_nothing():
    """A second `step` reads the flag again; the overflow is not applied."""
    param, optimizer = _one()
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(param.sum() * float("inf")).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"), RecordedGraph():
        scaler.step(optimizer)
    assert _moved(param, scaler.step, optimizer) == 0.0
    assert scaler.update().applied is False
    assert scaler.get_scale() == 512.0


def test_an_optimizer_that_never_has_gradients_is_logged(caplog):
    """It steps, and nothing is counted; once after twenty updates the log says so, and `diagnose` at any time."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scaler = GradScaler("cpu")
    for _ in range(45):
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        assert scaler.update().applied
    assert [each.getMessage()[:40] for each in caplog.records] == ["20 updates in a row found no gradient in"]
    assert "no gradients to check" in scaler.diagnose()
    assert (scaler.get_scale(), scaler.metrics()["steps"]) == (2.0**16, 0)
