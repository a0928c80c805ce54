"""A step is a transaction: one beginning, one decision, one end on every way out, and nothing is left for the next."""

import contextlib
import copy
import gc
import json
import logging
import math
import sys
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

import lossscale_torch
from lossscale_core import DynamicScaling
from lossscale_core.errors import CallOrderError
from lossscale_torch import GradScaler, guarded
from lossscale_torch.hooks import Hook
from tests.adapters.emulated_device import Emulated

INF = float("inf")
FUSED = pytest.mark.parametrize("fused", [False, True], ids=["ordinary", "fused"])
SOURCE = lossscale_torch.__path__[0]


def _buffers(model):
    return [each.clone() for each in model.buffers()]


def _same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Loop:
    """A model with buffers, an optimizer and a scaler."""

    def __init__(self, fused=False, protects=False, **settings):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, fused=fused)
        protect = self.model if protects else ()
        self.scaler = GradScaler("cpu", init_scale=2.0**10, protect=protect, **settings)

    def body(self, is_bad=False, factor=1.0):
        """Take a step, whose gradients overflow if it is bad."""
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(torch.randn(8, 4)).square().mean() * factor).backward()
        if is_bad:
            self.model[0].weight.grad.fill_(INF)
        self.scaler.step(self.optimizer)
        return self.scaler.update()


# -- one end -----------------------------------------------------------------------------------------------------------


class _Raises(Hook):
    """Raises at one of the points of a step."""

    def __init__(self, point):
        setattr(self, point, self.fail)

    def fail(self, *_):
        raise KeyError("a hook's own error")


class _Notes(Hook):
    """Notes that it was called."""

    def __init__(self):
        self.calls = []

    def after_update(self, scaler, info):
        self.calls.append(bool(info.applied))


@FUSED
@pytest.mark.parametrize("point", ["before_step", "after_step", "after_update"])
def test_a_hook_that_raises_does_not_keep_the_others_from_their_work(point, fused):
    """Buffers come back, other hooks see the outcome, and the next steps and retries are as ever."""
    raises, notes = _Raises(point), _Notes()
    loop = Loop(fused, protects=True, hooks=[raises, notes])
    before = _buffers(loop.model)
    with pytest.raises(KeyError, match="own error"):
        loop.body(is_bad=True)
    if point != "after_update":
        assert not loop.scaler.update().applied
    assert _same(before, _buffers(loop.model))
    assert notes.calls == [False]
    delattr(raises, point)
    for attempt in loop.scaler.attempts(loop.model, retries=3):
        loop.body(is_bad=attempt.number < 2)
    assert (attempt.number, bool(attempt.info)) == (2, True)


class _CtrlC:
    """Raises `KeyboardInterrupt` at one line of this package."""

    def __init__(self, line):
        self.left = line

    def __call__(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def _is_interrupted(call, line):
    """Call a function; return whether it was interrupted at a line."""
    sys.settrace(_CtrlC(line))
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def _with_retries(loop):
    for attempt in loop.scaler.attempts(loop.model, retries=2):
        loop.body(is_bad=attempt.number == 0)
    return attempt


def _with_two(loop):
    loop.body(is_bad=True)
    loop.body()


@FUSED
@pytest.mark.parametrize("program", [_with_retries, _with_two])
def test_an_interruption_at_any_line_is_not_left_over(program, fused):
    """The next loops train; a plain one that was left between `step` and `update` may get torch's own error, once."""
    line = 0
    while True:
        line += 7  # each line takes seconds; different lines are met in different calls
        loop = Loop(fused, protects=True)
        loop.body()
        if not _is_interrupted(lambda: program(loop), line):  # noqa: B023  # called at once
            break
        if program is _with_two:
            with contextlib.suppress(RuntimeError):  # torch's: "has already been called"
                loop.body()
            with contextlib.suppress(AssertionError, RuntimeError):
                loop.scaler.update()
        attempt = _with_retries(loop)
        assert attempt.info, line
        assert loop.body().applied, line
        assert all(each.isfinite().all() for each in loop.model.buffers())
    assert line > 100


@FUSED
def test_an_interrupted_step_of_a_guarded_optimizer_is_not_left_over(fused):
    """The next one is taken, at whatever line it was."""
    line = 0
    while True:
        line += 3
        param = nn.Parameter(torch.ones(2))
        optimizer = guarded(torch.optim.SGD([param], lr=0.5, fused=fused), max_norm=10.0)
        param.grad = torch.ones(2)
        if not _is_interrupted(optimizer.step, line):
            break
        before = param[0].item()
        optimizer.step()
        assert (bool(optimizer.last_step), before - param[0].item()) == (True, 0.5), line
    assert line > 50


# -- retries -----------------------------------------------------------------------------------------------------------


def _leave(loop, how):
    """Leave a loop over tries without an applied step; the statistics of its batch are NaN."""
    for _ in loop.scaler.attempts(loop.model, retries=1):
        if how == "NaN":
            loop.body(factor=math.nan)
            continue
        loop.model(torch.full((8, 4), math.nan))
        if how == "break":
            break
        if how == "error":
            raise KeyError
        if how == "skip":
            loop.scaler.skip(loop.optimizer)
            loop.scaler.update()
        else:
            loop.body(is_bad=True)


@FUSED
@pytest.mark.filterwarnings("ignore:the gradients of a step overflowed")
@pytest.mark.parametrize("how", ["NaN", "used up", "break", "error", "skip"])
def test_buffers_come_back_on_every_way_out_of_a_loop_without_a_step(how, fused):
    """Random states do not, so that the next batch draws new numbers."""
    loop = Loop(fused)
    loop.body()
    before, state = _buffers(loop.model), torch.get_rng_state()
    with contextlib.suppress(KeyError):
        _leave(loop, how)
    assert _same(before, _buffers(loop.model))
    assert torch.equal(state, torch.get_rng_state()) is (how in ("break", "error", "skip"))  # which drew none
    assert _with_retries(loop).info


@FUSED
def test_a_loop_that_is_held_and_left_undoes_nothing_later(fused):
    """Its iterator may live on; steps that were taken since keep their statistics."""
    loop = Loop(fused)
    tries = loop.scaler.attempts(loop.model)
    for _ in tries:
        loop.body(is_bad=True)
        break
    for _ in range(3):
        assert loop.body().applied
    before = _buffers(loop.model)
    del tries
    assert _same(before, _buffers(loop.model))


@FUSED
@pytest.mark.parametrize("is_joint", [False, True])
def test_an_optimizer_that_was_applied_is_left_alone_in_later_tries(is_joint, fused):
    """Each steps once for a batch; decided together, both move with the bits of the scale that fits."""
    runs = []
    for init_scale in (2.0**40, 2.0**20):
        params = [nn.Parameter(torch.full((2,), value)) for value in (0.75, 0.5)]
        optimizers = [torch.optim.SGD([each], lr=0.1, momentum=0.9, fused=fused) for each in params]
        scaler = GradScaler("cpu", policy=DynamicScaling(init_scale=init_scale, max_scale=2.0**60))
        for attempt in scaler.attempts(retries=60):  # noqa: B007  # used after the loop
            for each in optimizers:
                each.zero_grad()
            loss = params[0].square().sum() * 1e-3 + params[1].sum() * 2.0**100
            scaler.scale(loss).backward()
            if is_joint:
                scaler.unscale_and_clip_(optimizers, INF)
            results = [scaler.step(each) for each in optimizers]
            info = scaler.update()
            if not is_joint:
                assert info.applied_of(optimizers[0])
        assert results[0] is None
        assert attempt.info
        assert (attempt.number > 5) is (init_scale > 2.0**30)
        runs.append([*params, *(state["momentum_buffer"] for each in optimizers for state in each.state.values())])
        assert params[0].tolist() == pytest.approx([0.75 - 0.1 * 1.5e-3] * 2)  # one step
    assert _same(*runs)


def test_gradients_of_a_skipped_optimizer_do_not_add_up():
    """The body skips one and does not clear it; each try begins without its gradients."""
    params = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([each], lr=0.1) for each in params]
    scaler = GradScaler("cpu", init_scale=4.0)
    for attempt in scaler.attempts(retries=3):
        scaler.scale(sum(params).sum()).backward()
        if attempt.number < 2:
            params[1].grad.fill_(INF)
        scaler.skip(optimizers[0])
        scaler.step(optimizers[1])
        scaler.update()
    assert (attempt.number, params[0].grad.item()) == (2, 1.0)


def test_the_log_and_the_streak_count_a_loop_once(caplog):
    """A scale that begins too high skips no batch: nothing is logged, and `max_overflow_streak` is not reached."""
    caplog.set_level(logging.WARNING, "lossscale")
    policy = DynamicScaling(init_scale=2.0**28, growth_interval=10**6, max_overflow_streak=3)
    param = nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([param], lr=0.0), GradScaler("cpu", policy=policy)
    for _ in range(40):
        for attempt in scaler.attempts(retries=30):  # noqa: B007  # used after the loop
            optimizer.zero_grad()
            scaler.scale(param.sum() * 2.0**118).backward()
            scaler.step(optimizer)
            scaler.update()
        assert attempt.info
    assert scaler.metrics()["skipped_steps"] > 10
    assert not caplog.records
    assert "too often" not in scaler.diagnose()
    resumed = GradScaler("cpu")
    resumed.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    assert resumed.diagnose() == scaler.diagnose()


# -- no mode by accident -----------------------------------------------------------------------------------------------


def _nothing(scaler, optimizer, param):
    scaler.skip(optimizer)
    scaler.update()


def _new_scale(scaler, optimizer, param):
    scaler.unscale_(optimizer)
    scaler.update(4.0)


def _without_gradients(scaler, optimizer, param):
    param.grad = None
    scaler.step(optimizer)
    scaler.update()


def _unscaled(scaler, optimizer, param):
    scaler.unscale_(optimizer)
    scaler.update()


def _unscaled_and_skipped(scaler, optimizer, param):
    scaler.unscale_(optimizer)
    scaler.skip(optimizer)
    scaler.update()


BETWEEN = [_nothing, _new_scale, _without_gradients, _unscaled, _unscaled_and_skipped]


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("between", BETWEEN)
def test_a_step_that_is_not_taken_does_not_keep_the_state_on_the_device(between, at):
    """It waits for nothing, counts what it should, and from the next step on the host knows all as before."""
    with Emulated("mps"):
        param = nn.Parameter(torch.ones(2, device="mps"))
        optimizer, scaler = torch.optim.SGD([param], lr=0.1), GradScaler("mps", init_scale=8.0)
        for number in range(4):
            scaler.scale(torch.ones((), device="mps"))
            param.grad = torch.ones(2, device="mps")
            if number == at:
                before = Emulated.reads
                between(scaler, optimizer, param)
                assert Emulated.reads == before
                continue
            reads = Emulated.reads
            scaler.step(optimizer)
            calls = len(Emulated.calls)
            info = scaler.update()
            if number > at + 1:
                assert (Emulated.reads - reads, len(Emulated.calls) - calls) == (1, 0)
            assert info.applied is True
        counted = between in (_unscaled, _unscaled_and_skipped)
        assert scaler.state_dict()["steps"] == 3 + counted


def test_the_losses_are_read_once_and_only_after_an_overflow():
    """However many there were."""
    with Emulated("mps"):
        param = nn.Parameter(torch.ones(2, device="mps"))
        optimizer, scaler = torch.optim.SGD([param], lr=0.1), GradScaler("mps", init_scale=8.0)
        for value, reads in ((1.0, 1), (INF, 2), (1.0, 1)):
            for _ in range(5):
                scaler.scale(torch.ones((), device="mps"))
            param.grad = torch.full((2,), value, device="mps")
            before = Emulated.reads
            scaler.step(optimizer)
            scaler.update()
            assert Emulated.reads - before == reads


# -- no memory of guesses ----------------------------------------------------------------------------------------------


@FUSED
@pytest.mark.parametrize("call", ["step", "clip"])
def test_gradients_that_were_given_up(call, fused):
    """Another loss after `unscale_` and `zero_grad` has scaled gradients, which no step may take for unscaled ones."""
    loop = Loop(fused)
    loop.scaler.scale(loop.model(torch.randn(8, 4)).sum()).backward()
    loop.scaler.unscale_(loop.optimizer)
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.model(torch.randn(8, 4)).sum()).backward()
    with pytest.raises((CallOrderError, RuntimeError), match=r"still scaled: .* scaler.skip|has already been called"):
        loop.scaler.step(loop.optimizer) if call == "step" else loop.scaler.unscale_and_clip_(loop.optimizer, 1.0)
    loop.scaler.skip(loop.optimizer)
    loop.scaler.update()
    assert loop.body().applied


@FUSED
def test_changed_gradients_are_the_users_right(fused):
    """Surgery between `unscale_` and `step`, with other losses in between, is taken as it is."""
    loop = Loop(fused)
    loop.scaler.scale(loop.model(torch.randn(8, 4)).sum()).backward()
    loop.scaler.unscale_(loop.optimizer)
    before = loop.model[2].weight.detach().clone()
    loop.model[2].weight.grad = torch.ones(1, 4)
    loop.scaler.scale(torch.ones(()))
    loop.scaler.step(loop.optimizer)
    assert loop.scaler.update().applied
    torch.testing.assert_close(before - loop.model[2].weight, torch.full((1, 4), 0.01), rtol=0, atol=1e-6)


def test_reading_the_scale_has_no_effect():
    """A loop that asks for the scale, as Accelerate does, is told that its loss is not scaled."""
    loop = Loop()
    loop.body()
    loop.model(torch.randn(8, 4)).sum().backward()
    loop.scaler.get_scale()
    assert loop.scaler._scale is not None
    with pytest.warns(UserWarning, match="no loss was scaled since the last"):
        loop.scaler.step(loop.optimizer)


@FUSED
@pytest.mark.parametrize("is_first", [True, False])
def test_a_batch_that_is_left_out_before_it_is_scaled(is_first, fused):
    """`skip` and `update` without a loss: no warning, no error, nothing counted."""
    loop = Loop(fused)
    if not is_first:
        loop.body()
    loop.scaler.skip(loop.optimizer)
    assert not loop.scaler.update().applied
    assert loop.body().applied
    assert loop.scaler.metrics()["steps"] == 2 - is_first


@pytest.mark.parametrize("value", [math.nan, -3.0, 0.0, -INF])
def test_a_new_scale_in_a_tensor_is_checked(value):
    """On the CPU as a number is; a bad one on a device leaves the scale as it was, and nothing is read."""
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="new_scale should be a float"):
        scaler.update(torch.tensor(value))
    with Emulated("mps"):
        scaler = GradScaler("mps", init_scale=8.0)
        scaler.scale(torch.ones((), device="mps"))
        before = Emulated.reads
        scaler.update(torch.tensor(value, device="mps"))
        assert Emulated.reads == before
        assert scaler.get_scale() == 8.0
        scaler.update(torch.tensor(4.0, device="mps"))
        assert scaler.get_scale() == 4.0


def test_a_new_scale_beyond_the_bounds_is_said():
    """It is moved to the bound."""
    scaler = GradScaler("cpu", policy=DynamicScaling(max_scale=2.0**20))
    scaler.scale(torch.ones(()))
    with pytest.warns(UserWarning, match=r"new_scale=1e\+30 is beyond the bounds of the policy, and becomes 2\*\*20"):
        assert scaler.update(1e30).loss_scale_after == 2.0**20


def test_a_view_of_logits_does_not_keep_them():
    """A loss is kept until `update`, its base is not."""
    scaler, weight = GradScaler("cpu"), torch.ones(1, requires_grad=True)
    logits = weight * torch.ones(1000)
    storage = StorageWeakRef(logits.untyped_storage())
    scaler.scale(logits[0]).backward()
    del logits
    assert storage.expired()


def test_lazily_conjugated_gradients():
    """They are unscaled, and NaN in them is found."""
    param = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer, scaler = torch.optim.SGD([param], lr=1.0), GradScaler("cpu", init_scale=4.0)
    for value, expected in ((4j, 1 + 1j), (complex(math.nan), 1 + 1j)):
        scaler.scale(torch.ones(()))
        param.grad = torch.full((2,), value).to(torch.complex64).conj()
        scaler.step(optimizer)
        assert scaler.update().applied is (value == 4j)
        assert param.tolist() == [expected] * 2


class _Late(nn.Module):
    """Makes its statistics in the first forward pass."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x):
        now = x.detach().mean()
        self.mean = now if self.mean is None else self.mean.lerp(now, 0.1)
        return x * 1.0


def test_a_buffer_that_a_skipped_step_made_is_none_again():
    """It would be NaN, and spoil each later step."""
    model, param = _Late(), nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([param], lr=0.1), GradScaler("cpu", protect=model)
    for value in (math.nan, 1.0):
        optimizer.zero_grad()
        scaler.scale(model(param * value).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (model.mean is None) is math.isnan(value)


# -- who says applied --------------------------------------------------------------------------------------------------


def test_an_optimizer_that_steps_in_a_gradient_hook_is_told():
    """Its gradients are applied scaled, and `step` finds none."""
    param = nn.Parameter(torch.ones(1))
    inner, scaler = torch.optim.SGD([param], lr=1e-6), GradScaler("cpu")

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
    param = nn.Parameter(torch.ones(1))
    optimizer, scaler = guarded(torch.optim.SGD([param], lr=0.1)), GradScaler("cpu", enabled=False)
    for value in (1.0, math.nan, 1.0):
        param.grad = torch.full((1,), value)
        scaler.step(optimizer)
        info = scaler.update()
        assert bool(info.applied) is bool(info.applied_of(optimizer)) is (value == 1.0)
    assert scaler.metrics()["loss_scale"] == scaler.get_scale() == 1.0


class _Layer(nn.Module):
    def __init__(self, attach):
        super().__init__()
        self.linear, self.attach = nn.Linear(2, 2, bias=False), attach

    def forward(self, x):
        x = self.linear(x)
        return self.attach(x, self.linear.weight.sum())


def test_a_copy_of_a_layer_shares_the_scaler_of_its_attached_loss():
    """After skips the auxiliary gradients have the scale of the others."""
    scaler = GradScaler("cpu", init_scale=16.0)
    layer = copy.deepcopy(_Layer(scaler.attach))
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    for value in (INF, INF, 0.0):
        optimizer.zero_grad()
        scaler.scale(layer(torch.full((1, 2), value)).sum() * 0.0).backward()
        before = layer.linear.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4.0
    assert torch.equal(before - layer.linear.weight, torch.ones(2, 2))


def test_an_attached_loss_with_another_scaler_is_told():
    """As in a model that was loaded, or whose scaler was made anew."""
    old, new = GradScaler("cpu"), GradScaler("cpu")
    layer = _Layer(old.attach)
    with pytest.warns(UserWarning, match="an attached loss takes its loss scale from a scaler that has"):
        new.scale(layer(torch.ones(1, 2)).sum()).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.attach = new.attach
        new.scale(layer(torch.ones(1, 2)).sum()).backward()


# -- found by readers --------------------------------------------------------------------------------------------------


def _scaled(loop):
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.model(torch.ones(8, 4)).square().mean()).backward()


@FUSED
def test_a_loop_that_is_held_leaves_a_later_step_alone(fused):
    """Its end comes while another step is unscaled, which is not unscaled a second time."""
    moved = []
    for is_held in (False, True):
        loop = Loop(fused)
        if is_held:
            tries = loop.scaler.attempts(loop.model)
            for _ in tries:
                _scaled(loop)
                loop.scaler.step(loop.optimizer)
                loop.scaler.update()
                break
        else:
            loop.body()
        loop.model.load_state_dict(Loop().model.state_dict())
        _scaled(loop)
        loop.scaler.unscale_(loop.optimizer)
        tries = None
        loop.scaler.step(loop.optimizer)
        assert loop.scaler.update().applied
        moved.append(loop.model[0].weight.detach().clone())
    assert torch.equal(*moved)


@FUSED
def test_a_new_scale_waits_for_the_end_of_a_step(fused):
    """With `updates_per_step=2` both optimizers are divided by the scale of their loss."""
    params = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([each], lr=1.0, fused=fused) for each in params]
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1, updates_per_step=2)
    scaler.place_on("cpu")
    scaler.update(8.0)  # nothing has begun, so that it does not count
    for new_scale, after in ((None, 16.0), (64.0, 64.0)):
        for each in optimizers:
            each.zero_grad()
        before = [each.item() for each in params]
        scaler.scale(sum(params).sum()).backward()
        for optimizer, given in zip(optimizers, (new_scale, None), strict=True):
            scaler.step(optimizer)
            scaler.update(given)
        assert [was - now.item() for was, now in zip(before, params, strict=True)] == [1.0, 1.0]
        assert scaler.get_scale() == after


@pytest.mark.parametrize("how", ["break", "post hook"])
def test_a_loop_that_is_left_after_a_step_keeps_its_buffers(how):
    """The parameters have moved, and the statistics belong to them."""
    loop = Loop()
    if how == "post hook":
        loop.optimizer.register_step_post_hook(lambda *_: 1 / 0)
    before, weight = _buffers(loop.model), loop.model[0].weight.detach().clone()
    with contextlib.suppress(ZeroDivisionError):
        for _ in loop.scaler.attempts(loop.model):
            _scaled(loop)
            loop.scaler.step(loop.optimizer)
            break
    assert not torch.equal(weight, loop.model[0].weight)
    assert not _same(before, _buffers(loop.model))


def test_a_step_of_sam_that_is_made_ready_again():
    """Recipes set torch's stage back; what is unscaled again is not given up."""
    loop = Loop()
    _scaled(loop)
    loop.scaler.unscale_(loop.optimizer)
    _scaled(loop)
    loop.scaler._per_optimizer_states[id(loop.optimizer)]["stage"] = torch.amp.grad_scaler.OptState.READY
    loop.scaler.unscale_(loop.optimizer)
    loop.scaler.step(loop.optimizer)
    assert loop.scaler.update().applied


def test_the_first_batch_of_retries_is_left_out():
    """Before a loss was scaled."""
    loop = Loop()
    for attempt in loop.scaler.attempts(loop.model):  # noqa: B007  # used after the loop
        loop.scaler.skip(loop.optimizer)
        loop.scaler.update()
    assert (attempt.number, bool(attempt.info)) == (0, False)


def test_parameters_that_are_written_between_steps_are_not_told():
    """As by loading, or an average, while they are frozen."""
    loop = Loop()
    loop.model.requires_grad_(False)
    x = torch.ones(8, 4, requires_grad=True)
    for _ in range(3):
        loop.scaler.scale(loop.model(x).sum()).backward()
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()
        loop.model.load_state_dict(loop.model.state_dict())


def test_a_skip_under_a_dispatch_mode_leaves_the_state_on_the_host():
    """A counter of operations is not a recording that decides."""
    loop = Loop()
    loop.body()
    with FlopCounterMode(display=False):
        _scaled(loop)
        loop.scaler.skip(loop.optimizer)
        loop.scaler.update()
    assert loop.body().applied is True
    with FlopCounterMode(display=False):
        assert loop.body().applied is True


def test_retries_keep_no_model_alive():
    """Nor the scaler, also where a layer of the model holds it."""
    scaler = GradScaler("cpu")
    layer = _Layer(scaler.attach)
    for _ in scaler.attempts(layer, retries=0):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        scaler.scale(layer(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    refs = [weakref.ref(each) for each in (scaler, layer)]
    del scaler, layer, optimizer
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_a_guarded_step_that_was_interrupted_was_not_applied():
    """The outcome of the step before is not that of this one."""
    param = nn.Parameter(torch.ones(1))
    optimizer = guarded(torch.optim.SGD([param], lr=0.1))
    param.grad = torch.ones(1)
    optimizer.step()
    optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert optimizer.last_step.applied is False
