"""The spike guard: it skips a step because of the norm of its gradients.

As in a policy, the code uses `xp.where` and operators only, so that the same lines run on host scalars and on the
arrays of any framework. The adapter that takes the step combines both checks: an overflow goes to the policy, and a
spike leaves the policy's state unchanged.
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

_LEAST_DEVIATION = 0.375
"""The smallest deviation, as a fraction of the mean.

Log-normal norms of sigma 0.3 deviate by 0.24. At that fraction two runs of 10,000 such norms in three have a norm
above the limit of the default threshold; at 0.375 it is one in two hundred.
"""
_EXACT_IN_FLOAT32 = 2**24
LARGEST_NORM = float(np.finfo(np.float32).max)
"""The largest norm that is a number in float32."""
SPIKES_HINT = "Look for a change of the data or a learning rate that is too large"
"""What to do after many spikes in a row."""
_RULES = {
    "threshold": Rule(
        float, "a number from 1 to 2**126", "pass 8.0, or a larger one to skip fewer steps", 1.0, LARGEST_SCALE
    ),
    "memory": Rule(int, "a whole number from 1 to 2**24", "pass 128", 1, _EXACT_IN_FLOAT32),
    "warmup": Rule(int, "a whole number from 1 to 2**24", "pass 16", 1, _EXACT_IN_FLOAT32),
    "max_streak": COUNT_OR_NONE,
}


class GuardState(NamedTuple, Generic[ArrayT_co]):
    """The state of a `SpikeGuard`: statistics of the norms up to now; each field has shape `()`.

    The counts that enter a ratio are float32, since not every framework divides int32 into float32; they stop counting
    at 2**24.
    """

    mean: ArrayT_co
    """float32: the running mean of the norms."""
    deviation: ArrayT_co
    """float32: the running mean of their absolute deviation from the mean."""
    norms: ArrayT_co
    """float32: the number of norms remembered."""
    spikes: ArrayT_co
    """int32: the spikes up to now."""
    streak: ArrayT_co
    """float32: the spikes in a row up to now."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpikeGuard:
    """Skip a step if its gradient norm is far above the norms before it.

    ```
    limit = mean + threshold × deviation  (the deviation is at least 3/8 of the mean)
    a norm above the limit is a spike, and is remembered as the limit;
    any other norm is remembered as it is
    ```

    The mean and the deviation are exponential averages over some `memory` norms. Only norms that are too large are
    spikes. The first `warmup` norms are accepted. NaN and infinity are never accepted and never remembered, and a norm
    of zero is accepted without being remembered. Since a spike raises the limit by a few percent, a lasting change of
    level is learnt; from the `warmup`-th spike in a row on, each counts more than the one before, so that the guard
    accepts any lasting change within 30 to 80 steps.

    Skipping spikes need not shorten the recovery from them; the guard provides the mechanism only. It does not wait for
    the device. Save its state in every checkpoint.

    Raises:
        PolicyError: A setting breaks its rule; the message names the value, the rule and what to do.
    """

    threshold: float = 8.0
    """The largest accepted distance from the mean, in deviations; at least 1."""
    memory: int = 128
    """The number of norms over which the averages run."""
    warmup: int = 16
    """The number of norms that are accepted before the first one can be a spike."""
    max_streak: int | None = None
    """The number of spikes in a row at which an adapter raises `OverflowStreakError`, if the host has the norm."""

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            object.__setattr__(self, name, rule.validate(name, getattr(self, name)))

    def init_state(self) -> GuardState[HostScalar]:
        """Return the state before the first norm, on the host."""
        zero = np.float32(0)
        return GuardState(zero, zero, zero, np.int32(0), zero)

    def check(self, state: GuardState, norm: Array, *, xp: Namespace | None = None) -> tuple[Array, GuardState]:
        """Return whether a step with this norm is accepted, and the state after it.

        The function is pure. It synchronises with the host only if the state is on the host and the norm is not.

        Args:
            state: The state before the step, on the host or in the arrays of a framework.
            norm: The norm of the unscaled gradients, before clipping: float32, shape `()`; for a state on the host, a
                number.
            xp: The array namespace of the state, inferred when left out; TensorFlow's cannot be inferred.

        Returns:
            A bool of shape `()`, and a state with the same dtypes and shapes. A norm that is not finite leaves the
            state as it was.

        Raises:
            TypeError: `state` is not a state of a guard.
        """
        if not hasattr(state, "mean"):
            raise TypeError(
                f"state={describe(state)} is not a state of a guard; call check(state, norm), with a state that "
                "init_state or check returned"
            )
        xp = namespace(state.mean) if xp is None else xp
        if xp is np and state.mean.shape == ():  # NumPy computes on scalars ten times as fast
            accepted, after = self.check(GuardState(*(value[()] for value in state)), norm, xp=HOST)
            return accepted, GuardState(*map(np.asarray, after))
        if xp is HOST:
            with np.errstate(over="ignore", invalid="ignore"):  # as arrays of frameworks do
                return self._check(state, np.float32(norm), xp)
        return self._check(state, norm, xp)

    def limit(self, state: GuardState, *, xp: Namespace | None = None) -> Array:
        """Return the largest norm that is not a spike: float32, shape `()`; after the warm-up.

        Args:
            state: The state before the step.
            xp: The array namespace of the state, inferred when left out.
        """
        xp = namespace(state.mean) if xp is None else xp
        return state.mean + _larger(state.deviation, state.mean * _LEAST_DEVIATION, xp) * self.threshold

    def _check(self, state: GuardState, norm: Array, xp: Namespace) -> tuple[Array, GuardState]:
        limit = self.limit(state, xp=xp)
        # A comparison is False for NaN, too, and needs no isfinite, which is in another module in TensorFlow.
        is_finite = norm < math.inf
        spiked = (norm > limit) & is_finite & (state.norms >= self.warmup)
        is_counted = is_finite & (norm >= SMALLEST_SCALE)
        known = xp.where(is_counted, xp.where(spiked, limit, norm), state.mean)
        norms = state.norms + 1.0
        weight = self._weight(norms, state.streak, xp)
        mean = state.mean + (known - state.mean) * weight  # a norm that does not count leaves it as it is
        deviation = state.deviation + (abs(known - mean) - state.deviation) * weight
        deviation, norms = xp.where(is_counted, deviation, state.deviation), xp.where(is_counted, norms, state.norms)
        spikes = xp.where(spiked, saturating_increment(state.spikes, xp=xp), state.spikes)
        streak = xp.where(spiked, state.streak + 1.0, xp.where(is_finite, 0.0, state.streak))
        return is_finite ^ spiked, GuardState(mean, deviation, norms, spikes, streak)

    def _weight(self, norms: Array, streak: Array, xp: Namespace) -> Array:
        """Return the weight of the last of the norms in the averages: 1 for the first, more late in a streak."""
        late = _larger(streak - (self.warmup - 1.0), 1.0, xp)
        return _smaller(late / _smaller(norms, float(self.memory), xp), 1.0, xp)


def _larger(x: Array, y: Array, xp: Namespace) -> Array:
    return max(x, y) if xp is HOST else xp.where(x > y, x, y)


def _smaller(x: Array, y: Array, xp: Namespace) -> Array:
    return min(x, y) if xp is HOST else xp.where(x < y, x, y)


def check_guard(guard: Any) -> None:
    """Check an adapter's argument `guard`.

    Args:
        guard: Any value.

    Raises:
        PolicyError: The value is neither a `SpikeGuard` nor None.
    """
    if not isinstance(guard, SpikeGuard | None):
        raise PolicyError(f"guard={guard!r} must be a SpikeGuard; pass SpikeGuard(), or leave it out")
