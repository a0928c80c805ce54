"""What a loss scaler remembers between two steps: the meaning, dtype and shape of each field."""

from typing import Any, NamedTuple, Protocol, TypeAlias

Array: TypeAlias = Any
"""An array or scalar of the framework at hand; on the host, an `np.float32` or `np.int32` scalar."""


class ScaleState(NamedTuple):
    """The loss scale and its counters, each of shape `()`, living where the gradients live.

    On the host the fields are `np.float32` and `np.int32` scalars, so that they round exactly as the arrays
    of every framework do. An int32 counter that reaches 2**31 - 1 stays there.
    """

    loss_scale: Array
    """float32: the factor that multiplies the next loss and divides its gradients."""
    growth_tracker: Array
    """int32: finite steps in a row that count toward growth; negative while a cooldown lasts."""
    hysteresis_tracker: Array
    """int32: overflows left before the scale backs off."""
    steps: Array
    """int32: steps so far, applied and skipped."""
    skipped_steps: Array
    """int32: steps that overflowed and were skipped."""
    overflow_streak: Array
    """int32: overflows in a row up to now; 0 after a finite step."""


class TolerantScaleState(NamedTuple):
    """A `ScaleState` with the two counters of `TolerantScaling`.

    They are float32 because they enter a ratio, and not every framework divides int32 into float32. Both are halved
    when `steps_since_change` is beyond 2**24, where float32 counts no further: their share stays what it was.
    """

    loss_scale: Array
    growth_tracker: Array
    hysteresis_tracker: Array
    steps: Array
    skipped_steps: Array
    overflow_streak: Array
    steps_since_change: Array
    """float32: steps since the scale last grew or backed off."""
    overflows_since_backoff: Array
    """float32: overflows since the scale last backed off."""


class AnyScaleState(Protocol):
    """What every policy's state has; a policy may add fields of its own.

    `_make` and `_replace` are left out, though every NamedTuple has them: type checkers give each NamedTuple its own.
    """

    @property
    def loss_scale(self) -> Array: ...
    @property
    def growth_tracker(self) -> Array: ...
    @property
    def hysteresis_tracker(self) -> Array: ...
    @property
    def steps(self) -> Array: ...
    @property
    def skipped_steps(self) -> Array: ...
    @property
    def overflow_streak(self) -> Array: ...
    def _asdict(self) -> dict[str, Array]: ...
