"""The sentences of `diagnose`: the condition of a run, and the recommended action."""

import numpy as np

from lossscale_core._base import BaseScaling
from lossscale_core._guard import GuardState
from lossscale_core._messages import shown_number
from lossscale_core._mistakes import loss_scale_of
from lossscale_core._settings import LARGEST_SCALE, SMALLEST_SCALE
from lossscale_core._state import ScaleState, read

_FEW = 5
_OFTEN = 0.05
BACKWARD = "a division by zero, or a root or a logarithm at zero, in the backward pass"
"""What makes gradients NaN at each loss scale though the loss is finite: https://github.com/jax-ml/jax/issues/26328."""
STREAK_HINT = (
    "look for a NaN or infinity in the loss, or raise max_overflow_streak where init_scale is known to be far too large"
)


class Numbers:
    """The numbers of a state, read once from its device."""

    def __init__(self, policy: BaseScaling, state: ScaleState) -> None:
        self.scale = read(loss_scale_of(state, "diagnose(policy, state)"))
        self.steps = int(state.steps)
        self.skipped = int(state.skipped_steps)
        self.streak = int(state.overflow_streak)
        self.applied = self.steps - self.skipped
        self.finite_in_a_row = max(0, int(state.growth_tracker) + policy.cooldown)
        self.start = float(policy.init_state().loss_scale)
        low, high = policy.bounds()
        # A state holds its scale in float32. Compared with a bound in float64, a scale at the bound might be above it.
        self.at_floor = policy.adapts and self.scale <= np.float32(low)
        self.at_ceiling = policy.adapts and self.scale >= np.float32(high)
        self.counts = f"{self.skipped} of {self.steps} steps skipped"
        self.shown_scale = shown_number(self.scale)

    @property
    def has_fallen_below_one(self) -> bool:
        """Whether overflows have brought the scale below 1, where finite losses hardly ever overflow."""
        return self.scale < 1.0 <= self.start


def diagnosis(policy: BaseScaling, numbers: Numbers, guard: GuardState | None = None) -> str:
    """Return the text of `lossscale_core.diagnose` for the numbers of a state."""
    spikes, is_spiking = ("", False) if guard is None else _spikes(guard)
    # The order matters: a run that is stuck or calibrating also skips often, but needs other advice.
    first = (_broken, _not_started, _at_limit, _stuck, _calibrating, _skipping, _unapplied)
    for verdict in (*first, fallen_below_one, _pressing):
        if sentence := verdict(policy, numbers):
            return sentence + spikes
    scale = f"; the loss scale is {numbers.shown_scale}" if policy.scales_losses else ""
    return f"{'spiking' if is_spiking else 'healthy'}: {numbers.counts}{scale}.{spikes}"


def forward_pass(policy: BaseScaling, scale: float) -> str:
    """Return where to look for the cause of overflows that a smaller scale than this would hardly remove."""
    backward = f"if the loss is finite, look for {BACKWARD}."
    if not policy.scales_losses:
        return f"Look for a NaN or infinity in the inputs, the forward pass and the loss; {backward}"
    if scale > 1.0:
        return "Lower min_scale, or look for a NaN or infinity in the forward pass."
    cause = "The cause is usually not the scale but a NaN or infinity in the forward pass"
    return f"{cause}: look at the loss and the inputs first; {backward}"


def _spikes(guard: GuardState) -> tuple[str, bool]:
    """Return a sentence about the spikes, or nothing if there were none, and whether the run is in a streak of them."""
    spikes, streak = int(guard.spikes), int(guard.streak)
    if not spikes:
        return "", False
    refused = f"{spikes} {'spike' if spikes == 1 else 'spikes'}"
    counts = f" The guard refused {refused}; the mean norm is {float(guard.mean):g}."
    if streak < _FEW:
        return counts, False
    hint = "Look for a change of the data or a learning rate that is too large."
    return f"{counts} The last {streak} norms in a row were spikes. {hint}", True


def _broken(_: BaseScaling, numbers: Numbers) -> str | None:
    if SMALLEST_SCALE <= numbers.scale <= LARGEST_SCALE:
        return None
    return f"broken: the loss scale is {numbers.scale:g}, which no policy reaches. Restore an earlier checkpoint."


def _not_started(policy: BaseScaling, numbers: Numbers) -> str | None:
    if numbers.steps:
        return None
    return (
        f"not started: no step yet{f'; the first is scaled by {numbers.shown_scale}' if policy.scales_losses else ''}."
    )


def _at_limit(policy: BaseScaling, numbers: Numbers) -> str | None:
    limit = policy.max_overflow_streak
    if limit is None or numbers.streak < limit:
        return None
    return (
        f"skipping too often: {numbers.streak} overflows in a row reach max_overflow_streak={limit} "
        f"({numbers.counts}). {STREAK_HINT[0].upper()}{STREAK_HINT[1:]}."
    )


def _stuck(policy: BaseScaling, numbers: Numbers) -> str | None:
    if not numbers.at_floor or numbers.streak < _FEW:
        return None
    return (
        f"stuck at min_scale: the last {numbers.streak} steps in a row overflowed and the loss scale cannot go below "
        f"{shown_number(policy.min_scale)}. {forward_pass(policy, policy.min_scale)}"
    )


def _calibrating(policy: BaseScaling, numbers: Numbers) -> str | None:
    # After a few applied steps, or several in a row, the calibration is over.
    is_over = numbers.applied >= _FEW or 0 < numbers.applied == numbers.finite_in_a_row
    is_long = numbers.has_fallen_below_one and numbers.streak >= _FEW
    if not policy.adapts or not numbers.skipped or is_over or numbers.at_floor or is_long:
        return None
    scale = f"the loss scale is {numbers.shown_scale}"
    if numbers.scale < numbers.start:
        scale = f"the loss scale comes down from {shown_number(numbers.start)}, now {numbers.shown_scale}"
    hint = "This is normal at the start; a smaller init_scale shortens it."
    return f"calibrating: {numbers.counts} while {scale}. {hint}"


def _skipping(policy: BaseScaling, numbers: Numbers) -> str | None:
    few = _FEW - 1 if policy.adapts else 2  # if the policy does not adapt, no overflow is by design
    if numbers.streak >= _FEW:
        what = f"the last {numbers.streak} steps in a row overflowed ({numbers.counts})"
    elif numbers.applied and _unexplained_skips(policy, numbers) > max(few, numbers.steps * _tolerable_share(policy)):
        what = numbers.counts
    elif numbers.at_floor and numbers.streak and numbers.skipped >= _FEW:
        what = f"{numbers.counts}, the last one at min_scale"
    else:
        return None
    return f"skipping too often: {what}. {_hint(policy, numbers)}"


def _unapplied(policy: BaseScaling, numbers: Numbers) -> str | None:
    if numbers.applied:
        return None
    return f"no step applied yet: {numbers.counts}. {_hint(policy, numbers)}"


def fallen_below_one(policy: BaseScaling, numbers: Numbers) -> str | None:
    """Return the sentence about a scale that has fallen below 1, or None if it has not."""
    if not policy.adapts or not numbers.has_fallen_below_one:
        return None
    scale = f"the loss scale is {numbers.shown_scale}, which makes gradients smaller"
    return f"fallen below 1: {numbers.counts}; {scale}. {_hint(policy, numbers)}"


def _hint(policy: BaseScaling, numbers: Numbers) -> str:
    """Return what to do about many skipped steps."""
    if policy.adapts and not numbers.at_floor and not numbers.has_fallen_below_one:
        return "Look for a diverging loss; a longer growth_interval tries a larger scale less often."
    if policy.is_constant() and numbers.scale > 1.0:
        return f"A scale of {numbers.shown_scale} is too large for these gradients: lower it, or use DynamicScaling."
    return forward_pass(policy, numbers.scale)


def _pressing(policy: BaseScaling, numbers: Numbers) -> str | None:
    if not numbers.at_ceiling or numbers.at_floor or numbers.applied < policy.growth_interval:
        return None
    room = "raise max_scale" if policy.max_scale < LARGEST_SCALE else "give the loss a larger weight"
    return (
        f"pressing against max_scale: the loss scale is {numbers.shown_scale} and could grow further "
        f"({numbers.counts}). If small gradients still flush to zero, {room}."
    )


def _unexplained_skips(policy: BaseScaling, numbers: Numbers) -> float:
    """Return the skips beyond those that lowered the scale from `init_scale`.

    These are subtracted once the calibration is known to be over: the scale has grown since, or enough steps were
    finite, in a row or in all.
    """
    if not policy.adapts:
        return numbers.skipped
    if numbers.applied == numbers.finite_in_a_row:
        return 0  # every overflow came before the first applied step
    calibration = policy.overflows_down_to(numbers.scale) if numbers.scale < numbers.start else 0
    has_run = numbers.finite_in_a_row >= min(1.0 / _OFTEN, policy.growth_interval / 2)
    has_many = 2 * _OFTEN * numbers.applied >= numbers.skipped
    is_settled = _has_grown(policy, numbers, calibration) or has_run or has_many
    return numbers.skipped - calibration if is_settled else numbers.skipped


def _has_grown(policy: BaseScaling, numbers: Numbers, calibration: int) -> bool:
    """Return whether the numbers show that the scale has grown, after which an overflow is by design.

    Each backoff after the calibration takes `hysteresis` overflows and reverses earlier growths, each of which took
    `growth_interval` finite steps. At the floor an overflow need not be a backoff.
    """
    if numbers.at_floor:
        return False
    growths = (numbers.skipped - calibration) / policy.hysteresis * policy.growths_per_backoff()
    return 0 < growths <= numbers.applied / policy.growth_interval


def _tolerable_share(policy: BaseScaling) -> float:
    """Return the largest fraction of skipped steps that is normal: twice the fraction that the policy plans."""
    return max(_OFTEN, min(2.0 * policy.overflow_share(), 0.5))
