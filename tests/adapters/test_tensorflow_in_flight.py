"""Several scaled losses at once: each gradient is unscaled by what scaled its own loss, or is refused."""

from tests.adapters.tensorflow_devices import STRATEGY  # noqa: I001
import gc
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from lossscale_core import DynamicScaling
from lossscale_core.errors import CallOrderError
from lossscale_tf import LossScaleOptimizer

GROWS = DynamicScaling(init_scale=8.0, growth_interval=1)
"""Doubles after every step."""
VARIABLE = tf.Variable(1.0)


@pytest.fixture
def optimizer():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), GROWS)
    optimizer.build([VARIABLE])
    return optimizer


def _grow(optimizer):
    optimizer.dynamic_scale.assign(2.0 * optimizer.dynamic_scale)


def _gradient(optimizer, scale="get_scaled_loss"):
    """Return a scaled gradient whose tape and loss are gone; unscaled it is 3."""
    with tf.GradientTape() as tape:
        scaled = getattr(optimizer, scale)(VARIABLE * 3.0)
    return tape.gradient(scaled, VARIABLE)


def _unscaled(optimizer, grad):
    return float(optimizer.get_unscaled_gradients([grad])[0])


def test_a_gradient_waits_while_another_loss_is_scaled(optimizer):
    """Each is divided by the scale of its own loss, eagerly, in the order in which they were made."""
    first = _gradient(optimizer)
    _grow(optimizer)
    second = _gradient(optimizer)
    assert (_unscaled(optimizer, first), _unscaled(optimizer, second)) == (3.0, 3.0)


def test_a_gradient_waits_while_minimize_grows_the_scale():
    """The whole step in between, and a loss scaled after it, change nothing."""
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), GROWS)
    other = tf.Variable(1.0)
    first = _gradient(optimizer)
    optimizer.minimize(lambda: other * 2.0, [other])
    second = _gradient(optimizer)
    assert float(optimizer.loss_scale) == 16.0
    assert (_unscaled(optimizer, first), _unscaled(optimizer, second)) == (3.0, 3.0)


def test_losses_scaled_before_either_is_differentiated(optimizer):
    """The tapes say whose gradient it is."""
    with tf.GradientTape() as first_tape:
        first = optimizer.get_scaled_loss(VARIABLE * 3.0)
    _grow(optimizer)
    with tf.GradientTape() as second_tape:
        second = optimizer.get_scaled_loss(VARIABLE * 3.0)
    for tape, scaled in ((first_tape, first), (second_tape, second)):
        assert _unscaled(optimizer, tape.gradient(scaled, VARIABLE)) == 3.0


@pytest.mark.parametrize("process", [lambda first, second: first * 0.5, lambda first, second: first + second])
def test_what_cannot_be_told_is_refused(optimizer, process):
    """A gradient that was processed or added to another one, while two of different scales wait; the next is right."""
    first = _gradient(optimizer)
    _grow(optimizer)
    second = _gradient(optimizer)
    with pytest.raises(CallOrderError, match="different loss scales"):
        _unscaled(optimizer, process(first, second))
    assert _unscaled(optimizer, _gradient(optimizer)) == 3.0


def test_gradients_of_two_losses_in_one_call_are_refused(optimizer):
    """They have no one scale."""
    first = _gradient(optimizer)
    _grow(optimizer)
    with pytest.raises(CallOrderError, match="different loss scales"):
        optimizer.get_unscaled_gradients([first, _gradient(optimizer)])


@pytest.mark.parametrize("differentiated", [False, True])
def test_a_dropped_loss_stops_nobody(optimizer, differentiated):
    """A batch that was skipped, before or after its gradient was taken, is not in flight when the scale is another."""

    def step():
        assert _unscaled(optimizer, _gradient(optimizer)) == 3.0

    def skipped():
        with tf.GradientTape() as tape:
            scaled = optimizer.get_scaled_loss(VARIABLE * 3.0)
        if differentiated:
            tape.gradient(scaled, VARIABLE)

    skipped()
    gc.collect()
    if differentiated:
        step()  # by the same scale
    _grow(optimizer)
    step()


def test_losses_of_one_scale_are_added_up(optimizer):
    """Micro-batches are unscaled at once, step after step."""
    for _ in range(3):
        total = tf.add_n([_gradient(optimizer) for _ in range(4)])
        (grad,) = optimizer.get_unscaled_gradients([total])
        assert float(grad) == 12.0
        optimizer.apply_gradients([(grad, VARIABLE)])


def test_keras_own_entry():
    """`apply` unscales by what `scale_loss` multiplied with, too."""
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), GROWS)
    first, second = tf.Variable(0.0), tf.Variable(0.0)
    optimizer.build([first, second])
    waiting = _gradient(optimizer, "scale_loss")
    _grow(optimizer)
    latest = _gradient(optimizer, "scale_loss")
    optimizer.apply([waiting], [first])
    optimizer.apply([latest], [second])
    assert (float(first), float(second)) == (-3.0, -3.0)


def test_two_threads(optimizer):
    """Each thread's gradient is unscaled by the scale that it used, whatever the other does in between."""
    scaled, grown, found = threading.Event(), threading.Event(), []

    def first():
        grad = _gradient(optimizer)
        scaled.set()
        grown.wait(30)
        found.append(_unscaled(optimizer, grad))

    def second():
        scaled.wait(30)
        _grow(optimizer)
        grad = _gradient(optimizer)
        grown.set()
        found.append(_unscaled(optimizer, grad))

    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [3.0, 3.0]


def test_gradients_from_other_threads(optimizer):
    """A thread that scales nothing unscales what others scaled, or is refused where their scales differ."""

    def from_a_thread():
        found = []
        thread = threading.Thread(target=lambda: found.append(_gradient(optimizer)))
        thread.start()
        thread.join()
        return found[0]

    first = from_a_thread()
    _grow(optimizer)
    assert _unscaled(optimizer, first) == 3.0
    first, _ = from_a_thread(), _grow(optimizer)
    second = from_a_thread()
    with pytest.raises(CallOrderError, match="different loss scales"):
        _unscaled(optimizer, first + second)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_in_one_trace(jit_compile):
    """The graph says whose gradient it is, in any order, processed or not; a sum of different scales is refused."""
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), GROWS)
    x, y, z = tf.Variable(1.0), tf.Variable(1.0), tf.Variable(1.0)
    optimizer.build([x, y, z])

    def three_losses(add=False):
        with tf.GradientTape(persistent=True) as tape:
            first = optimizer.get_scaled_loss(x * 3.0)
        waiting = tape.gradient(first, x)
        optimizer.minimize(lambda: y * 1.0, [y])  # the scale doubles
        with tf.GradientTape() as other:
            second = optimizer.get_scaled_loss(z * 3.0)
        latest = other.gradient(second, z)
        if add:
            return optimizer.get_unscaled_gradients([latest + waiting])
        return optimizer.get_unscaled_gradients([waiting * 1.0]) + optimizer.get_unscaled_gradients([latest])

    step = tf.function(three_losses, autograph=False, jit_compile=jit_compile)
    for _ in range(3):
        assert [float(each) for each in step()] == [3.0, 3.0]
    with pytest.raises(CallOrderError, match="different loss scales"):
        step(add=True)


def test_several_steps_in_one_trace(optimizer):
    """Python's own loop in a `tf.function`: each step is unscaled by its own scale, in a branch, too."""

    @tf.function(autograph=False)
    def steps():
        found = []
        for _ in range(3):
            with tf.GradientTape() as tape:
                scaled = optimizer.get_scaled_loss(VARIABLE * 3.0)
            grad = tape.gradient(scaled, VARIABLE)
            unscale = lambda grad=grad: optimizer.get_unscaled_gradients([grad])[0]  # noqa: E731
            grad = tf.cond(VARIABLE > 0.0, unscale, lambda: tf.constant(0.0))
            optimizer.apply_gradients([(grad, VARIABLE)])
            found.append(grad)
        return found

    assert [float(each) for each in steps()] == [3.0] * 3
    assert float(optimizer.loss_scale) == 64.0


def test_replicas():
    """Eagerly and in a graph, each replica's gradients are its own."""
    with STRATEGY.scope():
        variable, optimizer = tf.Variable(0.0), LossScaleOptimizer(keras.optimizers.SGD(1.0), GROWS)

    def step():
        def on_replica():
            with tf.GradientTape() as tape:
                scaled = optimizer.get_scaled_loss(variable * 0.5)
            (grad,) = optimizer.get_unscaled_gradients([tape.gradient(scaled, variable)])
            optimizer.apply_gradients([(grad, variable)])

        STRATEGY.run(on_replica)

    for each in (step, step, tf.function(step, autograph=False), tf.function(step, autograph=False)):
        each()
    assert float(variable.numpy()) == -4.0


@pytest.mark.parametrize("graph", [False, True])
def test_unscaled_processed_and_unscaled_again(graph, optimizer):
    """Is an error, though the clip in between makes new tensors; two networks' gradients of one loss are not."""
    variables = [tf.Variable([1.0]), tf.Variable([1.0, 2.0])]

    def step(twice):
        with tf.GradientTape() as tape:
            scaled = optimizer.get_scaled_loss(tf.add_n([3.0 * tf.reduce_sum(each) for each in variables]))
        grads = tape.gradient(scaled, variables)
        first = optimizer.get_unscaled_gradients(grads[:1])
        clipped, _ = tf.clip_by_global_norm(first, 1e6)
        return optimizer.get_unscaled_gradients(clipped if twice else [2.0 * grads[1]])

    step = tf.function(step, autograph=False) if graph else step
    for _ in range(3):
        np.testing.assert_array_equal(step(False)[0], [6.0, 6.0])
    with pytest.raises(CallOrderError, match="unscaled already"):
        step(True)


def test_keras_entry_without_a_scaled_loss():
    """`apply` of gradients that were multiplied by hand is refused, since nothing tells them from unscaled ones."""
    variable = tf.Variable(1.0)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), GROWS)
    with pytest.raises(CallOrderError, match=r"scale the loss by scale_loss, or .* apply_gradients"):
        optimizer.apply([tf.constant(1.0) * optimizer.initial_scale], [variable])
    assert float(variable) == 1.0


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_keras_entry_after_get_scaled_loss(graph, unscale):
    """`apply` unscales what was scaled, and leaves alone what was unscaled; a whole step later it is refused."""
    variable = tf.Variable(0.0)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), GROWS)
    optimizer.build([variable])

    def step():
        with tf.GradientTape() as tape:
            scaled = optimizer.get_scaled_loss(variable * 3.0)
        grads = tape.gradient(scaled, [variable])
        optimizer.apply(optimizer.get_unscaled_gradients(grads) if unscale else grads, [variable])

    step = tf.function(step, autograph=False) if graph else step
    step()
    step()
    assert float(variable) == -6.0
    assert optimizer.steps_with_missing_calls == 0
    with pytest.raises(CallOrderError, match="scaled no loss for them"):
        optimizer.apply([tf.constant(1.0)], [variable])


def test_keras_entry_without_scaling():
    """Under a policy that scales nothing, `apply` takes gradients as they are."""
    variable = tf.Variable(0.0)
    LossScaleOptimizer(keras.optimizers.SGD(1.0), "none").apply([tf.constant(3.0)], [variable])
    assert float(variable) == -3.0
