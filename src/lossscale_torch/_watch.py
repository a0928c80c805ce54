"""A scaler's log, and the errors of streaks: an observer of its updates."""

from typing import Any

from lossscale_core import BaseScaling, OnFloor, ScaleWatch, check_overflow_streak

_EVERY = 32  # a look at the state on the host takes about as long as its update


class Watch:
    """Looks at a scaler's state now and then, where it is read anyway or reading it waits for no device."""

    def __init__(self, on_floor: OnFloor) -> None:
        self._watch = ScaleWatch(on_floor)
        self._every = 1 if on_floor == "raise" else _EVERY
        self._left = self._every
        self._policy: Any = None
        self._limits_streaks = False

    def __call__(self, scaler: Any, info: Any) -> None:
        """Raise where steps in a row were skipped as often as policy, guard or `on_floor` allow; log what is due.

        An overflow that was counted before is not an error after an update that is known to count none.
        """
        state = scaler._state
        if state.policy is not self._policy:
            self._policy = state.policy
            self._limits_streaks = BaseScaling.of(state.policy).max_overflow_streak is not None
        if scaler._guards.guard is not None:
            scaler._guards.check()
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
        """Look at a state that its device was waited for just now; raise at the floor where `raises`."""
        if not raises:
            self._watch.log(scaler.policy, scaler._state.read())
        elif self._left <= 0:
            self._left = self._every
            self._watch.check(scaler.policy, scaler._state.read())
