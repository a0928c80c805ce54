"""The spike guard, which skips a step if its gradient norm is far above the norms before it.

Like a policy, the guard uses only `xp.where` and operators. The same code then runs on host scalars and on the arrays
of any framework. An adapter combines the guard with a policy: an overflow goes to the policy, and a spike leaves the
policy's state unchanged.
"""

import dataclasses
import math
from typing import Any, Generic, NamedTuple

import numpy as np

from lossscale_core._arrays import HOST, namespace
from lossscale_core._messages import describe
from lossscale_core._settings import COUNT_OR_NONE, LARGEST_SCALE, SMALLEST_SCALE, Rule
from lossscale_core._state import Array, ArrayT_co, HostScalar, Namespace, saturating_increment
from lossscale_core.errors import PolicyError

_MIN_RELATIVE_DEVIATION = 0.375
"""The smallest deviation that the limit uses, as a fraction of the mean norm.

Log-normal norms with sigma = 0.3 deviate by 0.24 of their mean. With a minimum of 0.24, two of three runs over 10,000
such norms contain a false spike at the default threshold; with 0.375, one of two hundred runs does.
"""
_LARGEST_FLOAT32_COUNT = 2**24
"""The largest count up to which float32 holds every whole number."""
LARGEST_NORM = float(np.finfo(np.float32).max)
"""The largest finite norm in float32."""
SPIKES_HINT = "Look for a change of the data or a learning rate that is too large"
"""What to do after many spikes in a row."""
_RULES = {
    "threshold": Rule(
        float, "a number from 1 to 2**126", "pass 8.0, or a larger one to skip fewer steps", 1.0, LARGEST_SCALE
    ),
    "memory": Rule(int, "a whole number from 1 to 2**24", "pass 128", 1, _LARGEST_FLOAT32_COUNT),
    "warmup": Rule(int, "a whole number from 1 to 2**24", "pass 16", 1, _LARGEST_FLOAT32_COUNT),
    "max_streak": COUNT_OR_NONE,
}


class GuardState(NamedTuple, Generic[ArrayT_co]):
    """The state of a `SpikeGuard`: running statistics of the norms, each of shape `()`.

    Counts that enter a division are float32, because some frameworks do not divide int32 into float32. These counts
    stop at 2**24.
    """

    mean: ArrayT_co
    """float32: the running mean of the norms."""
    deviation: ArrayT_co
    """float32: the running mean of the absolute deviation from the mean."""
    norms: ArrayT_co
    """float32: the number of norms in the statistics."""
    spikes: ArrayT_co
    """int32: the number of spikes."""
    streak: ArrayT_co
    """float32: the number of spikes in a row."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpikeGuard:
    """Skip a step if its gradient norm is far above the norms before it.

    ```
    limit = mean + threshold × max(deviation, 3/8 × mean)
    if norm > limit:  the norm is a spike; the statistics learn the limit
    else:             the statistics learn the norm
    ```

    `mean` and `deviation` are exponential averages over about `memory` norms.

    - **Warm-up:** the first `warmup` norms are not spikes, whatever the limit is.
    - **Zero, NaN and infinity:** the statistics ignore them. The guard accepts zero and rejects NaN and infinity.
    - **Lasting changes:** each spike raises the limit by a few percent. From the `warmup`-th spike in a row on, each
      spike counts more than the spike before it. The guard accepts any new level within 30 to 80 steps.

    Skipping spikes does not always speed up the recovery from them. The guard does not synchronise with the host. Save
    its state in every checkpoint.

    Raises:
        PolicyError: A setting breaks its rule. The message names the value, the rule and a valid value.
    """

    threshold: float = 8.0
    """The largest accepted distance from the mean, in deviations; at least 1."""
    memory: int = 128
    """The approximate number of norms in the averages."""
    warmup: int = 16
    """The number of norms that the guard accepts before a norm can be a spike."""
    max_streak: int | None = None
    """The number of spikes in a row at which an adapter raises `OverflowStreakError`, if the norm is on the host."""

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            object.__setattr__(self, name, rule.validate(name, getattr(self, name)))

    def init_state(self) -> GuardState[HostScalar]:
        """Return the state before the first norm, on the host."""
        zero = np.float32(0)
        return GuardState(zero, zero, zero, np.int32(0), zero)

    def check(self, state: GuardState, norm: Array, *, xp: Namespace | None = None) -> tuple[Array, GuardState]:
        """Return whether the guard accepts a step with this norm, and the state after the step.

        The function is pure. It synchronises with the host only if the state is on the host and the norm is not.

        Args:
            state: The state before the step, on the host or in the arrays of a framework.
            norm: The norm of the unscaled gradients before clipping: float32, shape `()`; or a Python number if the
                state is on the host.
            xp: The array namespace of the state. It is inferred if left out, except for TensorFlow.

        Returns:
            A bool of shape `()`, and a state with the same dtypes and shapes. A non-finite norm leaves the state
            unchanged.

        Raises:
            TypeError: `state` is not a `GuardState`.
        """
        if not hasattr(state, "mean"):
            raise TypeError(
                f"state={describe(state)} is not a state of a guard; call check(state, norm), with a state that "
                "init_state or check returned"
            )
        xp = namespace(state.mean) if xp is None else xp
        if xp is np and state.mean.shape == ():  # NumPy computes on scalars ten times as fast
            is_accepted, after = self.check(GuardState(*(value[()] for value in state)), norm, xp=HOST)
            return is_accepted, GuardState(*map(np.asarray, after))
        if xp is HOST:
            with np.errstate(over="ignore", invalid="ignore"):  # the arrays of frameworks do not warn either
                return self._check(state, np.float32(norm), xp)
        return self._check(state, norm, xp)

    def limit(self, state: GuardState, *, xp: Namespace | None = None) -> Array:
        """Return the largest norm that the guard accepts after the warm-up: float32, shape `()`.

        Args:
            state: The state before the step.
            xp: The array namespace of the state. It is inferred if left out, except for TensorFlow.
        """
        xp = namespace(state.mean) if xp is None else xp
        return state.mean + _maximum(state.deviation, state.mean * _MIN_RELATIVE_DEVIATION, xp) * self.threshold

    def _check(self, state: GuardState, norm: Array, xp: Namespace) -> tuple[Array, GuardState]:
        limit = self.limit(state, xp=xp)
        is_finite = norm < math.inf  # False for NaN, too; TensorFlow has `isfinite` in another module
        is_spike = (norm > limit) & is_finite & (state.norms >= self.warmup)
        is_sample = is_finite & (norm >= SMALLEST_SCALE)
        # If the norm is not a sample, the mean takes its place, so that NaN and infinity stay out of the arithmetic.
        sample = xp.where(is_sample, xp.where(is_spike, limit, norm), state.mean)
        norms = state.norms + 1.0
        weight = self._weight(norms, state.streak, xp)
        mean = state.mean + (sample - state.mean) * weight
        deviation = state.deviation + (abs(sample - mean) - state.deviation) * weight
        deviation, norms = xp.where(is_sample, deviation, state.deviation), xp.where(is_sample, norms, state.norms)
        spikes = xp.where(is_spike, saturating_increment(state.spikes, xp=xp), state.spikes)
        streak = xp.where(is_spike, state.streak + 1.0, xp.where(is_finite, 0.0, state.streak))
        return is_finite ^ is_spike, GuardState(mean, deviation, norms, spikes, streak)

    def _weight(self, norms: Array, streak: Array, xp: Namespace) -> Array:
        """Return the weight of the newest norm in the averages: 1 for the first norm, and larger late in a streak."""
        boost = _maximum(streak - (self.warmup - 1.0), 1.0, xp)
        return _minimum(boost / _minimum(norms, float(self.memory), xp), 1.0, xp)


def _maximum(x: Array, y: Array, xp: Namespace) -> Array:
    return max(x, y) if xp is HOST else xp.where(x > y, x, y)


def _minimum(x: Array, y: Array, xp: Namespace) -> Array:
    return min(x, y) if xp is HOST else xp.where(x < y, x, y)


def check_guard(guard: Any) -> None:
    """Validate the argument `guard` of an adapter.

    Args:
        guard: Any value.

    Raises:
        PolicyError: `guard` is neither a `SpikeGuard` nor None.
    """
    if not isinstance(guard, SpikeGuard | None):
        raise PolicyError(f"guard={guard!r} must be a SpikeGuard; pass SpikeGuard(), or leave it out")
