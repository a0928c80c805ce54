"""Random loops around a scaler: whatever is called in whatever order, each step is the one that a model expects."""

import copy
import math
import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lossscale_core import DynamicScaling, FixedScaling, NoScaling, state_to_dict
from lossscale_core.errors import CallOrderError
from lossscale_torch import GradScaler
from lossscale_torch.hooks import Hook
from tests.adapters.emulated_device import Emulated
from tests.adapters.recorded_graph import RecordedGraph
from tests.adapters.torch_steps import INF, one
from tests.sweeping import IS_SWEEP

MAX_NORM = 0.5
WAYS = {
    "scale": lambda scaler, loss: scaler.scale(loss),
    "get_scale": lambda scaler, loss: loss * scaler.get_scale(),
    "_scale": lambda scaler, loss: loss * scaler._scale,
    "attach": lambda scaler, loss: scaler.attach(torch.ones(1, requires_grad=True), loss).sum(),
}
CALLS = ("step", "step", "unscale_", "clip", "joint clip", "skip", "unscale_ and skip", "unscale_ alone")
EARLY = ("step", "unscale_", "clip", "joint clip")
"""Calls that may come before there are gradients: they find nothing, and the step checks those that come."""
POLICIES = (
    DynamicScaling(init_scale=1024.0, growth_interval=1),
    DynamicScaling(init_scale=1024.0, growth_interval=3, growth_factor=1.7, hysteresis=2, cooldown=1),
    FixedScaling(8.0),
    NoScaling(),
)
EVENTS = ("interval", "factor", "scale", "load", "copy", "pickle")


class Turn(NamedTuple):
    """What a step does with one optimizer."""

    number: int
    way: str
    call: str
    gradient: float | None
    is_early: bool
    is_vetoed: bool
    has_another_loss: bool
    """Whether a loss of something else is scaled before the optimizer is stepped."""

    @property
    def is_checked(self) -> bool:
        """Whether its gradients count."""
        return self.gradient is not None and self.call != "skip"

    @property
    def steps(self) -> bool:
        """Whether `step` is called."""
        return not self.call.endswith(("skip", "alone"))


def _overflows(turn):
    return turn.is_checked and not math.isfinite(turn.gradient)


class Step(NamedTuple):
    """What a step does: the turns in their order, a scale for `update`, and what comes after it."""

    turns: list[Turn]
    new_scale: float | None
    event: str | None


def _turns():
    gradients = st.sampled_from([1.0] * 6 + [INF, math.nan, None])
    rarely = st.sampled_from([False] * 5 + [True])
    numbers, ways = st.integers(0, 2), st.sampled_from([*WAYS])
    early = st.builds(Turn, numbers, ways, st.sampled_from(EARLY), gradients, st.just(True), rarely, rarely)
    turns = st.builds(Turn, numbers, ways, st.sampled_from(CALLS), gradients, st.just(False), rarely, rarely)
    turns = turns.filter(lambda turn: turn.gradient is not None or turn.call != "unscale_ alone")  # which does nothing
    return st.lists(turns | turns | early, min_size=1, max_size=3, unique_by=lambda turn: turn.number)


STEPS = st.builds(
    Step, _turns(), st.sampled_from([None] * 8 + [16.0]), st.sampled_from([None] * 2 * len(EVENTS) + [*EVENTS])
)


class _Veto(Hook):
    """Refuses the steps of optimizers that are marked."""

    def before_step(self, scaler, step):
        """Return the mark."""
        return step.optimizer.param_groups[0].get("is_vetoed", False)


class _Loop:
    """A loop with three optimizers; they share each loss, or have each their own."""

    def __init__(self, policy, device, kinds):
        self.policy, self.device, self.kinds = policy, device, kinds
        self.params, self.optimizers = zip(*(one(fused, device) for fused in kinds), strict=True)
        self.scaler: Any = GradScaler(device, policy=policy, hooks=[_Veto()])
        self.scaler.place_on(device)  # losses may be multiplied by hand
        self.expected: Any = policy.init_state()
        self.was_plain = False

    def run(self, step):
        """Take a step, and require what it should do."""
        self._prepare(step)
        before, reads = [param.item() for param in self.params], Emulated.reads
        clipped = [each for each in step.turns if each.call == "joint clip"]
        if clipped:
            self.scaler.unscale_and_clip_([self.optimizers[each.number] for each in clipped], MAX_NORM)
        for each in step.turns:
            if each.is_early:
                self._call(each)
                self._backward(each)
        for each in step.turns:
            if not each.is_early:
                self._call(each)
            if each.has_another_loss:
                self.scaler.scale(torch.ones((), device=self.device))
            if each.steps:
                self.scaler.step(self.optimizers[each.number])
            elif each.call.endswith("skip"):
                self.scaler.skip(self.optimizers[each.number])
        calls = len(Emulated.calls)
        info = self.scaler.update(step.new_scale)
        calls, reads = len(Emulated.calls) - calls, Emulated.reads - reads
        self._require(step, info, [was - now.item() for was, now in zip(before, self.params, strict=True)])
        self._require_few_reads(step, info, reads, calls)
        self._come_between(step.event)

    def _prepare(self, step):
        for each in step.turns:
            self.optimizers[each.number].zero_grad()
            self.optimizers[each.number].param_groups[0]["is_vetoed"] = each.is_vetoed
        for each in step.turns:
            if not each.is_early:
                self._backward(each)

    def _backward(self, turn):
        if turn.gradient is None:
            return
        param = self.params[turn.number]
        if self.device == "cpu":
            WAYS[turn.way](self.scaler, (param * turn.gradient).sum()).backward()
        else:
            param.grad = self.scaler.scale(torch.full((1,), turn.gradient, device=self.device))

    def _call(self, turn):
        if turn.call.startswith("unscale_"):
            self.scaler.unscale_(self.optimizers[turn.number])
        elif turn.call == "clip":
            self.scaler.unscale_and_clip_(self.optimizers[turn.number], MAX_NORM)

    def _require(self, step, info, moves):
        turns, before = step.turns, self.expected
        joint = [each for each in turns if each.call == "joint clip" and each.is_checked and not each.is_early]
        applied, expected = {}, [0.0] * len(moves)
        for each in turns:
            together = joint if each in joint else [each]
            applied[each.number] = each.steps and not any(map(_overflows, together)) and not each.is_vetoed
            if applied[each.number] and each.gradient is not None:
                is_clipped = each.call.endswith("clip") and not each.is_early
                expected[each.number] = MAX_NORM / len(together) ** 0.5 if is_clipped else 1.0
        assert moves == pytest.approx(expected, rel=1e-5)
        is_checked, overflowed = any(each.is_checked for each in turns), any(map(_overflows, turns))
        is_vetoed = any(each.is_vetoed and each.steps for each in turns) and not overflowed
        if step.new_scale is not None:
            self.expected = before._replace(loss_scale=np.float32(step.new_scale))
        elif is_checked and not is_vetoed:
            self.expected = self.policy.update(before, not overflowed)
        assert {number: bool(info.applied_of(self.optimizers[number])) for number in applied} == applied
        scales, streak = (before.loss_scale, self.expected.loss_scale), self.expected.overflow_streak
        assert [float(value) for value in info[:6]] == [all(applied.values()), *scales, streak, overflowed, False]
        has_none = not is_checked and any(applied.values())
        assert ("found no gradient" in self.scaler.diagnose()) is has_none
        saved = self.scaler.state_dict()
        assert {name: saved[name] for name in self.expected._fields} == self.expected._asdict()

    def _require_few_reads(self, step, info, reads, calls):
        """Require that only an ordinary optimizer waits, and that such steps leave the state on the host."""
        waits = any(not self.kinds[each.number] and (each.steps or "clip" in each.call) for each in step.turns)
        assert waits or reads == 0
        is_plain = not any(self.kinds) and all(each.steps and each.gradient == 1.0 for each in step.turns)
        if is_plain and self.was_plain and step.new_scale is None:
            assert type(info.applied) is bool
            assert calls == 0 or info.loss_scale_used != info.loss_scale_after
        self.was_plain = is_plain and step.event is None

    def _come_between(self, event):
        scaler = self.scaler
        if event in ("interval", "factor") and isinstance(self.policy, DynamicScaling):
            if event == "interval":
                scaler.set_growth_interval(self.policy.growth_interval + 1)  # a lower one moves the count on a device
            else:
                scaler.set_growth_factor(1.0 + self.policy.growth_factor / 2)
            self.policy = scaler.policy
        elif event == "scale":
            scaler.update(32.0)
            self.expected = self.expected._replace(loss_scale=np.float32(32.0))
        elif event == "load":
            self.expected = self.policy.init_state()
            scaler.load_state_dict(state_to_dict(self.expected, self.policy))
        elif event in ("copy", "pickle") and self.device == "cpu":
            self.scaler = copy.deepcopy(scaler) if event == "copy" else pickle.loads(pickle.dumps(scaler))
            self.scaler.place_on(self.device)


@settings(max_examples=2000 if IS_SWEEP else 150, deadline=None)
@given(
    st.sampled_from(POLICIES), st.sampled_from(["cpu", "mps"]), st.lists(st.booleans(), min_size=3, max_size=3),
    st.lists(STEPS, max_size=8),
)  # fmt: skip
def test_random_loops(policy, device, kinds, steps):
    """Each optimizer moves by its gradient or not at all, and state and outcome are the policy's, bit for bit.

    On a device only an ordinary optimizer that is stepped or clipped makes the host wait.
    """
    with Emulated("mps"):
        loop = _Loop(policy, device, kinds)
        for step in steps:
            loop.run(step)


def test_an_outcome_is_asked_for_an_optimizer_of_its_step():
    """Another one is an error; a copy of the fields knows of no optimizer, and answers for the step."""
    (param, optimizer), scaler = one(), GradScaler("cpu")
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    info = scaler.update()
    assert info.applied_of(optimizer) is info._replace(overflow_streak=5).applied_of(optimizer) is True
    with pytest.raises(CallOrderError, match=r"SGD that took no part .* pass the object that was passed to"):
        info.applied_of(one()[1])


def test_a_read_that_is_refused_decides_nothing():
    """A second `step` reads the flag again; the overflow is not applied."""
    (param, optimizer), scaler = one(), GradScaler("cpu", init_scale=1024.0)
    scaler.scale(param.sum() * INF).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"), RecordedGraph():
        scaler.step(optimizer)
    scaler.step(optimizer)
    assert (scaler.update().applied, param.item(), scaler.get_scale()) == (False, 1.0, 512.0)
