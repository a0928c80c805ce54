"""Loops that users write around one Keras optimizer: each trains by the true gradients, eagerly and traced.

The scale grows after each step, so that gradients divided by a scale of another step would be found by a factor of two.
"""

import warnings

import keras
import pytest
import tensorflow as tf

from lossscale_core import DynamicScaling
from lossscale_tf import LossScaleOptimizer

GROWS = DynamicScaling(init_scale=8.0, growth_interval=1)
FIRST, SECOND = 3.0, 5.0
"""The gradients of the two losses, and with a learning rate of 1 the way of each weight in a step."""


@pytest.fixture(params=["eager", "traced"])
def compiled(request):
    """Return a function that traces a step, or leaves it as it is."""
    return (lambda step: tf.function(step, autograph=False)) if request.param == "traced" else (lambda step: step)


class Loop:
    """One optimizer around two weights at zero, and the losses of both."""

    def __init__(self):
        self.first, self.second = tf.Variable(0.0), tf.Variable(0.0)
        self.sum = tf.Variable(0.0)
        self.optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), GROWS)
        self.optimizer.build([self.first, self.second])

    def scaled_gradient(self, weight, gradient):
        """Return the gradient of one loss, scaled."""
        with tf.GradientTape() as tape:
            loss = self.optimizer.get_scaled_loss(weight * gradient)
        return tape.gradient(loss, [weight])

    def both_scaled_gradients(self):
        """Return the gradients of both losses, which are scaled before either of them is differentiated."""
        with tf.GradientTape() as first_tape, tf.GradientTape() as second_tape:
            first = self.optimizer.get_scaled_loss(self.first * FIRST)
            second = self.optimizer.get_scaled_loss(self.second * SECOND)
        return first_tape.gradient(first, [self.first]), second_tape.gradient(second, [self.second])

    def unscaled(self, grads):
        """Return gradients, unscaled."""
        return self.optimizer.get_unscaled_gradients(grads)

    def apply(self, grads, *weights):
        """Apply unscaled gradients."""
        self.optimizer.apply_gradients(zip(grads, weights, strict=True))

    def went(self, first, second, updates):
        """Require that the weights went so far, that so many updates were counted, and that no call was missed."""
        assert (float(self.first), float(self.second)) == (-first, -second)
        assert float(self.optimizer.loss_scale) == 8.0 * 2.0**updates
        assert self.optimizer.steps_with_missing_calls == 0


@pytest.fixture
def loop():
    """Return a loop before its first step."""
    return Loop()


def test_two_losses_unscaled_before_either_is_applied(loop, compiled):
    """As a GAN trains its two networks by one optimizer."""

    def step():
        first, second = loop.both_scaled_gradients()
        first, second = loop.unscaled(first), loop.unscaled(second)
        loop.apply(first, loop.first)
        loop.apply(second, loop.second)

    step = compiled(step)
    for _ in range(2):
        step()
    loop.went(2 * FIRST, 2 * SECOND, updates=4)


def test_two_losses_unscaled_and_applied_one_after_the_other(loop, compiled):
    """The second is unscaled after the scale has grown, by the scale that multiplied its loss."""

    def step():
        first, second = loop.both_scaled_gradients()
        loop.apply(loop.unscaled(first), loop.first)
        loop.apply(loop.unscaled(second), loop.second)

    step = compiled(step)
    for _ in range(2):
        step()
    loop.went(2 * FIRST, 2 * SECOND, updates=4)


def test_another_network_is_minimized_in_between(loop, compiled):
    """Between the backward pass of a loss and its `apply_gradients`, twice."""

    def step():
        grads = loop.scaled_gradient(loop.first, FIRST)
        for _ in range(2):
            loop.optimizer.minimize(lambda: loop.second * SECOND, [loop.second])
        loop.apply(loop.unscaled(grads), loop.first)

    compiled(step)()
    loop.went(FIRST, 2 * SECOND, updates=3)


def test_a_persistent_tape(loop, compiled):
    """The gradients of one scaled loss are taken and applied in two halves."""

    def step():
        with tf.GradientTape(persistent=True) as tape:
            loss = loop.optimizer.get_scaled_loss(loop.first * FIRST + loop.second * SECOND)
        loop.apply(loop.unscaled(tape.gradient(loss, [loop.first])), loop.first)
        loop.apply(loop.unscaled(tape.gradient(loss, [loop.second])), loop.second)

    step = compiled(step)
    for _ in range(2):
        step()
    loop.went(2 * FIRST, 2 * SECOND, updates=4)


@pytest.mark.parametrize("each", [True, False], ids=["unscaled each", "unscaled once"])
def test_gradients_are_accumulated(loop, compiled, each):
    """Two micro-batches a step, in functions that are traced apart; each is unscaled by itself, or their sum is."""

    def micro_batch():
        grads = loop.scaled_gradient(loop.first, FIRST)
        loop.sum.assign_add((loop.unscaled(grads) if each else grads)[0])

    def step():
        total = [tf.convert_to_tensor(loop.sum)]
        loop.apply(total if each else loop.unscaled(total), loop.first)
        loop.sum.assign(0.0)

    micro_batch, step = compiled(micro_batch), compiled(step)
    for _ in range(3):
        micro_batch()
        micro_batch()
        step()
    loop.went(6 * FIRST, 0.0, updates=3)


def test_an_interruption_and_a_restored_scale(loop, compiled):
    """A loss was scaled, the loop was interrupted, and another scale was loaded: the next step is right."""
    backward = compiled(lambda: loop.scaled_gradient(loop.first, FIRST))
    saved = {**loop.optimizer.state_dict(), "loss_scale": 64.0}
    backward()
    loop.optimizer.load_state_dict(saved)
    loop.apply(loop.unscaled(backward()), loop.first)
    assert float(loop.first) == -FIRST


def test_a_missed_call_after_whole_steps_is_counted(loop, compiled):
    """Gradients that were not unscaled are distinguished from those that were, each time."""
    good = compiled(lambda: loop.apply(loop.unscaled(loop.scaled_gradient(loop.first, FIRST)), loop.first))
    bad = compiled(lambda: loop.apply([tf.constant(1.0)], loop.first))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            good()
            bad()
    assert loop.optimizer.steps_with_missing_calls == 2
    assert any("get_scaled_loss and get_unscaled_gradients" in str(each.message) for each in caught)
