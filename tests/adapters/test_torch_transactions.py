"""A step is a transaction: one beginning, one decision, one end on every way out, and nothing is left for the next."""

import contextlib
import gc
import math
import sys

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

import lossscale_torch
from lossscale_core.errors import CallOrderError
from lossscale_torch import GradScaler, guarded
from lossscale_torch.hooks import Hook
from tests.adapters.emulated_device import Emulated
from tests.adapters.torch_steps import CALLS, EITHER_KIND, Loop, Veto, one, same, take_step

SOURCE = lossscale_torch.__path__[0]


# -- one end -----------------------------------------------------------------------------------------------------------


class _Raises(Hook):
    """Raises at one of the points of a step."""

    def __init__(self, point):
        setattr(self, point, self.fail)

    def fail(self, *_):
        raise KeyError("a hook's own error")


@EITHER_KIND
@pytest.mark.parametrize("point", ["before_step", "after_step", "after_update"])
def test_a_hook_that_raises_does_not_keep_the_others_from_their_work(point, fused):
    """Buffers come back, other hooks see the outcome, and the next steps and retries are as ever."""
    raises, notes = _Raises(point), Veto()
    loop = Loop(fused, protects=True, hooks=[raises, notes])
    before = loop.buffers()
    with pytest.raises(KeyError, match="own error"):
        loop.step(is_bad=True)
    if point != "after_update":
        assert not loop.scaler.update().applied
    assert same(before, loop.buffers())
    assert notes.calls[-1] == ("veto", "update", False)
    assert notes.steps == 1
    delattr(raises, point)
    attempt = loop.retry(bad_tries=2)
    assert (attempt.number, bool(attempt.info)) == (2, True)


def test_an_optimizer_that_raises_after_unscaling_was_not_applied():
    """The update says so, and protected buffers come back."""
    loop = Loop(protects=True)
    before, loop.optimizer.step = loop.buffers(), _Raises("step").fail
    loop.backward()
    loop.scaler.unscale_(loop.optimizer)
    with pytest.raises(KeyError):
        loop.scaler.step(loop.optimizer)
    assert not loop.scaler.update().applied
    assert same(before, loop.buffers())


def _is_interrupted(call, line):
    """Call a function; return whether Ctrl-C came at a line of this package, which are counted as they run."""
    left = line

    def trace(frame, event, argument):
        nonlocal left
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        left -= event == "line"
        if left == 0 and event == "line":
            raise KeyboardInterrupt
        return trace

    gc.disable()  # an error in a finalizer that runs meanwhile would interrupt nothing
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
        gc.enable()
    return False


def _with_retries(loop):
    return loop.retry(bad_tries=1)


def _with_two(loop):
    loop.step(is_bad=True)
    loop.step()


@EITHER_KIND
@pytest.mark.parametrize("program", [_with_retries, _with_two])
def test_an_interruption_at_any_line_is_not_left_over(program, fused):
    """The next loops train; a plain one that was left between `step` and `update` may get torch's own error, once.

    So they do with another scaler, since no factor and no flag stay on a fused optimizer.
    """
    line = 0
    while True:
        line += 7  # each line takes seconds; different lines are met in different calls
        loop = Loop(fused, protects=True)
        loop.step()
        if not _is_interrupted(lambda: program(loop), line):  # noqa: B023  # called at once
            break
        if program is _with_two and line % 2:
            loop.scaler = GradScaler("cpu", init_scale=2.0)
            loop.scaler.load_state_dict(loop.scaler.state_dict())  # it says nothing of an optimizer that has stepped
        elif program is _with_two:
            with contextlib.suppress(RuntimeError):  # torch's: "has already been called"
                loop.step()
            with contextlib.suppress(AssertionError, RuntimeError):
                loop.scaler.update()
        assert loop.retry(bad_tries=1, retries=2).info, line
        batch, weight = torch.randn(8, 4), loop.model[2].weight
        (grad,), before = torch.autograd.grad(loop.model(batch).square().mean(), weight), weight.detach().clone()
        assert loop.step(batch=batch).applied, line
        torch.testing.assert_close(before - weight, 0.01 * grad, rtol=1e-4, atol=1e-6)
        assert not {"grad_scale", "found_inf"} & vars(loop.optimizer).keys()
        assert all(each.isfinite().all() for each in loop.model.buffers())
    assert line > 100


@EITHER_KIND
def test_an_interrupted_first_loss_leaves_no_half_made_state(fused):
    """The next step has the scale and the count of a new scaler."""
    line = 0
    while True:
        line += 1
        (_, optimizer), scaler = one(fused), GradScaler("cpu", init_scale=8.0, growth_interval=2)
        if not _is_interrupted(lambda: scaler.scale(torch.ones(())), line):  # noqa: B023  # called at once
            break
        assert [take_step(scaler, optimizer, 1.0)[:3] for _ in range(2)] == [(True, 8.0, 8.0), (True, 8.0, 16.0)]
    assert line > 10


@EITHER_KIND
def test_an_interrupted_step_of_a_guarded_optimizer_is_not_left_over(fused):
    """The next one is taken, at whatever line it was; an outcome is that of its own step."""
    line = 0
    while True:
        line += 3
        param, optimizer = one(fused, lr=0.5)
        guarded(optimizer, max_norm=10.0)
        param.grad = torch.ones(1)
        if not _is_interrupted(optimizer.step, line):
            break
        before = param.item()
        optimizer.step()
        assert (bool(optimizer.last_step), before - param.item()) == (True, 0.5), line
    assert line > 50
    optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert not optimizer.last_step


# -- no mode by accident -----------------------------------------------------------------------------------------------


def test_a_skip_under_a_dispatch_mode_leaves_the_state_on_the_host():
    """A counter of operations is not a recording that decides."""
    loop = Loop()
    loop.step()
    with FlopCounterMode(display=False):
        loop.backward()
        loop.scaler.skip(loop.optimizer)
        loop.scaler.update()
    assert loop.step().applied is True
    with FlopCounterMode(display=False):
        assert loop.step().applied is True


# -- no memory of guesses ----------------------------------------------------------------------------------------------


@EITHER_KIND
@pytest.mark.parametrize("call", ["step", "clip"])
@pytest.mark.parametrize("before", ["unscale_", "unscale_and_clip_"])
def test_gradients_that_were_given_up(before, call, fused):
    """Another loss after `unscale_` and `zero_grad` has scaled gradients, which no step may take for unscaled ones."""
    loop = Loop(fused)
    loop.backward()
    CALLS[before](loop.scaler, loop.optimizer)
    loop.backward()
    with pytest.raises((CallOrderError, RuntimeError), match=r"still scaled: .* scaler.skip|has already been called"):
        loop.scaler.step(loop.optimizer) if call == "step" else loop.scaler.unscale_and_clip_(loop.optimizer, 1.0)
    loop.scaler.skip(loop.optimizer)
    loop.scaler.update()
    assert loop.step().applied


@pytest.mark.parametrize("call", ["unscale_", "unscale_and_clip_"])
def test_a_step_of_sam_that_is_made_ready_again(call):
    """Recipes set torch's stage back; what is unscaled again is not given up."""
    loop = Loop()
    loop.backward()
    loop.scaler.unscale_(loop.optimizer)
    loop.backward()
    loop.scaler._per_optimizer_states[id(loop.optimizer)]["stage"] = torch.amp.grad_scaler.OptState.READY
    CALLS[call](loop.scaler, loop.optimizer)
    loop.scaler.step(loop.optimizer)
    assert loop.scaler.update().applied


@pytest.mark.parametrize("value", [math.nan, -3.0, 0.0, -math.inf])
def test_a_bad_new_scale_in_a_tensor_on_a_device(value):
    """It leaves the scale as it was, and nothing is read."""
    with Emulated("mps"):
        scaler = GradScaler("mps", init_scale=8.0)
        scaler.place_on("mps")
        before = Emulated.reads
        scaler.update(torch.tensor(value, device="mps"))
        assert Emulated.reads == before
        assert scaler.get_scale() == 8.0
        scaler.update(torch.tensor(4.0, device="mps"))
        assert scaler.get_scale() == 4.0


def test_a_view_of_logits_does_not_keep_them():
    """A loss is kept until `update`, its base is not."""
    scaler, weight = GradScaler("cpu"), torch.ones(1, requires_grad=True)
    logits = weight * torch.ones(1000)
    storage = StorageWeakRef(logits.untyped_storage())
    scaler.scale(logits[0]).backward()
    del logits
    assert storage.expired()


# -- who says applied --------------------------------------------------------------------------------------------------


def test_an_optimizer_that_steps_in_a_gradient_hook_is_told():
    """Its gradients are applied scaled, and `step` finds none."""
    (param, inner), scaler = one(lr=1e-6), GradScaler("cpu")

    def step_now(p):
        inner.step()
        p.grad = None

    param.register_post_accumulate_grad_hook(step_now)
    scaler.scale(param.sum()).backward()
    scaler.step(inner)
    with pytest.warns(UserWarning, match="an optimizer that steps in such a hook applies scaled gradients"):
        scaler.update()


def test_a_disabled_scaler_around_a_guarded_optimizer():
    """The optimizer decides, and the outcome says so."""
    (param, optimizer), scaler = one(), GradScaler("cpu", enabled=False)
    guarded(optimizer)
    for value in (1.0, math.nan, 1.0):
        param.grad = torch.full((1,), value)
        scaler.step(optimizer)
        info = scaler.update()
        assert bool(info.applied) is bool(info.applied_of(optimizer)) is (value == 1.0)
    assert scaler.metrics()["loss_scale"] == scaler.get_scale() == 1.0
