"""A step is a transaction: it has one beginning, one decision and one end, on each way out of it."""

import contextlib
import gc
import itertools
import math
import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import nn

import lossscale_torch
from lossscale_core import DynamicScaling, FixedScaling, NoScaling
from lossscale_core.errors import CallOrderError, OverflowStreakError, RetriesExhaustedError
from lossscale_torch import GradScaler, guarded
from lossscale_torch.hooks import Hook
from tests.adapters.torch_steps import EITHER_KIND, INF, Loop, Veto, one, take_step
from tests.sweeping import examples

SOURCE = lossscale_torch.__path__[0]
MIN_SCALE, GROWTH_INTERVAL, MAX_STREAK = 2.0**7, 3, 4
LIMITS = {"min_scale": MIN_SCALE, "growth_interval": GROWTH_INTERVAL, "max_overflow_streak": MAX_STREAK}
POLICIES = {
    "dynamic": DynamicScaling(init_scale=2.0**10, **LIMITS),
    "fixed": FixedScaling(2.0**10),
    "none": NoScaling(),
}
OUTCOMES = ["good", "good", "overflow", "bad loss"]
POINTS = ["loss", "backward", "unscale", "idle", "step", "after the optimizer", "update", "after_update"]
"""The points at which the body of a loop over tries may end. At the first four, the optimizer has not stepped."""


# -- each way out of a step --------------------------------------------------------------------------------------------


class _Counting(nn.Module):
    """A layer that adds its inputs to a buffer in place, and puts the number of its calls in the place of another."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.total += x.sum()
            self.calls = self.calls + 1.0
        return x


class _FaultError(Exception):
    """An error of the program."""


class _Faults(Hook):
    """A hook that raises at a point of a step, or that vetoes the step."""

    point = None

    def reach(self, point):
        if self.point == point:
            raise _FaultError

    def before_step(self, scaler, step):
        self.reach("before_step")
        return self.point == "veto"

    def after_step(self, scaler, step):
        self.reach("after_step")

    def after_update(self, scaler, info):
        self.reach("after_update")


class _Steps(RuleBasedStateMachine):
    """Steps of a program with one weight and two buffers, and a model of its numbers.

    All numbers are exact in float32. `weight`, `buffers`, `scale`, `finite` and `streak` belong to the model.
    """

    @initialize(
        fused=st.booleans(),
        place=st.sampled_from(["", "model", "part", "around"]),
        policy=st.sampled_from(["dynamic", *POLICIES]),
    )
    def begin(self, fused, place, policy):
        torch.manual_seed(0)
        self.module = nn.Sequential(_Counting(), nn.Linear(1, 1, bias=False))
        self.parameter, self.faults, self.notes = nn.init.ones_(self.module[1].weight), _Faults(), Veto()
        self.optimizer, (_, self.idle) = torch.optim.SGD([self.parameter], lr=0.125, fused=fused), one(fused)
        self.optimizer.register_step_pre_hook(lambda *_: self.faults.reach("optimizer"))
        self.optimizer.register_step_post_hook(lambda *_: self.faults.reach("after the optimizer"))
        places = {"model": self.module, "part": [self.module[0]], "around": nn.ModuleList([self.module])}
        self.protect, hooks = places.get(place, ()), [self.faults, self.notes]  # `protect` keeps the list alive
        self.scaler = GradScaler("cpu", policy=POLICIES[policy], hooks=hooks, protect=self.protect)
        self.fused, self.protects, self.adapts = fused, place != "", policy == "dynamic"
        self.weight, self.buffers, self.finite, self.streak = 1.0, np.zeros(2), 0, 0
        self.scale = 1.0 if policy == "none" else 2.0**10
        self.loop, self.is_in_loop = None, False
        self.begin_step()

    def teardown(self):
        vars(self).clear()  # torch aborts at the exit of Python if an iterator still holds its parameters

    def begin_step(self):
        self.optimizer.zero_grad()
        self.stage, self.grad, self.copy = "ready", None, None
        self.is_applied = self.is_vetoed = self.is_checked = False

    @invariant()
    def is_like_the_model(self):
        assert self.parameter.item() == self.weight
        assert [buffer.item() for buffer in self.module.buffers()] == [*self.buffers]
        assert self.scaler.get_scale() == self.scale
        assert not {"grad_scale", "found_inf"} & vars(self.optimizer).keys()

    def count_forward(self, x):
        self.copy = self.buffers if self.copy is None else self.copy
        self.buffers = self.buffers + np.array([x, 1.0])

    def count_step(self, is_finite):
        self.finite, self.streak = (self.finite + 1, 0) if is_finite else (0, self.streak + 1)
        grows = self.finite == GROWTH_INTERVAL
        self.finite = 0 if grows else self.finite
        if self.adapts:
            self.scale = self.scale * (2.0 if grows else 1.0) if is_finite else max(self.scale / 2.0, MIN_SCALE)

    # Between the calls of a step.

    @rule(action=st.sampled_from(["forward", "evaluate", "load", "load a part", "write"]))
    def act(self, action):
        module = self.module[0] if action == "load a part" else self.module
        if action in ("forward", "evaluate"):
            module.train(action == "forward")(torch.ones(1, 1))
            module.train()
        if action in ("evaluate", "write"):
            torch._foreach_add_([*module.buffers()], 1.0)
        elif action != "forward":
            names = {name for name, _ in module.named_buffers()}
            module.load_state_dict({name: value + (name in names) for name, value in module.state_dict().items()})
            self.copy = None
        if action == "forward":
            self.count_forward(1.0)
        else:
            self.buffers = self.buffers + 1.0

    # The calls of a step.

    def run_backward(self, outcome, x=1.0):
        inputs = torch.full((1, 1), INF if outcome == "bad loss" else x)
        self.scaler.scale(self.module(inputs).sum()).backward()
        if outcome == "overflow":
            self.parameter.grad.fill_(INF)

    @precondition(lambda self: self.stage == "ready")
    @rule(outcome=st.sampled_from(OUTCOMES), x=st.sampled_from([1.0, 2.0, 3.0]))
    def backward(self, outcome, x):
        self.run_backward(outcome, x)
        self.count_forward(INF if outcome == "bad loss" else x)
        self.grad = (self.grad or 0.0) + (x if outcome == "good" else INF)

    @precondition(lambda self: self.stage == "ready" and self.grad is not None)
    @rule(clips=st.booleans())
    def unscale(self, clips):
        if clips:
            assert self.scaler.unscale_and_clip_(self.optimizer, INF).item() == self.grad
        else:
            self.scaler.unscale_(self.optimizer)
        self.stage, self.is_checked = "unscaled", True

    @precondition(lambda self: self.stage != "stepped" and self.grad is not None)
    @rule(
        point=st.sampled_from(["", "", "", "veto", "before_step", "after_step", "optimizer"]), steps_idle=st.booleans()
    )
    def step(self, point, steps_idle):
        is_finite = math.isfinite(self.grad)
        if steps_idle:
            self.scaler.step(self.idle)
        self.faults.point = point
        with contextlib.suppress(_FaultError):
            self.scaler.step(self.optimizer)
        self.is_applied, self.is_vetoed = is_finite and point in ("", "after_step"), point == "veto"
        self.weight -= 0.125 * self.grad if self.is_applied else 0.0
        self.stage, self.is_checked = "stepped", True

    @precondition(lambda self: self.stage != "stepped")
    @rule()
    def skip(self):
        self.scaler.skip(self.optimizer)
        self.stage = "stepped"

    @precondition(lambda self: self.stage != "ready")
    @rule(fails=st.booleans())
    def update(self, fails):
        is_finite = self.is_checked and math.isfinite(self.grad)
        if self.is_checked and not (self.is_vetoed and is_finite):
            self.count_step(is_finite)
        # A skipped step restores protected buffers to their values before the first forward pass in training mode
        # since the last update, or since a state was loaded.
        if not self.is_applied and self.protects and self.copy is not None:
            self.buffers = self.copy
        is_limit = self.adapts and self.streak >= MAX_STREAK and not self.is_applied and not self.is_in_loop
        error = _FaultError if fails else OverflowStreakError if is_limit else None
        self.faults.point = "after_update" if fails else ""
        with pytest.raises(error) if error else contextlib.nullcontext():
            self.scaler.update()
        assert bool(self.scaler.last_step.applied) == self.is_applied
        # An error of a hook or an optimizer does not prevent the end of the step: the other hooks see its outcome.
        assert self.notes.calls[-1] == ("veto", "update", self.is_applied)
        self.is_in_loop = False
        self.begin_step()

    # Loops over tries.

    def run_body(self, outcome, point, steps_idle):
        """Take a step, but return or raise at a point."""
        self.faults.point = point
        self.optimizer.zero_grad()
        if point == "loss":
            self.scaler.scale(self.module(torch.ones(1, 1)))
            return
        if outcome != "skip":
            self.run_backward(outcome)
        if point == "unscale":
            self.scaler.unscale_(self.optimizer)
        if steps_idle or point == "idle":
            self.scaler.step(self.idle)
        if point not in POINTS[:4]:
            (self.scaler.skip if outcome == "skip" else self.scaler.step)(self.optimizer)
        if point not in POINTS[:6]:
            self.scaler.update()

    @precondition(lambda self: self.stage == "ready" and self.grad is None and self.copy is None)
    @rule(
        overflows=st.sampled_from(range(6)), last=st.sampled_from([*OUTCOMES, "skip"]), steps_idle=st.booleans(),
        retries=st.sampled_from(range(5)), raises=st.booleans(), leaves_at=st.integers(0, 4), ends=st.booleans(),
        point=st.sampled_from(POINTS),
    )  # fmt: skip
    def retry(self, overflows, last, retries, raises, steps_idle, leaves_at, point, ends):
        """Take a step in a loop, of which one try stops at a point, and ends there or leaves the loop."""
        outcomes = [*["overflow"] * overflows, *[last] * 5]
        has_update, first, scales = point in POINTS[6:], None, []
        for number, outcome in enumerate(outcomes[: retries + 1]):
            leaves, is_repeated = number == leaves_at, outcome == "overflow" and self.adapts
            if not leaves or has_update:
                scales.append(self.scale)
                is_repeated = is_repeated and self.scale > MIN_SCALE
                if outcome != "skip":
                    self.count_step(outcome == "good")
            if leaves or not is_repeated:
                break
            first = first or (self.scale, self.finite, self.streak)
        is_applied = outcome == "good" and (not leaves or point not in POINTS[:4])
        may_be_applied = self.fused and leaves and outcome != "skip" and point in POINTS[4:6]
        exhausts = not leaves and outcome == "overflow" and self.adapts
        self.is_in_loop = False
        self.weight -= 0.125 if is_applied else 0.0
        # A loop that the program leaves before an optimizer was applied restores the buffers, and drops the step.
        if is_applied or may_be_applied:
            self.count_forward(INF if outcome == "bad loss" else 1.0)
        # A step that overflows in all its tries counts as one overflow.
        if first and (exhausts or (leaves and (outcome == "overflow" or not has_update))):
            self.scale, self.finite, self.streak = first
        error = RetriesExhaustedError if exhausts and raises else None
        if not leaves and self.adapts and self.streak >= MAX_STREAK:
            error = OverflowStreakError
        elif leaves and ends and not has_update:
            error = CallOrderError

        loop, numbers = self.scaler.attempts(self.module, retries=retries, raise_at_end=raises), []
        with (
            warnings.catch_warnings(record=True) as caught,
            pytest.raises(error) if error else contextlib.suppress(_FaultError),
        ):
            warnings.simplefilter("always")
            for attempt in loop:
                numbers.append(torch.rand(()).item())
                leaves_now = attempt.number == leaves_at
                with contextlib.suppress(_FaultError) if ends else contextlib.nullcontext():
                    self.run_body(outcomes[attempt.number], point if leaves_now else "", steps_idle)
                if leaves_now and (has_update or not ends):
                    break
        del loop
        assert (attempt.number, attempt.scales) == (number, scales)
        assert bool(attempt.info) == (is_applied and (not leaves or has_update))
        assert [warning.filename for warning in caught] == [__file__] * (exhausts and not error)
        assert all(f"overflowed in {len(scales)} tries, at the" in str(warning.message) for warning in caught)
        assert len({*numbers}) == 1
        assert torch.rand(()).item() not in numbers
        self.begin_step()

    @precondition(lambda self: self.stage == "ready" and self.grad is None and not self.is_in_loop)
    @rule(outcome=st.sampled_from(OUTCOMES))
    def hold_loop(self, outcome):
        """Leave a loop after its first try, but keep its iterator."""
        self.loop = self.scaler.attempts(self.module)
        next(self.loop)
        self.is_in_loop = True
        self.backward(outcome, 1.0)
        self.step("", False)
        self.update(False)
        self.is_in_loop = True

    @precondition(lambda self: self.loop and (self.stage != "ready" or not self.is_in_loop))
    @rule()
    def drop_loop(self):
        """Delete the iterator of a loop that the program left before this step, which changes nothing."""
        self.loop, self.is_in_loop = None, False


def test_steps_agree_with_a_model():
    """After each call, the weight, the buffers and the loss scale are the numbers of the model."""
    run_state_machine_as_test(_Steps, settings=settings(examples(200), stateful_step_count=30))


# -- interruptions -----------------------------------------------------------------------------------------------------


def _is_interrupted(call, line):
    """Call a function; return whether Ctrl-C came at a line of this package. Lines are counted as they run."""
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


def _interruptions(make, call, stride, min_lines):
    """Make new objects and interrupt a call with them, at each line in turn; yield the line and the objects."""
    for line in itertools.count(stride, stride):
        objects = make()
        if not _is_interrupted(lambda: call(*objects), line):  # noqa: B023  # called at once
            break
        yield line, *objects
    assert line > min_lines


def _retry(loop):
    loop.retry(bad_tries=1)


def _step_twice(loop):
    loop.step(is_bad=True)
    loop.step()


@EITHER_KIND
@pytest.mark.parametrize("program", [_retry, _step_twice])
def test_the_next_steps_after_an_interruption(program, fused):
    """After an interruption at any line, a loop trains on, also with another scaler."""

    def make():
        loop = Loop(fused, protects=True)
        loop.step()
        return (loop,)

    # Each line takes seconds. The strides meet different lines in different calls.
    for line, loop in _interruptions(make, program, stride=7, min_lines=100):
        if program is _step_twice and line % 2:
            loop.scaler = GradScaler("cpu", init_scale=2.0)
            loop.scaler.load_state_dict(loop.scaler.state_dict())  # so that it accepts an optimizer that has stepped
        elif program is _step_twice:
            # Without tries, an interruption between `step` and `update` may cause an error of torch in the next step.
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
        assert all(buffer.isfinite().all() for buffer in loop.model.buffers())


@EITHER_KIND
def test_an_interrupted_first_loss(fused):
    """After an interruption of its first `scale`, the scaler has the scale and the count of a new scaler."""

    def make():
        return GradScaler("cpu", init_scale=8.0, growth_interval=2), one(fused)[1]

    def scale(scaler, optimizer):
        scaler.scale(torch.ones(()))

    for _, scaler, optimizer in _interruptions(make, scale, stride=1, min_lines=10):
        assert [take_step(scaler, optimizer, 1.0)[:3] for _ in range(2)] == [(True, 8.0, 8.0), (True, 8.0, 16.0)]


@EITHER_KIND
def test_an_interrupted_step_of_guarded_optimizers(fused):
    """After an interruption at any line, a guarded optimizer takes its next step."""

    def make():
        param, optimizer = one(fused, lr=0.5)
        param.grad = torch.ones(1)
        return param, guarded(optimizer, max_norm=10.0)

    for line, param, optimizer in _interruptions(make, lambda _, optimizer: optimizer.step(), stride=3, min_lines=50):
        before = param.item()
        optimizer.step()
        assert (bool(optimizer.last_step), before - param.item()) == (True, 0.5), line
    optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert not optimizer.last_step


# -- other cases -------------------------------------------------------------------------------------------------------


def test_steps_in_gradient_hooks_warn():
    """`update` warns if an optimizer has stepped in a gradient hook, where its gradients are still scaled."""
    (param, inner), scaler = one(lr=1e-6), GradScaler("cpu")

    def step_now(p):
        inner.step()
        p.grad = None

    param.register_post_accumulate_grad_hook(step_now)
    scaler.scale(param.sum()).backward()
    scaler.step(inner)
    with pytest.warns(UserWarning, match="an optimizer that steps in such a hook applies scaled gradients"):
        scaler.update()
