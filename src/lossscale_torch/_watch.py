"""The observer of a scaler's updates that logs events and raises the errors of streaks."""

from typing import Any

from lossscale_core import BaseScaling, ScaleWatch
from lossscale_core.adapters import check_overflow_streak

_EVERY = 32  # checking the state on the host takes about as long as its update


class Watch:
    """An observer that checks a scaler's state when it is read anyway, or when reading does not wait for a device."""

    def __init__(self) -> None:
        self._watch = ScaleWatch()
        self._left = _EVERY
        self._policy: Any = None
        self._limits_streaks = False

    def __call__(self, scaler: Any, info: Any) -> None:
        """Raise an error if a limit of policy or guard is reached; log events."""
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
            self._left = _EVERY
            self._watch.log(state.policy, on_host)

    def after_read(self, scaler: Any) -> None:
        """Log the events of a state that was just read from its device."""
        self._watch.log(scaler.policy, scaler._state.read())
