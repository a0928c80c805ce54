"""Gradients belong to the last scaled loss, or to the loss that the caller names, with `get_scaled_loss`, too."""

from tests.adapters.tensorflow_devices import EACH_MODE, STRATEGY, compiled, traced  # noqa: I001
from contextlib import nullcontext

import pytest
import tensorflow as tf

from lossscale_core.errors import CallOrderError
from lossscale_tf import LossScaleOptimizer
from tests.adapters.keras_losses import TwoWeights

SCALED, UNSCALED = "get_scaled_loss", "get_unscaled_gradients"
pytestmark = pytest.mark.filterwarnings("error::UserWarning")  # right loops are silent


class Two(TwoWeights):
    """The calls of a loop with `get_scaled_loss`."""

    def __init__(self):
        super().__init__(LossScaleOptimizer)
        self.values = [weight.value for weight in self.weights]
        """The same variables as TensorFlow's."""

    def grads(self, gradient=1.0, by=SCALED):
        """Return the scaled gradient of a loss."""
        return self.scaled(gradient, by)[0]

    def unscale(self, grads):
        """Unscale gradients."""
        return self.optimizer.get_unscaled_gradients(grads)

    def step(self, grads, weight=0):
        """Unscale and apply gradients."""
        self.apply_gradients(self.unscale(grads), weight)


@EACH_MODE
def test_zeros_that_tensorflow_keeps(mode):
    """A zero for a variable without a part in the loss is a gradient of this loss, although it is older."""
    two = Two()

    def step():
        for by in (SCALED, "scale_loss"):
            with tf.GradientTape() as tape:
                first, _ = tf.identity_n(two.values)
                loss = getattr(two.optimizer, by)(first * 4.0)
            grads = tape.gradient(loss, two.values)
            grads = grads if by == "scale_loss" else two.unscale(grads)
            two.optimizer.apply_gradients(zip(grads, two.values, strict=True))

    step = mode(step)
    for calls in (1, 2):
        step()
        two.went(8.0 * calls)


@EACH_MODE
def test_an_earlier_loss_and_computed_gradients(mode):
    """A named loss keeps its scale after another step, and computed gradients may be processed and applied."""
    two = Two()

    def step():
        grads, first = two.scaled(8.0, SCALED)
        two.step(two.grads(5.0), 1)
        two.apply_gradients(two.optimizer.get_unscaled_gradients(grads, loss=first))
        (grad,) = two.optimizer.get_gradients(lambda: two.values[0] * 3.0, two.values[:1])
        two.apply([2.0 * grad], 0)

    mode(step)()
    two.went(14.0, 5.0)


@pytest.mark.parametrize("by", [UNSCALED, "apply_gradients", "apply"])
def test_gradients_between_two_compiled_functions(by):
    """The scale may change between a compiled function that scales a loss and another that applies its gradients."""
    two = Two()
    scaled = compiled(lambda: two.grads(3.0, SCALED if by == UNSCALED else "scale_loss"))
    steps = {UNSCALED: two.step, "apply_gradients": two.apply_gradients, "apply": lambda grads: two.apply(grads, 0)}
    apply = compiled(steps[by])
    for _ in range(4):
        grads = scaled()
        two.optimizer.dynamic_scale.assign(64.0)
        apply(grads)
    two.went(12.0)


def test_replicas_with_two_losses():
    """Two losses are scaled before the first step, eagerly and in a graph. A step may consist of two runs."""
    with STRATEGY.scope():
        two, other = Two(), Two()

    def interleaved():
        first, second = two.grads(0.5), two.grads(1.0)
        two.step(first)
        two.step(second, 1)

    step = lambda: STRATEGY.run(interleaved)  # noqa: E731
    for run_step in (step, step, traced(step), traced(step)):
        run_step()
    assert [float(weight.numpy()) for weight in two.values] == [-4.0, -8.0]
    for _ in range(2):
        grads = STRATEGY.run(lambda: two.grads(0.5))
        STRATEGY.run(lambda: two.optimizer.minimize(lambda: two.values[1] * 1.0, two.values[1:]))
        STRATEGY.run(two.step, args=(grads,))
    assert [float(weight.numpy()) for weight in two.values] == [-6.0, -12.0]
    assert two.optimizer.steps_with_missing_calls == 0
    with pytest.warns(UserWarning, match="get_scaled_loss and get_unscaled_gradients not called"):
        traced(lambda: STRATEGY.run(lambda: other.apply_gradients([tf.constant(1.0)])))()
    assert other.optimizer.steps_with_missing_calls == 1  # a step of all replicas counts once
    with STRATEGY.scope(), pytest.raises(ValueError, match=r"call this inside strategy\.run"):
        two.optimizer.apply([tf.constant(1.0)], two.values[:1])


@pytest.mark.promise(72, 80)
@EACH_MODE
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            lambda two: two.apply_gradients(two.grads()),
            r"get_unscaled_gradients was not.* apply the result of get_unscaled_grad",
        ),
        # The gradient of an unscaled loss after a scaled loss that was dropped looks like a scaled gradient.
        (
            lambda two: [two.grads(), two.apply_gradients([tf.constant(3.0)])],
            r"read optimizer.loss_scale before apply_gradients",
        ),
        (lambda two: two.unscale(two.unscale(two.grads())), "unscaled already"),
    ],
)
def test_scaling_and_unscaling_exactly_once(mode, wrong, words):
    """The first step without unscaling is an error, and so is unscaling twice. The next correct step works."""
    two = Two()
    with pytest.raises(CallOrderError, match=words):
        mode(lambda: wrong(two))()
    two.went(0.0)
    mode(lambda: two.step(two.grads()))()
    two.went(1.0)


def _divided_by(read):
    return lambda two: two.apply_gradients([two.grads(2.0)[0] / read(two.optimizer)])


def _partly_unscaled(two):
    with tf.GradientTape() as tape:
        loss = two.optimizer.get_scaled_loss(two.values[0] * 2.0 + two.values[1] * 0.0)
    grads = tape.gradient(loss, two.values)
    two.optimizer.apply_gradients(zip([two.unscale(grads)[0], grads[1]], two.values, strict=True))


MISSING = {
    "partly unscaled": ("some of these gradients were unscaled, and others were", _partly_unscaled),
    "scaled by hand": (SCALED, lambda two: two.step([2.0 * two.optimizer.loss_scale])),
    "scaled by hand, apply": (SCALED, lambda two: two.apply([2.0 * two.optimizer.loss_scale], 0)),
    "divided by loss_scale": (UNSCALED, _divided_by(lambda optimizer: optimizer.loss_scale)),
    "divided by dynamic_scale": (UNSCALED, _divided_by(lambda optimizer: optimizer.dynamic_scale)),
    "divided by scale_state.loss_scale": (UNSCALED, _divided_by(lambda optimizer: optimizer.scale_state.loss_scale)),
    "neither": (f"{SCALED} and {UNSCALED}", lambda two: two.apply_gradients([tf.constant(2.0)])),
}


@pytest.mark.promise(80)
@EACH_MODE
@pytest.mark.parametrize(("calls", "program"), MISSING.values(), ids=MISSING)
def test_a_call_that_is_missing(mode, calls, program):
    """If the caller may have scaled or unscaled itself, the step is applied and counted, and the first step warns."""
    two = Two()
    step = mode(lambda: program(two))
    for is_first in (True, False):
        with pytest.warns(UserWarning, match=f"^{calls} not") if is_first else nullcontext():
            step()
    assert float(two.values[0]) == -4.0
    assert two.optimizer.steps_with_missing_calls == 2


def test_the_call_that_scaled_last_decides():
    """A traced function that scales a loss counts when it runs, not when it is traced."""
    two = Two()
    grads = traced(lambda: two.grads(by="scale_loss"))
    evaluate = traced(lambda: two.optimizer.get_scaled_loss(tf.constant(1.0)))
    grads.get_concrete_function()
    two.apply([3.0 * two.optimizer.dynamic_scale], 0)  # divided by the first scale
    two.apply_gradients([tf.constant(2.0)])  # applied unchanged
    for step in range(1, 4):
        two.apply_gradients(grads())
        two.went(5.0 + step)
        evaluate()
