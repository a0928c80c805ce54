"""Loops that do not call `scale` once before each step: by hand, too early or late, in another order, or not at all."""

import itertools
import json

import pytest
import torch

from lossscale_core.errors import CallOrderError
from lossscale_torch import GradScaler
from tests.adapters.emulated_device import Emulated, OnDevice
from tests.adapters.recorded_graph import RecordedGraph

AGAINST_TORCH = pytest.mark.parametrize("make_scaler", [GradScaler, torch.amp.GradScaler], ids=["ours", "torch"])
EITHER_KIND = pytest.mark.parametrize("fused", [False, True], ids=["ordinary", "fused"])


def _one(fused=False):
    """Return a parameter of 1.0 and an optimizer that moves it by its gradient."""
    param = torch.nn.Parameter(torch.ones(1))
    return param, torch.optim.SGD([param], lr=1.0, fused=fused)


def _two(fused=False):
    return zip(*(_one(fused) for _ in range(2)), strict=True)


def _moved(param, call, *args):
    before = param.item()
    call(*args)
    return before - param.item()


# -- losses that are multiplied by hand --------------------------------------------------------------------------------


@EITHER_KIND
@AGAINST_TORCH
def test_two_losses_multiplied_by_get_scale(make_scaler, fused):
    """An update after each: the second optimizer's gradients belong to the scale after the first update."""
    params, optimizers = _two(fused)
    scaler = make_scaler("cpu", init_scale=1024.0, growth_interval=1)
    scaler.scale(torch.ones(()))
    for _, (param, optimizer) in itertools.product(range(3), zip(params, optimizers, strict=True)):
        optimizer.zero_grad()
        (param.sum() * scaler.get_scale()).backward()
        assert _moved(param, scaler.step, optimizer) == 1.0
        scaler.update()


@EITHER_KIND
@AGAINST_TORCH
def test_one_loss_scaled_and_one_by_hand(make_scaler, fused):
    """In one iteration with two updates, from the second iteration on, when both optimizers are known."""
    params, optimizers = _two(fused)
    scaler = make_scaler("cpu", init_scale=1024.0, growth_interval=2)
    for iteration in range(6):
        for is_first, param, optimizer in zip((True, False), params, optimizers, strict=True):
            optimizer.zero_grad()
            if is_first:
                scaler.scale(param.sum()).backward()
            else:
                (param.sum() * scaler.get_scale()).backward()
            assert _moved(param, scaler.step, optimizer) == 1.0, iteration
            scaler.update()


@AGAINST_TORCH
def test_a_loss_by_hand_after_a_step_that_the_user_left_out(make_scaler):
    """What was known of the gradients that were not stepped is forgotten."""
    param, optimizer = _one()
    scaler = make_scaler("cpu", init_scale=1024.0)
    scaler.scale(param.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.update()
    optimizer.zero_grad()
    (param.sum() * scaler.get_scale()).backward()
    assert _moved(param, scaler.step, optimizer) == 1.0


@EITHER_KIND
def test_a_stage_that_never_scales_a_loss(fused):
    """A stage of a pipeline only needs `place_on`; its gradients come from another stage's loss."""
    param, optimizer = _one(fused)
    last, stage = (GradScaler("cpu", init_scale=1024.0, growth_interval=1) for _ in range(2))
    other, other_optimizer = _one(fused)
    stage.place_on("cpu")
    for _ in range(3):
        for each in (optimizer, other_optimizer):
            each.zero_grad()
        last.scale((param * other).sum()).backward()
        true_gradient = other.item()
        assert _moved(param, stage.step, optimizer) == true_gradient
        last.step(other_optimizer)
        assert stage.update() == last.update()


# -- gradients that were there before an update ------------------------------------------------------------------------


def test_torch_doubles_what_waits_over_an_update():
    """The other side of the row in the table of differences."""
    params, optimizers = _two()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(sum(params).sum()).backward()
    params[0].grad.fill_(float("inf"))
    scaler.step(optimizers[0])
    scaler.update()
    assert _moved(params[1], scaler.step, optimizers[1]) == 2.0


@AGAINST_TORCH
def test_gradients_kept_over_the_next_loss(make_scaler):
    """Once another loss is scaled, every gradient is divided by its scale, as torch does; do not keep them so long."""
    params, optimizers = _two()
    scaler = make_scaler("cpu", init_scale=1024.0, growth_interval=1)
    for stepped in (optimizers, optimizers[:1]):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(sum(params).sum()).backward()
        for optimizer in stepped:
            scaler.step(optimizer)
        scaler.update()
    optimizers[0].zero_grad()
    scaler.scale(params[0].sum()).backward()
    scaler.step(optimizers[0])
    assert _moved(params[1], scaler.step, optimizers[1]) == 0.5


@EITHER_KIND
@AGAINST_TORCH
@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_gan_that_zeroes_at_the_top(make_scaler, fused, set_to_none):
    """Two scaled losses and two updates an iteration, each of which changes the scale."""
    params, optimizers = _two(fused)
    scaler = make_scaler("cpu", init_scale=1024.0, growth_interval=1)
    for _ in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        for param, optimizer in zip(params, optimizers, strict=True):
            scaler.scale(param.sum()).backward()
            assert _moved(param, scaler.step, optimizer) == 1.0
            scaler.update()


@AGAINST_TORCH
def test_gradients_written_by_hand_after_the_others_update(make_scaler):
    """In place and by assignment, without any backward: who reads the scale first means the present one."""
    for is_assigned in (False, True):
        params, optimizers = _two()
        scaler = make_scaler("cpu", init_scale=1024.0, growth_interval=1)
        for _ in range(2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            scaler.scale(sum(params).sum()).backward()
            for optimizer in optimizers[: 2 if scaler.get_scale() == 1024.0 else 1]:
                scaler.step(optimizer)
            scaler.update()
        by_hand = torch.full((1,), scaler.get_scale())
        if is_assigned:
            params[1].grad = by_hand
        else:
            params[1].grad.copy_(by_hand)
        assert _moved(params[1], scaler.step, optimizers[1]) == 1.0


@EITHER_KIND
@AGAINST_TORCH
def test_a_scaled_loss_of_long_ago(make_scaler, fused):
    """One scaled loss, then losses by hand: a second optimizer's first step takes the present scale."""
    params, optimizers = _two(fused)
    scaler = make_scaler("cpu", init_scale=1024.0, growth_interval=1)
    scaler.scale(params[0].sum()).backward()
    scaler.step(optimizers[0])
    scaler.update()
    for _ in range(2):
        optimizers[0].zero_grad()
        (params[0].sum() * scaler.get_scale()).backward()
        scaler.step(optimizers[0])
        scaler.update()
    (params[1].sum() * scaler.get_scale()).backward()
    assert _moved(params[1], scaler.step, optimizers[1]) == 1.0


def test_an_unknown_scale_does_not_matter_while_the_scale_is_unchanged():
    """The same loop with a scale that stays is torch's."""
    params, optimizers = _two()
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(params[0].sum()).backward()
    scaler.step(optimizers[0])
    scaler.update()
    (params[1].sum() * scaler.get_scale()).backward()
    assert _moved(params[1], scaler.step, optimizers[1]) == 1.0


# -- too early, too late -----------------------------------------------------------------------------------------------


@EITHER_KIND
@pytest.mark.parametrize("clips", [False, True])
def test_unscale_before_there_are_gradients(fused, clips):
    """It finds nothing, so the optimizer stays ready: its gradients are unscaled and checked when they are there."""
    param, optimizer = _one(fused)
    scaler = GradScaler("cpu", init_scale=1024.0)
    loss = scaler.scale(param.sum())
    scaler.unscale_and_clip_(optimizer, 10.0) if clips else scaler.unscale_(optimizer)
    loss.backward()
    assert _moved(param, scaler.step, optimizer) == 1.0
    scaler.update()
    optimizer.zero_grad()
    loss = scaler.scale(param.sum())
    scaler.unscale_(optimizer)
    loss.backward()
    param.grad.fill_(float("inf"))
    assert _moved(param, scaler.step, optimizer) == 0.0


@pytest.mark.parametrize("is_compiled", [False, True])
def test_backward_of_a_loss_scaled_before_the_scale_has_changed_is_refused(is_compiled):
    """torch refuses it too, since its scale is written in place."""
    param, optimizer = _one()
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=1)

    def scaled_loss():
        return scaler.scale(param.sum())

    late = torch.compile(scaled_loss, backend="eager")() if is_compiled else scaled_loss()
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()
    assert param.grad is None


def test_torch_refuses_a_late_backward():
    """In words that name no call."""
    param, optimizer = _one()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    late = scaler.scale(param.sum())
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()


@AGAINST_TORCH
def test_a_scale_written_between_loss_and_step(make_scaler):
    """It divides the gradients: code that writes to the scaler's own tensor is responsible for its gradients."""
    param, optimizer = _one()
    scaler = make_scaler("cpu", init_scale=1024.0)
    scaler.scale(param.sum()).backward()
    scaler._scale.fill_(512.0)
    assert _moved(param, scaler.step, optimizer) == 2.0


# -- several optimizers ------------------------------------------------------------------------------------------------


@EITHER_KIND
@pytest.mark.parametrize("bad", [0, 1])
def test_each_optimizer_tells_whether_it_moved(fused, bad):
    """`applied_of` is what a schedule or an average of one optimizer's parameters asks."""
    params, optimizers = _two(fused)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]
    scaler = GradScaler("cpu", init_scale=1024.0)
    for is_spoilt in (False, True, False):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(sum(params).sum()).backward()
        if is_spoilt:
            params[bad].grad.fill_(float("nan"))
        before = [param.item() for param in params]
        for optimizer in optimizers:
            scaler.step(optimizer)
        info = scaler.update()
        assert bool(info.applied) is not is_spoilt
        for old, param, optimizer, scheduler in zip(before, params, optimizers, schedulers, strict=True):
            assert bool(info.applied_of(optimizer)) == (param.item() != old)
            if info.applied_of(optimizer):
                scheduler.step()
    assert schedulers[bad].get_last_lr() == [0.25]
    assert schedulers[1 - bad].get_last_lr() == [0.125]


def test_an_optimizer_that_took_no_step_was_not_applied():
    """Neither one that was left out nor an unknown one; in a disabled scaler every step is applied."""
    params, optimizers = _two()
    scaler = GradScaler("cpu")
    scaler.scale(params[0].sum()).backward()
    scaler.step(optimizers[0])
    info = scaler.update()
    assert info.applied_of(optimizers[0]) is True
    assert info.applied_of(optimizers[1]) is False
    assert GradScaler("cpu", enabled=False).update().applied_of(optimizers[1]) is True


@EITHER_KIND
@pytest.mark.parametrize("looks_first", [False, True])
def test_a_user_decides_to_skip(fused, looks_first):
    """`skip` ends the step: nothing moves, `update` continues, and the next gradients are new ones."""
    param, optimizer = _one(fused)
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    for skips in (True, False, True):
        optimizer.zero_grad()
        scaler.scale(param.sum()).backward()
        if looks_first:
            scaler.unscale_(optimizer)
        assert _moved(param, scaler.skip if skips else scaler.step, optimizer) == (0.0 if skips else 1.0)
        info = scaler.update()
        assert bool(info.applied) is not skips
        assert bool(info.applied_of(optimizer)) is not skips
    assert scaler.get_scale() == (2.0**13 if looks_first else 2.0**11)
    scaler.scale(param.sum()).backward()
    scaler.skip(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
        scaler.step(optimizer)
    GradScaler("cpu", enabled=False).skip(optimizer)


def test_a_disabled_scaler_knows_what_the_user_left_out():
    """So a schedule stays in step with it."""
    _, optimizers = _two()
    scaler = GradScaler("cpu", enabled=False)
    scaler.skip(optimizers[0])
    info = scaler.update()
    assert (info.applied, info.applied_of(optimizers[0]), info.applied_of(optimizers[1])) == (False, False, True)
    assert scaler.update().applied is True


def test_a_copy_of_the_outcome_tells_no_more_than_the_whole():
    """`_replace` makes a tuple of the fields alone."""
    param, optimizer = _one()
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(param.sum() * float("inf")).backward()
    scaler.step(optimizer)
    info = scaler.update()
    assert info._replace(overflow_streak=5).applied_of(optimizer) is False


def test_an_overflow_that_was_looked_at_and_skipped_backs_off():
    """What `unscale_` found counts, whichever call decides."""
    param, optimizer = _one()
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(param.sum() * float("inf")).backward()
    scaler.unscale_(optimizer)
    scaler.skip(optimizer)
    info = scaler.update()
    assert (info.applied, info.overflow_streak, scaler.get_scale()) == (False, 1, 512.0)


# -- what is reported --------------------------------------------------------------------------------------------------


def test_what_the_host_knows_is_plain_numbers():
    """`json.dumps` takes it, and `applied is True`."""
    param, optimizer = _one()
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    info = scaler.update()
    assert info.applied is True
    assert json.loads(json.dumps(info)) == [True, 1024.0, 1024.0, 0, False, False]
    assert json.loads(json.dumps(scaler.metrics()))["applied_steps"] == 1
    assert {type(number) for number in scaler.metrics().values()} == {int, float}


def test_what_a_device_knows_stays_what_it_was():
    """The numbers of a fused step on a device are tensors, and no later step changes them."""
    infos, numbers = [], []
    with Emulated("mps"):
        param = torch.nn.Parameter(torch.ones(3, device="mps"))
        optimizer = torch.optim.SGD([param], lr=1.0, fused=True)
        scaler = GradScaler("mps", init_scale=1024.0, growth_interval=1)
        for _ in range(3):
            scaler.scale(torch.ones((), device="mps"))
            param.grad = torch.ones(3, device="mps")
            scaler.step(optimizer)
            infos.append(scaler.update())
            numbers.append(scaler.metrics())
        assert [info.loss_scale_used.item() for info in infos] == [1024.0, 2048.0, 4096.0]
        assert [info.loss_scale_after.item() for info in infos] == [2048.0, 4096.0, 8192.0]
        assert [each["steps"].item() for each in numbers] == [1, 2, 3]
    assert all(isinstance(field, OnDevice) for field in infos[0][:5])


@EITHER_KIND
def test_what_a_cpu_knows_is_plain_numbers_whatever_the_optimizer(fused):
    """The flag of a fused optimizer lies in the host's own memory there."""
    param, optimizer = _one(fused)
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    assert scaler.update() == (True, 1024.0, 2048.0, 0, False, False)
    assert scaler.last_step.applied is True


# -- steps that are interrupted, refused or watched --------------------------------------------------------------------


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


def test_the_first_loss_may_be_scaled_in_inference_mode():
    """What the scaler keeps is written to later, outside of it."""
    param, optimizer = _one()
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    with torch.inference_mode():
        scaler.scale(param.sum())
    scaler.scale(param.sum()).backward()
    assert _moved(param, scaler.step, optimizer) == 1.0
    scaler.update()
    assert scaler.get_scale() == 2048.0


# -- what others do with the scaled loss -------------------------------------------------------------------------------


@AGAINST_TORCH
def test_hooks_on_the_scaled_loss(make_scaler):
    """A scaled loss takes hooks as any tensor does: they run once for each backward, and may be removed."""
    param, optimizer = _one()
    scaler = make_scaler("cpu", init_scale=4.0)
    scaled = scaler.scale(param.sum())
    seen = []
    kept, removed = (scaled.register_hook(lambda grad, name=name: seen.append((name, grad.item()))) for name in "ab")
    scaled.backward(retain_graph=True)
    removed.remove()
    (scaled * 3.0).backward()
    kept.remove()
    assert seen == [("a", 1.0), ("b", 1.0), ("a", 3.0)]
    assert _moved(param, scaler.step, optimizer) == 4.0
    scaler.update()


@AGAINST_TORCH
def test_a_scaled_loss_that_is_written_in_place(make_scaler):
    """What is added to it afterwards is part of the same backward."""
    param, optimizer = _one()
    scaler = make_scaler("cpu", init_scale=4.0)
    scaled = scaler.scale(param.sum())
    scaled += 2.0 * scaler.scale(param.sum())
    scaled.backward()
    assert _moved(param, scaler.step, optimizer) == 3.0
    scaler.update()
    with pytest.raises(RuntimeError, match="backward"):
        scaled.backward()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_an_update_after_each_of_two_optimizers_of_one_loss(fused, clips):
    """With `updates_per_step=2` both get the gradients of their loss, and one loss counts as one step."""
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([param], lr=1.0, fused=fused) for param in params]
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=1, updates_per_step=2)
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(sum(params).sum()).backward()
        if clips:
            assert scaler.unscale_and_clip_(optimizers, 10.0).item() == pytest.approx(2.0**0.5)
        for optimizer in optimizers:
            scaler.step(optimizer)
            assert scaler.update().applied
        assert [param.item() for param in params] == [-float(step)] * 2
    assert (scaler.get_scale(), scaler.metrics()["steps"]) == (1024.0 * 8.0, 3)


def test_an_iteration_with_fewer_updates_than_promised():
    """The next step of the same optimizer says so, and `end_of_step` closes such an iteration."""
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1, updates_per_step=2)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    with pytest.raises(CallOrderError, match=r"Of updates_per_step=2 calls of update\(\), 1 came"):
        scaler.step(optimizer)
    scaler.update(end_of_step=True)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    assert scaler.update(end_of_step=True).applied
    assert scaler.get_scale() == 32.0


def _steps(scale_loss, prepare=lambda scaler: None):
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(param.sum()).backward()
    for step in range(4):
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step == 0:
            prepare(scaler)
        scale_loss(scaler, param.sum()).backward()


def test_a_loss_that_was_not_scaled_is_told_once():
    """A loop that scales its first loss only."""
    with pytest.warns(UserWarning, match="no loss was scaled since the last update.*updates_per_step") as told:
        _steps(lambda scaler, loss: loss)
    assert len(told) == 1


@pytest.mark.parametrize(
    "scale_loss",
    [
        lambda scaler, loss: scaler.scale(loss),
        lambda scaler, loss: loss * scaler.get_scale(),
        lambda scaler, loss: loss * scaler._scale,
        lambda scaler, loss: scaler.attach(torch.ones(1, requires_grad=True), loss).sum(),
    ],
)
def test_a_loss_that_was_scaled_by_hand_is_not(scale_loss):
    """The suite turns warnings into errors."""
    _steps(scale_loss)


def test_a_stage_that_was_placed_is_told_nothing():
    """It receives its gradients from another process."""
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.place_on("cpu")
    for _ in range(3):
        param.grad = torch.ones(1)
        scaler.step(optimizer)
        assert scaler.update().applied


def test_an_optimizer_that_never_has_gradients_is_logged(caplog):
    """After twenty updates, and `diagnose` says it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scaler = GradScaler("cpu")
    for _ in range(25):
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
    assert [each.getMessage()[:40] for each in caplog.records] == ["20 updates in a row found no gradient in"]
    assert "no gradients to check" in scaler.diagnose()
