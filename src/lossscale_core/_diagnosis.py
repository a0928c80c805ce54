"""The verdicts on a run of loss scaling, each with the mend that it calls for."""

import numpy as np

from lossscale_core._base import BaseScaling
from lossscale_core._guard import GuardState
from lossscale_core._settings import LARGEST_SCALE, SMALLEST_SCALE
from lossscale_core._state import AnyScaleState

_FEW = 5
_OFTEN = 0.05
LIMIT_MEND = (
    "look for a NaN or infinity in the loss, or raise max_overflow_streak where init_scale is known to be far too large"
)


class Numbers:
    """The numbers of a state, read once from its device."""

    def __init__(self, policy: BaseScaling, state: AnyScaleState) -> None:
        self.scale = float(state.loss_scale)
        self.steps = int(state.steps)
        self.skipped = int(state.skipped_steps)
        self.streak = int(state.overflow_streak)
        self.applied = self.steps - self.skipped
        self.finite_in_a_row = max(0, int(state.growth_tracker))
        self.start = float(policy.init_state().loss_scale)
        low, high = policy.bounds()
        # A state holds its scale in float32. Against the bound in float64, a scale at the bound might be above it.
        self.at_floor = policy.adapts and self.scale <= np.float32(low)
        self.at_ceiling = policy.adapts and self.scale >= np.float32(high)
        self.counts = f"{self.skipped} of {self.steps} steps skipped"


def diagnosis(policy: BaseScaling, numbers: Numbers, guard: GuardState | None = None) -> str:
    """Return what `lossscale_core.diagnose` says of the numbers of a state."""
    spikes, is_spiking = ("", False) if guard is None else _spikes(guard)
    # The order decides. A run that is stuck or calibrating skips often as well, but needs another advice.
    for verdict in (_broken, _not_started, _at_limit, _stuck, _calibrating, _skipping, _pressing):
        if sentence := verdict(policy, numbers):
            return sentence + spikes
    return f"{'spiking' if is_spiking else 'healthy'}: {numbers.counts}; the loss scale is {numbers.scale:g}.{spikes}"


def _spikes(guard: GuardState) -> tuple[str, bool]:
    """Return a sentence about the spikes, or nothing if there were none, and whether the run is in a streak of them."""
    spikes, streak = int(guard.spikes), int(guard.streak)
    if not spikes:
        return "", False
    counts = (
        f" The guard refused {spikes} {'spike' if spikes == 1 else 'spikes'}; the mean norm is {float(guard.mean):g}."
    )
    if streak < _FEW:
        return counts, False
    mend = "Look for a change of the data or a learning rate that is too large."
    return f"{counts} The last {streak} norms in a row were spikes. {mend}", True


def _broken(_: BaseScaling, numbers: Numbers) -> str | None:
    if SMALLEST_SCALE <= numbers.scale <= LARGEST_SCALE:
        return None
    return f"broken: the loss scale is {numbers.scale:g}, which no policy reaches. Restore an earlier checkpoint."


def _not_started(_: BaseScaling, numbers: Numbers) -> str | None:
    return f"not started: no step yet; the first is scaled by {numbers.scale:g}." if numbers.steps == 0 else None


def _at_limit(policy: BaseScaling, numbers: Numbers) -> str | None:
    limit = policy.max_overflow_streak
    if limit is None or numbers.streak < limit:
        return None
    return (
        f"skipping too often: {numbers.streak} overflows in a row reach max_overflow_streak={limit} "
        f"({numbers.counts}). {LIMIT_MEND[0].upper()}{LIMIT_MEND[1:]}."
    )


def _stuck(policy: BaseScaling, numbers: Numbers) -> str | None:
    if not numbers.at_floor or numbers.streak < _FEW:
        return None
    return (
        f"stuck at min_scale: the last {numbers.streak} steps in a row overflowed and the loss scale cannot go below "
        f"{policy.min_scale:g}. {forward_pass(policy.min_scale)}"
    )


def _calibrating(policy: BaseScaling, numbers: Numbers) -> str | None:
    if not policy.adapts or numbers.applied or numbers.at_floor or _is_too_low(numbers):
        return None
    return (
        f"calibrating: {numbers.counts} while the loss scale comes down from {numbers.start:g}, now {numbers.scale:g}. "
        "This is normal at the start; a smaller init_scale shortens it."
    )


def _skipping(policy: BaseScaling, numbers: Numbers) -> str | None:
    if numbers.streak >= _FEW:
        what = f"the last {numbers.streak} steps in a row overflowed ({numbers.counts})"
    elif _unexplained_skips(policy, numbers) > max(_FEW - 1, numbers.steps * _tolerable_share(policy)):
        what = numbers.counts
    elif numbers.at_floor and numbers.streak and numbers.skipped >= _FEW:
        what = f"{numbers.counts}, the last one at min_scale"
    else:
        return None
    if policy.adapts and not numbers.at_floor and not _is_too_low(numbers):
        mend = "Look for a diverging loss; a longer growth_interval tries a larger scale less often."
    elif policy.is_constant() and numbers.scale > 1.0:
        mend = f"A scale of {numbers.scale:g} is too large for these gradients: lower it, or use DynamicScaling."
    else:
        mend = forward_pass(numbers.scale)
    return f"skipping too often: {what}. {mend}"


def _pressing(policy: BaseScaling, numbers: Numbers) -> str | None:
    if not numbers.at_ceiling or numbers.at_floor or numbers.applied < policy.growth_interval:
        return None
    room = "raise max_scale" if policy.max_scale < LARGEST_SCALE else "give the loss a larger weight"
    return (
        f"pressing against max_scale: the loss scale is {numbers.scale:g} and could grow further ({numbers.counts}). "
        f"If small gradients still flush to zero, {room}."
    )


def _is_too_low(numbers: Numbers) -> bool:
    """Return whether overflows in a row have brought the scale below 1, where finite losses hardly ever overflow."""
    return numbers.streak >= _FEW and numbers.scale < min(1.0, numbers.start)


def forward_pass(scale: float) -> str:
    """Say where to look for overflows that a smaller scale than this would hardly mend."""
    if scale > 1.0:
        return "Lower min_scale, or look for a NaN or infinity in the forward pass."
    return (
        "The cause is usually not the scale but a NaN or infinity in the forward pass: "
        "look at the loss and the inputs first."
    )


def _unexplained_skips(policy: BaseScaling, numbers: Numbers) -> float:
    """Return the skips beyond those that lowered the scale from `init_scale`.

    Those are subtracted once a run of finite steps, or many of them in all, shows that the scale has settled.
    """
    if not policy.adapts:
        return numbers.skipped
    if numbers.applied == numbers.finite_in_a_row:
        return 0  # every overflow came before the first applied step
    has_settled = numbers.finite_in_a_row >= min(1.0 / _OFTEN, policy.growth_interval / 2)
    if not has_settled and 2 * _OFTEN * numbers.applied < numbers.skipped:
        return numbers.skipped
    if numbers.scale >= numbers.start:
        return numbers.skipped
    return max(0.0, numbers.skipped - policy.overflows_down_to(numbers.scale))


def _tolerable_share(policy: BaseScaling) -> float:
    """Return the largest fraction of skipped steps that is normal: twice the fraction that the policy plans."""
    return max(_OFTEN, min(2.0 * policy.overflow_share(), 0.5))
