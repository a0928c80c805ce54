"""The observer of a scaler's updates that logs events and raises the errors of streaks."""

from typing import Any

from lossscale_core import BaseScaling, OnFloor, ScaleWatch
from lossscale_core.adapters import check_overflow_streak

_EVERY = 32  # checking the state on the host takes about as long as its update


class Watch:
    """An observer that checks a scaler's state when it is read anyway, or when reading does not wait for a device."""

    def __init__(self, on_floor: OnFloor) -> None:
        self._watch = ScaleWatch(on_floor)
        self._every = 1 if on_floor == "raise" else _EVERY
        self._left = self._every
        self._policy: Any = None
        self._limits_streaks = False

    def __call__(self, scaler: Any, info: Any) -> None:
        """Raise an error if a limit of policy, guard, counters or `on_floor` is reached; log events.

        An overflow that was counted before is not an error after an update that is known to count none.
        """
        state = scaler._state
        if state.policy is not self._policy:
            self._policy = state.policy
            self._limits_streaks = BaseScaling.of(state.policy).max_overflow_streak is not None
        if scaler._guards.guard is not None:
            scaler._guards.check()
        if scaler._nonfinite is not None:
            scaler._nonfinite.check(state.policy)
        self._left -= 1
        if self._left > 0 and not self._limits_streaks:
            return
        on_host = state.peek()
        if on_host is None:
            return
        if self._limits_streaks:
            check_overflow_streak(state.policy, on_host)
        if self._left <= 0:
            self._left = self._every
            (self._watch.log if info.overflowed is False else self._watch.check)(state.policy, on_host)

    def after_read(self, scaler: Any, raises: bool) -> None:
        """Check a state that was just read from its device; raise at the floor if `raises`."""
        if not raises:
            self._watch.log(scaler.policy, scaler._state.read())
        elif self._left <= 0:
            self._left = self._every
            self._watch.check(scaler.policy, scaler._state.read())
