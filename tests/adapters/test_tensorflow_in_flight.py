"""Several scaled losses at once: each gradient is unscaled by what scaled its own loss, or the loss is refused.

The scale grows after each step, so that gradients divided by a scale of another step would be found by a factor of two.
"""

from tests.adapters.tensorflow_devices import EACH_MODE, STRATEGY, eager, traced  # noqa: I001
import contextlib
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from lossscale_core import DynamicScaling
from lossscale_core.errors import CallOrderError
from lossscale_tf import LossScaleOptimizer

GROWS = DynamicScaling(init_scale=8.0, growth_interval=1)


def _in_a_thread(function):
    def run(*args):
        found = []
        thread = threading.Thread(target=lambda: found.append(function(*args)))
        thread.start()
        thread.join()
        return found[0]

    return run


class Two:
    """An optimizer around two weights at zero, and the calls that a loop may make."""

    def __init__(self):
        self.weights = [tf.Variable(0.0), tf.Variable(0.0)]
        self.optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), GROWS)
        self.optimizer.build(self.weights)

    def scaled_and_loss(self, weight, gradient, by="get_scaled_loss"):
        """Return the scaled gradient of a loss, and the loss."""
        with tf.GradientTape() as tape:
            loss = getattr(self.optimizer, by)(self.weights[weight] * gradient)
        return tape.gradient(loss, [self.weights[weight]]), loss

    def scaled(self, weight, gradient, by="get_scaled_loss"):
        """Return the scaled gradient of a loss."""
        return self.scaled_and_loss(weight, gradient, by)[0]

    def together(self, first, second, by="get_scaled_loss"):
        """Return the tape of one scaled loss of both weights, and the loss."""
        with tf.GradientTape(persistent=True) as tape:
            loss = getattr(self.optimizer, by)(self.weights[0] * first + self.weights[1] * second)
        return tape, loss

    def scaled_before_either_is_differentiated(self, first, second):
        """Return the scaled gradients of two losses."""
        with tf.GradientTape() as first_tape, tf.GradientTape() as second_tape:
            first_loss = self.optimizer.get_scaled_loss(self.weights[0] * first)
            second_loss = self.optimizer.get_scaled_loss(self.weights[1] * second)
        return first_tape.gradient(first_loss, self.weights[:1]), second_tape.gradient(second_loss, self.weights[1:])

    def unscale(self, grads, loss=None):
        """Unscale gradients."""
        return self.optimizer.get_unscaled_gradients(grads, loss=loss)

    def apply(self, grads, weight):
        """Apply gradients as they are."""
        self.optimizer.apply_gradients([(grads[0], self.weights[weight])])

    def unscale_and_apply(self, grads, weight, loss=None):
        """Apply scaled gradients as a loop does."""
        self.apply(self.unscale(grads, loss), weight)

    def minimize(self, weight, gradient):
        """Take a whole step, after which the scale is twice what it was."""
        self.optimizer.minimize(lambda: self.weights[weight] * gradient, [self.weights[weight]])

    def processed(self, weight, gradient):
        """Take a step by `compute_gradients`, and process the gradients."""
        pairs = self.optimizer.compute_gradients(lambda: self.weights[weight] * gradient, [self.weights[weight]])
        self.optimizer.apply_gradients([(grad * 1.0, each) for grad, each in pairs])

    def went(self, first, second=0.0):
        """Require that the weights went so far, and that no call was missed."""
        assert [float(each) for each in self.weights] == [-first, -second]
        assert self.optimizer.steps_with_missing_calls == 0


def _both_unscaled_before_either_is_applied(two):
    first, second = map(two.unscale, two.scaled_before_either_is_differentiated(8.0, 5.0))
    two.apply(first, 0)
    two.apply(second, 1)


def _both_unscaled_and_applied_in_turn(two):
    first, second = two.scaled_before_either_is_differentiated(8.0, 5.0)
    two.unscale_and_apply(first, 0)
    two.unscale_and_apply(second, 1)


def _another_network_is_minimized_in_between(two):
    (grad,) = two.scaled(0, 8.0)
    for _ in range(2):
        two.minimize(1, 2.5)
    two.unscale_and_apply([grad * 1.0], 0)


def _another_network_spelled_out(two):
    first, loss = two.scaled_and_loss(0, 8.0)
    for _ in range(5):
        second, second_loss = two.scaled_and_loss(1, 1.0)
        two.unscale_and_apply(second, 1, second_loss)
    two.unscale_and_apply(first, 0, loss)


def _whole_steps_while_a_loss_of_keras_waits(two):
    first = two.scaled(0, 8.0, "scale_loss")
    for _ in range(2):
        two.unscale_and_apply(two.scaled(1, 2.5), 1)
    two.apply(first, 0)


def _compute_gradients_after_keras(two):
    two.apply(two.scaled(0, 3.0, "scale_loss"), 0)
    two.processed(0, 5.0)
    two.processed(1, 5.0)


def _compute_gradients_after_a_loop(two):
    two.unscale_and_apply(two.scaled(0, 3.0), 0)
    two.processed(0, 5.0)
    two.processed(1, 5.0)


def _compute_gradients_in_between(two):
    first = two.scaled(0, 8.0, "scale_loss")
    two.minimize(1, 5.0)
    two.apply(first, 0)


def _gradients_for_a_log_in_between(two):
    for weight, gradient in ((0, 8.0), (1, 5.0)):
        grads, variables = two.scaled(weight, gradient, "scale_loss"), [two.weights[weight]]
        two.optimizer.get_gradients(lambda weight=weight: two.weights[weight] * 3.0, variables)
        two.optimizer.apply(grads, variables)


def _gradients_that_are_not_applied(two):
    two.optimizer.get_gradients(lambda: two.weights[0] * 3.0, two.weights[:1])
    two.optimizer.apply(two.scaled(0, 8.0, "scale_loss"), two.weights[:1])
    two.optimizer.compute_gradients(lambda: two.weights[1] * 3.0, two.weights[1:])
    two.unscale_and_apply(two.scaled(1, 5.0), 1)


def _the_next_loss_before_the_second_is_unscaled(two):
    (first, first_loss), (second, second_loss) = two.scaled_and_loss(0, 3.0), two.scaled_and_loss(1, 5.0)
    two.unscale_and_apply(first, 0, first_loss)
    third, third_loss = two.scaled_and_loss(0, 5.0)
    two.unscale_and_apply(second, 1, second_loss)
    two.unscale_and_apply(third, 0, third_loss)


def _a_loss_that_is_only_logged(two):
    two.optimizer.get_scaled_loss(two.weights[0] * 7.0)
    two.minimize(1, 5.0)
    two.unscale_and_apply(two.scaled(0, 8.0), 0)


def _a_loss_that_was_given_up(two):
    two.scaled(0, 7.0)
    two.optimizer.forget_losses()
    two.minimize(1, 5.0)
    two.unscale_and_apply(two.scaled(0, 8.0), 0)


def _unscaled_and_applied_later(two):
    (first,) = two.unscale(two.scaled(0, 3.0))
    two.minimize(1, 5.0)
    (second,) = two.unscale(two.scaled(0, 5.0))
    two.apply([first + second], 0)


def _micro_batches_unscaled_at_once(two):
    grads, losses = zip(*[two.scaled_and_loss(0, 1.0) for _ in range(3)], strict=True)
    (first,) = two.unscale([tf.add_n([grad for (grad,) in grads])], losses[-1])
    two.minimize(1, 5.0)
    (second,) = two.unscale(*two.scaled_and_loss(0, 5.0))
    two.apply([first + second], 0)


def _halves_unscaled_and_applied_in_turn(two):
    tape, loss = two.together(8.0, 5.0)
    two.unscale_and_apply(tape.gradient(loss, two.weights[:1]), 0)
    two.unscale_and_apply(tape.gradient(loss, two.weights[1:]), 1)


def _halves_unscaled_in_turn_one_processed(two):
    tape, loss = two.together(8.0, 2.5)
    grads = tape.gradient(loss, two.weights)
    first, second = two.unscale(grads[:1]), two.unscale([2.0 * grads[1]])
    two.apply(first, 0)
    two.apply(second, 1)


def _halves_with_a_step_in_between(two):
    tape, loss = two.together(3.0, 5.0)
    first, second = tape.gradient(loss, two.weights[:1]), tape.gradient(loss, two.weights[1:])
    two.unscale_and_apply(first, 0)
    third, third_loss = two.scaled_and_loss(0, 5.0)
    two.unscale_and_apply(third, 0, third_loss)
    two.unscale_and_apply(second, 1, loss)


def _halves_applied_by_keras(two):
    tape, loss = two.together(8.0, 5.0, "scale_loss")
    grads = tape.gradient(loss, two.weights)
    two.optimizer.apply(grads[:1], two.weights[:1])
    two.optimizer.apply(grads[1:], two.weights[1:])


def _some_gradients_are_processed(two):
    tape, loss = two.together(8.0, 10.0)
    first, second = two.unscale(tape.gradient(loss, two.weights))
    two.optimizer.apply_gradients(zip([first, 0.5 * second], two.weights, strict=True))


def _unscaled_for_their_norm_alone(two):
    for weight, gradient, by in ((0, 8.0, "scale_loss"), (1, 5.0, "get_scaled_loss")):
        grads = two.scaled(weight, gradient, by)
        tf.linalg.global_norm(two.unscale(grads))
        two.optimizer.apply(grads, [two.weights[weight]])


def _unscaled_in_a_branch(two):
    for weight, gradient in ((0, 4.0), (1, 5.0), (0, 4.0)):
        unscale = lambda grads: two.unscale(grads)[0]  # noqa: E731
        grads = two.scaled(weight, gradient)
        grad = tf.cond(two.weights[0] <= 0.0, lambda g=grads, u=unscale: u(g), lambda: tf.constant(0.0))
        two.apply([grad], weight)


@EACH_MODE
@pytest.mark.parametrize(
    "program",
    [
        _both_unscaled_before_either_is_applied,
        _both_unscaled_and_applied_in_turn,
        _another_network_is_minimized_in_between,
        _another_network_spelled_out,
        _whole_steps_while_a_loss_of_keras_waits,
        _compute_gradients_after_keras,
        _compute_gradients_after_a_loop,
        _compute_gradients_in_between,
        _gradients_for_a_log_in_between,
        _gradients_that_are_not_applied,
        _the_next_loss_before_the_second_is_unscaled,
        _a_loss_that_is_only_logged,
        _a_loss_that_was_given_up,
        _unscaled_and_applied_later,
        _micro_batches_unscaled_at_once,
        _halves_unscaled_and_applied_in_turn,
        _halves_unscaled_in_turn_one_processed,
        _halves_with_a_step_in_between,
        _halves_applied_by_keras,
        _some_gradients_are_processed,
        _unscaled_for_their_norm_alone,
        _unscaled_in_a_branch,
    ],
)
def test_programs_of_two_weights(mode, program):
    """The weights go by the true gradients, whatever comes between a loss and its step, and no call is missing."""
    two = Two()
    step = mode(lambda: program(two))
    for calls in (1, 2):
        step()
        two.went(8.0 * calls, 5.0 * calls)


@EACH_MODE
@pytest.mark.parametrize("named", [True, False])
def test_a_pipeline(mode, named):
    """Each step applies the processed gradients of the step before: right by the name of the loss, else refused.

    After a refusal and `forget_losses` all is right again.
    """
    two = Two()

    def steps():
        held = None
        for _ in range(4):
            (grad,), loss = two.scaled_and_loss(0, 3.0)
            if held is not None:
                two.unscale_and_apply(held[:1], 0, held[1] if named else None)
            held = grad * 1.0, loss

    is_known = named or mode is traced  # in a graph the operations tell which loss it was
    refused = pytest.raises(CallOrderError, match=r"at two scales.*loss=scaled_loss.*forget_losses\(\)")
    with contextlib.nullcontext() if is_known else refused:
        mode(steps)()
    two.went(9.0 if is_known else 3.0)
    two.optimizer.forget_losses()
    mode(lambda: two.unscale_and_apply(two.scaled(1, 5.0), 1))()
    two.went(9.0 if is_known else 3.0, 5.0)
    with pytest.raises(ValueError, match="was not scaled by this optimizer"):
        two.unscale(two.scaled(0, 3.0), tf.constant(1.0))


@EACH_MODE
@pytest.mark.parametrize("each", [True, False], ids=["unscaled each", "unscaled once"])
def test_gradients_are_accumulated(mode, each):
    """Two micro-batches a step, in functions that are traced apart; each is unscaled by itself, or their sum is."""
    two, total = Two(), tf.Variable(0.0)

    def micro_batch():
        grads = two.scaled(0, 3.0)
        total.assign_add((two.unscale(grads) if each else grads)[0])

    def step():
        grads = [tf.convert_to_tensor(total)]
        two.apply(grads if each else two.unscale(grads), 0)
        total.assign(0.0)

    micro_batch, step = mode(micro_batch), mode(step)
    for _ in range(3):
        micro_batch()
        micro_batch()
        step()
    two.went(18.0)


# Keras's own: https://github.com/keras-team/keras/blob/v3.15.1/keras/src/backend/tensorflow/core.py
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_another_state_ends_the_step_that_was_begun(tmp_path):
    """A step is interrupted, and a state with another scale is loaded: a dict, a file of Keras's, a checkpoint."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.0), GROWS), "mse")
    model.fit(np.ones((2, 1)), np.ones((2, 1)), batch_size=1, verbose=0)
    model.save(tmp_path / "model.keras")
    saved = model.optimizer.state_dict()
    checkpoint = tf.train.Checkpoint(optimizer=model.optimizer)
    written = checkpoint.write(tmp_path / "checkpoint")
    variable = tf.Variable(1.0)

    def scaled_gradient():
        with tf.GradientTape() as tape:
            scaled = model.optimizer.get_scaled_loss(variable * 3.0)
        return tape.gradient(scaled, [variable])

    for load in (
        lambda: checkpoint.read(written).assert_consumed(),
        lambda: model.optimizer.load_state_dict(saved),
        lambda: model.load_weights(tmp_path / "model.keras"),
    ):
        model.optimizer.load_state_dict({**saved, "loss_scale": 4.0})
        scaled_gradient()
        load()
        assert float(model.optimizer.loss_scale) == 32.0
        assert model.optimizer.get_unscaled_gradients(scaled_gradient()) == [3.0]


def test_two_threads():
    """Each thread's gradient is unscaled by the scale that it used, whatever the other does in between."""
    two, scaled, grown, found = Two(), threading.Event(), threading.Event(), []

    def first():
        grads = two.scaled(0, 3.0)
        scaled.set()
        grown.wait(30)
        found.extend(two.unscale(grads))

    def second():
        scaled.wait(30)
        two.optimizer.dynamic_scale.assign(16.0)
        grads = two.scaled(0, 5.0)
        grown.set()
        found.extend(two.unscale(grads))

    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(float, found)) == [3.0, 5.0]


@pytest.mark.parametrize("by", ["get_scaled_loss", "scale_loss"])
@pytest.mark.parametrize(
    ("scaled_in", "applied_in"),
    [(eager, _in_a_thread), (eager, traced), (traced, eager), (traced, traced)],
)
def test_gradients_that_another_place_applies(by, scaled_in, applied_in):
    """Scaled in one place, applied in another, and the scale is set in between: each step is right."""
    two = Two()
    scaled = scaled_in(lambda: two.scaled(0, 3.0, by))
    apply = applied_in(lambda grads: (two.apply if by == "scale_loss" else two.unscale_and_apply)(grads, 0))
    for _ in range(4):
        grads = scaled()
        two.optimizer.dynamic_scale.assign(64.0)
        apply(grads)
    two.went(12.0)


def test_gradients_from_other_threads():
    """A thread that scales nothing unscales by the last scale that was used."""
    two = Two()
    for scale in (16.0, 32.0):
        grads = _in_a_thread(two.scaled)(0, 3.0)
        two.optimizer.dynamic_scale.assign(scale)
        assert two.unscale(grads) == [3.0]


def test_a_micro_batch_outside_of_the_function_that_takes_the_step():
    """The function scales the last micro-batch, and unscales the sum."""
    two = Two()
    last = traced(lambda total: two.unscale_and_apply([total + two.scaled(0, 3.0)[0]], 0))
    for _ in range(4):
        last(two.scaled(0, 3.0)[0])
    assert float(two.weights[0]) == -24.0


@EACH_MODE
def test_a_loss_that_was_multiplied_by_hand(mode):
    """Its gradients are unscaled by the present scale if no loss was scaled yet; the missing call is counted."""
    two = Two()

    def step():
        with tf.GradientTape() as tape:
            loss = two.weights[0] * 3.0 * two.optimizer.loss_scale
        two.unscale_and_apply(tape.gradient(loss, two.weights[:1]), 0)

    step = mode(step)
    with pytest.warns(UserWarning, match="get_scaled_loss not called"):
        step()
    step()
    assert float(two.weights[0]) == -6.0
    assert two.optimizer.steps_with_missing_calls == 2


@EACH_MODE
@pytest.mark.parametrize("by", ["get_scaled_loss", "scale_loss"])
def test_gradients_among_which_are_constants(mode, by):
    """TensorFlow keeps zeros for variables that the loss does not depend on, which are older than the loss."""
    variables = [tf.Variable([1.0] * 4), tf.Variable([2.0] * 4)]
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), GROWS)
    optimizer.build(variables)

    def step():
        with tf.GradientTape() as tape:
            first, _ = tf.identity_n(variables)
            loss = getattr(optimizer, by)(tf.reduce_sum(first * 3.0))
        grads = tape.gradient(loss, variables)
        grads = grads if by == "scale_loss" else optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients(zip(grads, variables, strict=True))

    step = mode(step)
    for _ in range(4):
        step()
    np.testing.assert_array_equal(variables, [[-11.0] * 4, [2.0] * 4])


@EACH_MODE
def test_variables_of_keras_and_their_values(mode):
    """They are the same variable, by whichever it is named."""
    weight = keras.Variable(0.0)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), GROWS)
    optimizer.build([weight])

    def step():
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(weight * 3.0)
        optimizer.apply_gradients([(tape.gradient(loss, weight.value), weight)])
        (grad,) = optimizer.get_gradients(lambda: weight * 5.0, [weight.value])
        optimizer.apply_gradients([(grad * 1.0, weight)])

    step = mode(step)
    step()
    step()
    assert float(weight.value) == -16.0
    assert optimizer.steps_with_missing_calls == 0


def test_replicas():
    """Eagerly and in a graph, each replica's gradients are its own."""
    with STRATEGY.scope():
        two = Two()
    step = lambda: STRATEGY.run(lambda: two.unscale_and_apply(two.scaled(0, 0.5), 0))  # noqa: E731
    for each in (step, step, traced(step), traced(step)):
        each()
    assert float(two.weights[0].numpy()) == -4.0


def test_keras_entry_without_a_scaled_loss():
    """`apply` of gradients that were multiplied by hand is refused, since they look like unscaled ones."""
    two = Two()
    with pytest.raises(CallOrderError, match=r"scale the loss by scale_loss, or .* apply_gradients"):
        two.optimizer.apply([tf.constant(1.0) * two.optimizer.initial_scale], two.weights[:1])
    two.went(0.0)


@EACH_MODE
@pytest.mark.parametrize("unscale", [False, True])
def test_keras_entry_after_get_scaled_loss(mode, unscale):
    """`apply` unscales what was scaled, and leaves alone what was unscaled; a whole step later it is refused."""
    two = Two()

    def step():
        grads = two.scaled(0, 3.0)
        two.optimizer.apply(two.unscale(grads) if unscale else grads, two.weights[:1])

    step = mode(step)
    step()
    step()
    two.went(6.0)
    with pytest.raises(CallOrderError, match="scaled no loss for them"):
        two.optimizer.apply([tf.constant(1.0)], two.weights[:1])


def test_keras_entry_without_scaling():
    """Under a policy that scales nothing, `apply` takes gradients as they are."""
    variable = tf.Variable(0.0)
    LossScaleOptimizer(keras.optimizers.SGD(1.0), "none").apply([tf.constant(3.0)], [variable])
    assert float(variable) == -3.0
