"""The outcome of steps on the host, and those of finite steps before they are taken."""

from typing import Any

from torch import Tensor

import lossscale_core
from lossscale_core import ScalingPolicy
from lossscale_torch._step_info import StepInfo


class Lookahead:
    """The states after the next finite steps, computed several at a time.

    A policy is pure, so that it does not matter when its update runs; and the arithmetic of NumPy's scalars takes a
    third of the time where it runs many times in a row, instead of once between the kernels of a training step.
    """

    def __init__(self, policy: ScalingPolicy) -> None:
        self._policy = policy
        # A policy of a user's own may be changed between two steps, or raise at one.
        self._most = 64 if type(policy).__module__ == lossscale_core.__name__ else 1
        self._state: Any = None  # the state that `_next` goes on from
        self._next: list[tuple[Any, StepInfo]] = []  # the nearest one last
        self._count = 1

    def after_finite(self, state: Any) -> tuple[Any, StepInfo]:
        """Return the state after a finite step, and what happened."""
        if state is not self._state:
            self._next, self._count = [], 1  # what was computed is thrown away, so begin with little
        if not self._next:
            self._next = self._steps_from(state)
            self._count = min(2 * self._count, self._most)
        step = self._next[-1]
        self._state = step[0]
        self._next.pop()  # last, so that an interrupt before it begins anew
        return step

    def _steps_from(self, state: Any) -> list[tuple[Any, StepInfo]]:
        steps = []
        for _ in range(self._count):
            before, state = state, self._policy.update(state, True)
            steps.append((state, info_of(before, state, finite=True)))
        steps.reverse()
        return steps


def info_of(before: Any, after: Any, finite: bool) -> StepInfo:
    """Return what a step did, from the states before and after it, host scalars."""
    scale = _number(before.loss_scale)
    is_same = after.loss_scale is before.loss_scale
    return StepInfo(
        finite, scale, scale if is_same else _number(after.loss_scale), _number(after.overflow_streak), not finite
    )


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def plain(value: Any) -> Any:
    """Return a host scalar as the plain Python number it is; a tensor stays on its device."""
    return value if isinstance(value, Tensor) else _number(value)
