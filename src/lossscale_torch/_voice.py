"""When a scaler logs by itself: now and then, where its state is read anyway or reading it waits for no device."""

from typing import Any, Literal

from lossscale_core import ScaleWatch, ScalingPolicy
from lossscale_torch._state import ScalerState

OnFloor = Literal["warn", "raise", "ignore"]

_EVERY = 32  # a look at the state on the host takes about as long as its update


class Voice:
    """A scaler's `ScaleWatch`, and the number of updates until it looks at the state again."""

    def __init__(self, on_floor: OnFloor) -> None:
        self._watch = ScaleWatch(on_floor)
        self._every = 1 if on_floor == "raise" else _EVERY
        self._left = self._every

    def updated(self, state: ScalerState, overflowed: Any) -> None:
        """Note an update, and look at the state if it is time to and no device is waited for.

        What stands in the state of an overflow before is no error after an update that is known to count none.
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
