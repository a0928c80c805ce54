"""Training with the five verbs on arrays, for NumPy and JAX."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from lossscale.demo._network import LEARNING_RATE, PARAMETERS
from lossscale_core import ScalingPolicy, StepInfo, step_info
from lossscale_core.adapters import check_overflow_streak


class LearntValues(NamedTuple):
    """The values that an applied step changes and a skipped step does not: float32 weights, and Adam's averages."""

    weights: list[Any]
    mean: list[Any]
    square: list[Any]
    adam_steps: Any


class VerbsTrainer:
    """The weights, Adam's memory and the scale state, on one framework's arrays; `train_step` is a pure function."""

    xp: ModuleType
    verbs: ModuleType
    gradients: Callable[[list[Any], str, Any, Any], tuple[Any, list[Any]]]
    """Returns the loss, and the gradients of a weight times it as stored in a dtype."""
    share_seen: Callable[[float, Any], Any]
    """Returns 1 - decay**steps, Adam's bias correction of a moving average."""

    def __init__(self, policy: ScalingPolicy, dtype: str, weight: float, weights: list[Any]) -> None:
        self.policy, self.dtype, self.weight = policy, dtype, self.xp.float32(weight)
        zeros = [self.xp.zeros_like(array) for array in weights]
        self.learnt = LearntValues([self.xp.asarray(array) for array in weights], zeros, zeros, self.xp.float32(0))
        self.state = self.verbs.init_state(policy)

    def step(self, images: Any, labels: Any) -> tuple[Any, list[Any], StepInfo]:
        before = self.state
        self.learnt, self.state, loss, gradients = self.train_step(
            self.policy, self.dtype, self.learnt, before, (images, labels), self.weight
        )
        check_overflow_streak(self.policy, self.state)
        return loss, gradients, step_info(before, self.state)

    @classmethod
    def train_step(
        cls, policy: ScalingPolicy, dtype: str, learnt: LearntValues, state: Any, batch: Any, weight: Any
    ) -> tuple[LearntValues, Any, Any, list[Any]]:
        """Return the learnt values, the scale state, the loss and the unscaled gradients after a step."""
        loss, scaled = cls.gradients(learnt.weights, dtype, batch, cls.verbs.scale(weight, state))
        grads_finite = cls.verbs.all_finite(scaled[:PARAMETERS])
        # With the scale before the update: the one that multiplied the loss.
        gradients = cls.verbs.unscale(scaled, state)
        after = cls.verbs.select(grads_finite, cls.adam_step(learnt, gradients[:PARAMETERS]), learnt)
        return after, policy.update(state, grads_finite), loss, gradients

    @classmethod
    def adam_step(cls, learnt: LearntValues, grads: list[Any]) -> LearntValues:
        """Take a step of Adam (Kingma and Ba, 2015); its epsilon is too small to notice the weight of the loss."""
        steps = learnt.adam_steps + 1
        mean = [m + 0.1 * (g - m) for m, g in zip(learnt.mean, grads, strict=True)]
        square = [s + 0.001 * (g * g - s) for s, g in zip(learnt.square, grads, strict=True)]
        seen, seen_square = cls.share_seen(0.9, steps), cls.share_seen(0.999, steps)
        weights = [
            w - LEARNING_RATE * (m / seen) / (cls.xp.sqrt(s / seen_square) + 1e-16)
            for w, m, s in zip(learnt.weights, mean, square, strict=True)
        ]
        return LearntValues(weights, mean, square, steps)
