"""Random loops around a scaler: after each step, parameters, state and outcome equal a model of the policy."""

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lossscale_core import DynamicScaling, FixedScaling, NoScaling, ScaleState, state_to_dict
from lossscale_torch import GradScaler
from lossscale_torch.hooks import Hook
from tests.adapters.emulated_device import Emulated
from tests.adapters.torch_steps import INF, one
from tests.sweeping import examples

MAX_NORM = 0.5
WAYS = {
    "scale": lambda scaler, loss: scaler.scale(loss),
    "get_scale": lambda scaler, loss: loss * scaler.get_scale(),
    "_scale": lambda scaler, loss: loss * scaler._scale,
    "attach": lambda scaler, loss: scaler.attach(torch.ones(1, requires_grad=True), loss).sum(),
}
CALLS = (
    *(("", "step"), ("", "step"), ("unscale_", "step"), ("unscale_and_clip_", "step"), ("joint", "step")),
    *(("", "skip"), ("unscale_", "skip"), ("unscale_", "")),
)
"""The first and the last call for an optimizer; "joint" is a clip of several optimizers at the beginning of a step."""
POLICIES = (
    DynamicScaling(init_scale=1024.0, growth_interval=1),
    DynamicScaling(init_scale=1024.0, growth_interval=3, growth_factor=1.7, hysteresis=2, cooldown=1),
    FixedScaling(8.0),
    NoScaling(),
)


class Turn(NamedTuple):
    """The part of one optimizer in a step."""

    number: int
    way: str
    calls: tuple[str, str]
    gradient: float | None
    is_vetoed: bool

    @property
    def is_checked(self) -> bool:
        """Whether the gradients count."""
        return self.gradient is not None and self.calls != ("", "skip")

    @property
    def overflows(self) -> bool:
        """Whether the gradients are an overflow."""
        return self.is_checked and not math.isfinite(self.gradient)


TURNS = st.builds(
    Turn,
    number=st.integers(0, 2),
    way=st.sampled_from([*WAYS]),
    calls=st.sampled_from(CALLS),
    gradient=st.sampled_from([1.0] * 6 + [INF, math.nan, None]),
    is_vetoed=st.sampled_from([False] * 5 + [True]),
).filter(lambda turn: (turn.calls, turn.gradient) != (("unscale_", ""), None))  # which does nothing
STEPS = st.tuples(
    st.lists(TURNS, min_size=1, max_size=3, unique_by=lambda turn: turn.number),
    st.sampled_from([None] * 8 + [16.0]),
    st.sampled_from([None] * 4 + ["scale", "load"]),
)
"""The turns in their order, a scale for `update`, and an event after the step."""


class _Veto(Hook):
    """Refuses the steps of optimizers with a mark."""

    def before_step(self, scaler, step):
        """Return the mark."""
        return step.optimizer.param_groups[0].get("is_vetoed", False)


class _Loop:
    """A loop with three optimizers and a model of its state."""

    def __init__(self, policy, device, kinds):
        self.policy, self.device, self.kinds = policy, device, kinds
        self.params, self.optimizers = zip(*(one(fused, device) for fused in kinds), strict=True)
        self.scaler: Any = GradScaler(device, policy=policy, hooks=[_Veto()])
        self.scaler.place_on(device)  # losses may be multiplied by hand
        self.expected: Any = policy.init_state()

    def run(self, turns, new_scale, event):
        """Take a step, and require the outcome of the model."""
        before, reads = [param.item() for param in self.params], Emulated.reads
        for turn in turns:
            self.optimizers[turn.number].zero_grad()
            self.optimizers[turn.number].param_groups[0]["is_vetoed"] = turn.is_vetoed
        for turn in turns:
            self._backward(turn)
        if joint := [self.optimizers[turn.number] for turn in turns if turn.calls[0] == "joint"]:
            self.scaler.unscale_and_clip_(joint, MAX_NORM)
        for turn in turns:
            self._call_first(turn)
            if turn.calls[1]:
                getattr(self.scaler, turn.calls[1])(self.optimizers[turn.number])
        info = self.scaler.update(new_scale)
        reads = Emulated.reads - reads
        moves = [was - now.item() for was, now in zip(before, self.params, strict=True)]
        self._require(turns, new_scale, info, moves)
        # On a device, only the step of an ordinary optimizer makes the host wait.
        is_plain = any(not self.kinds[turn.number] and turn.calls[1] == "step" for turn in turns)
        assert reads == 0 or is_plain
        self._come_between(event)

    def _backward(self, turn):
        if turn.gradient is None:
            return
        param = self.params[turn.number]
        if self.device == "cpu":
            WAYS[turn.way](self.scaler, (param * turn.gradient).sum()).backward()
        else:
            param.grad = self.scaler.scale(torch.full((1,), turn.gradient, device=self.device))

    def _call_first(self, turn):
        if turn.calls[0] == "unscale_":
            self.scaler.unscale_(self.optimizers[turn.number])
        elif turn.calls[0] == "unscale_and_clip_":
            self.scaler.unscale_and_clip_(self.optimizers[turn.number], MAX_NORM)

    def _require(self, turns, new_scale, info, moves):
        joint = [turn for turn in turns if turn.calls[0] == "joint" and turn.is_checked]
        applied, expected = {}, [0.0] * len(moves)
        for turn in turns:
            together = joint if turn in joint else [turn]
            is_skipped = turn.is_vetoed or any(other.overflows for other in together)
            applied[turn.number] = turn.calls[1] == "step" and not is_skipped
            if applied[turn.number] and turn.gradient is not None:
                is_clipped = turn.calls[0] in ("joint", "unscale_and_clip_")
                expected[turn.number] = MAX_NORM / len(together) ** 0.5 if is_clipped else 1.0
        assert moves == pytest.approx(expected, rel=1e-5)
        assert {number: bool(info.applied_of(self.optimizers[number])) for number in applied} == applied
        is_checked, overflowed = any(turn.is_checked for turn in turns), any(turn.overflows for turn in turns)
        is_vetoed = any(turn.is_vetoed and turn.calls[1] == "step" for turn in turns) and not overflowed
        before = self.expected
        if new_scale is not None:
            self.expected = before._replace(loss_scale=np.float32(new_scale))
        elif is_checked and not is_vetoed:
            self.expected = self.policy.update(before, not overflowed)
        scales, streak = (before.loss_scale, self.expected.loss_scale), self.expected.overflow_streak
        assert [float(value) for value in info[:6]] == [all(applied.values()), *scales, streak, overflowed, False]
        assert ("found no gradient" in self.scaler.diagnose()) is (not is_checked and any(applied.values()))
        state = self.scaler.state_dict()
        assert {name: state[name] for name in self.expected._fields} == self.expected._asdict()
        numbers = self.scaler.metrics()
        assert all(float(numbers[name]) == getattr(self.expected, name) for name in ScaleState._fields)

    def _come_between(self, event):
        if event == "scale":
            self.scaler.update(32.0)
            self.expected = self.expected._replace(loss_scale=np.float32(32.0))
        elif event == "load":
            self.expected = self.policy.init_state()
            self.scaler.load_state_dict(state_to_dict(self.expected, self.policy))


@examples(100)
@given(
    st.sampled_from(POLICIES), st.sampled_from(["cpu", "mps"]), st.lists(st.booleans(), min_size=3, max_size=3),
    st.lists(STEPS, max_size=8),
)  # fmt: skip
def test_random_loops(policy, device, kinds, steps):
    """An optimizer moves by its gradient or not at all, while state and outcome follow the policy, bit for bit."""
    with Emulated("mps"):
        loop = _Loop(policy, device, kinds)
        for step in steps:
            loop.run(*step)
