"""A policy outside of the library, with its own state: it lowers the loss scale only if many steps overflow.

    pip install .
    python examples/tolerant_policy.py

If small gradients flush to zero, a larger scale may be worth a few skipped steps. The policy follows fairseq's
`DynamicLossScaler`
(https://github.com/facebookresearch/fairseq/blob/v0.12.2/fairseq/optim/dynamic_loss_scaler.py). After this module is
imported, every function and file of the library accepts this policy, also as `{"kind": "tolerant"}`.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from lossscale_core import BaseScaling, DynamicScaling, saturating_increment, select
from lossscale_core.errors import PolicyError
from lossscale_core.testing import check_policy, simulate


class TolerantState(NamedTuple):
    """The fields of `ScaleState`, and two counters in float32, because some frameworks do not divide int32."""

    loss_scale: Any
    growth_tracker: Any
    hysteresis_tracker: Any
    steps: Any
    skipped_steps: Any
    overflow_streak: Any
    steps_since_change: Any
    """Steps since the scale last grew or backed off."""
    overflows_since_backoff: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class TolerantScaling(BaseScaling):
    """Halve the scale when the share of overflows reaches `tolerance`; double it like `DynamicScaling`.

    The share is the number of overflows since the last backoff, divided by the number of steps since the scale changed.
    """

    kind = "tolerant"
    state_type = TolerantState
    adapts = True
    growth_factor = 2.0
    backoff_factor = 0.5

    tolerance: float = 0.05  # a new setting; `__post_init__` checks it
    init_scale: float = 2.0**16  # settings of the library; the base class checks them by name
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_scale: float = 2.0**32

    def __post_init__(self) -> None:
        """Check the settings."""
        BaseScaling.__post_init__(self)
        if not 0.0 <= self.tolerance <= 1.0:
            raise PolicyError(f"tolerance={self.tolerance} is not a share of steps; give a number from 0 to 1")

    def init_state(self) -> TolerantState:
        """Return the state before the first step."""
        return TolerantState(np.float32(self.init_scale), *[np.int32(0)] * 5, np.float32(0.0), np.float32(0.0))

    def update(self, state: Any, grads_finite: Any, *, xp: Any = None) -> Any:
        """Return the state after a step, on the host or on a device."""
        grows = state.growth_tracker >= self.growth_interval - 1
        doubled = state.loss_scale * 2.0
        applied = state._replace(
            loss_scale=select(grows & (doubled <= self.max_scale), doubled, state.loss_scale, xp=xp),
            growth_tracker=select(grows, state.growth_tracker * 0, saturating_increment(state.growth_tracker), xp=xp),
            steps=saturating_increment(state.steps),
            overflow_streak=state.overflow_streak * 0,
            steps_since_change=select(grows, state.steps_since_change * 0.0, state.steps_since_change + 1.0, xp=xp),
        )
        since_change, overflows = state.steps_since_change + 1.0, state.overflows_since_backoff + 1.0
        backs_off = overflows / since_change >= self.tolerance
        halved = state.loss_scale * 0.5
        skipped = state._replace(
            loss_scale=select(backs_off & (halved >= self.min_scale), halved, state.loss_scale, xp=xp),
            growth_tracker=state.growth_tracker * 0,
            steps=saturating_increment(state.steps),
            skipped_steps=saturating_increment(state.skipped_steps),
            overflow_streak=saturating_increment(state.overflow_streak),
            steps_since_change=select(backs_off, since_change * 0.0, since_change, xp=xp),
            overflows_since_backoff=select(backs_off, overflows * 0.0, overflows, xp=xp),
        )
        return select(grads_finite, applied, skipped, xp=xp)


def main(steps: int = 400) -> None:
    """Check the policy, and compare both rules on a run in which every twentieth step overflows."""
    check_policy(TolerantScaling(growth_interval=5, tolerance=0.25))
    finite = [n % 20 != 19 for n in range(steps)]
    for policy in (DynamicScaling(growth_interval=100), TolerantScaling(growth_interval=100, tolerance=0.1)):
        final = simulate(policy, finite).loss_scale_after[-1]
        print(f"{type(policy).__name__} ends with a loss scale of {final:g}")


if __name__ == "__main__":
    main()
