"""When a scaler logs by itself: now and then, where its state is read anyway or reading it waits for no device."""

from typing import Any

from lossscale_core import OnFloor, ScaleWatch, ScalingPolicy
from lossscale_torch._state import ScalerState

_EVERY = 32  # a look at the state on the host takes about as long as its update


class Voice:
    """A scaler's `ScaleWatch`, and the number of updates until it looks at the state again."""

    def __init__(self, on_floor: OnFloor) -> None:
        self._watch = ScaleWatch(on_floor)
        self._every = 1 if on_floor == "raise" else _EVERY
        self._left = self._every

    def updated(self, state: ScalerState, overflowed: Any) -> None:
        """Note an update, and look at the state if it is time to and no device is waited for.

        An overflow that was counted before is not an error after an update that is known to count none.
        """
        self._left -= 1
        if self._left <= 0 and (on_host := state.peek()) is not None:
            self._left = self._every
            (self._watch.log if overflowed is False else self._watch.check)(state.policy, on_host)

    def waited(self, state: ScalerState) -> None:
        """Look at the state if it is time to, since its device was waited for just now."""
        if self._left <= 0:
            self._left = self._every
            self._watch.check(state.policy, state.read())

    def was_read(self, policy: ScalingPolicy, on_host: Any) -> None:
        """Look at a state that was read, and raise nothing."""
        self._watch.log(policy, on_host)
