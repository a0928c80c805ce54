"""Gradients belong to the last loss that was scaled, or to the one that the caller names.

The scale grows after each step, so that gradients divided by a scale of another step would be found by a factor of two.
"""

from tests.adapters.tensorflow_devices import EACH_MODE, STRATEGY, compiled, eager, traced  # noqa: I001
import contextlib
import copy
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import lossscale_tf
from lossscale_core import DynamicScaling
from lossscale_core.errors import CallOrderError
from lossscale_tf import LossScaleOptimizer
from tests.sweeping import few_examples

GROWS = DynamicScaling(init_scale=8.0, growth_interval=1)
pytestmark = pytest.mark.filterwarnings("error::UserWarning")  # right loops are silent


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

    def of_two_tapes(self, first, second, by="get_scaled_loss"):
        """Return the scaled gradients of two losses, of which neither is differentiated before both are scaled."""
        scale = getattr(self.optimizer, by)
        with tf.GradientTape() as first_tape, tf.GradientTape() as second_tape:
            first_loss, second_loss = scale(self.weights[0] * first), scale(self.weights[1] * second)
        return first_tape.gradient(first_loss, self.weights[:1]), second_tape.gradient(second_loss, self.weights[1:])

    def of_one_tape(self, first, second, by="get_scaled_loss"):
        """Return the scaled gradients of one loss of both weights."""
        with tf.GradientTape(persistent=True) as tape:
            loss = getattr(self.optimizer, by)(self.weights[0] * first + self.weights[1] * second)
        return tape.gradient(loss, self.weights[:1]), tape.gradient(loss, self.weights[1:])

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


def _windows_of_four_four_and_two(two):
    for length in (4, 4, 2):
        grads = [two.scaled(0, 1.0)[0] for _ in range(length)]
        two.unscale_and_apply([tf.add_n(grads)], 0)
    two.minimize(0, -2.0)
    two.minimize(1, 5.0)


def _windows_that_grow(two):
    for length in (1, 1, 2, 2, 4):
        grads = [two.unscale(two.scaled(0, 1.0))[0] for _ in range(length)]
        two.apply([tf.add_n(grads)], 0)
    two.minimize(0, -2.0)
    two.minimize(1, 5.0)


def _one_batch_is_given_up(two):
    for batch in range(5):
        grads = two.scaled(0, 2.0)
        if batch == 2:
            continue
        two.unscale_and_apply(grads, 0)
    two.minimize(1, 5.0)


def _one_batch_is_given_up_after_it_was_unscaled(two):
    for batch in range(5):
        (grad,) = two.unscale(two.scaled(0, 2.0))
        if batch != 2:
            two.apply([grad * 1.0], 0)
    two.minimize(1, 5.0)


def _a_gradient_for_a_plot(two):
    for batch in range(4):
        if batch % 2:
            two.scaled(1, 7.0)
        two.unscale_and_apply(two.scaled(0, 2.0), 0)
    two.minimize(1, 5.0)


def _a_gradient_for_a_plot_beside_minimize(two):
    for _ in range(4):
        two.unscale(two.scaled(1, 7.0))
        two.minimize(0, 2.0)
    two.processed(1, 5.0)


def _a_retry_after_an_exception(two):
    for attempt in range(5):
        with contextlib.suppress(InterruptedError):
            grads = two.scaled(0, 2.0)
            if attempt == 1:
                raise InterruptedError
            two.unscale_and_apply(grads, 0)
    two.minimize(1, 5.0)


def _two_losses_unscaled_before_either_is_applied(two):
    first, second = map(two.unscale, two.of_two_tapes(8.0, 5.0))
    two.apply(first, 0)
    two.apply(second, 1)


def _two_losses_interleaved(two):
    first, second = two.of_two_tapes(8.0, 5.0)
    two.unscale_and_apply(first, 0)
    two.unscale_and_apply(second, 1)


def _two_losses_interleaved_and_processed(two):
    first, second = two.of_two_tapes(8.0, 5.0)
    two.apply([two.unscale(first)[0] * 1.0], 0)
    two.apply([two.unscale(second)[0] * 1.0], 1)


def _two_losses_interleaved_by_keras(two):
    first, second = two.of_two_tapes(8.0, 5.0, "scale_loss")
    two.apply(first, 0)
    two.apply(second, 1)


def _minimize_between(two):
    (grad,) = two.scaled(0, 8.0)
    for _ in range(2):
        two.minimize(1, 2.5)
    two.unscale_and_apply([grad * 1.0], 0)


def _minimize_between_scaling_and_applying_by_keras(two):
    first = two.scaled(0, 4.0, "scale_loss")
    two.minimize(0, 4.0)
    two.minimize(1, 5.0)
    two.apply(first, 0)


def _another_network_by_name(two):
    first, loss = two.scaled_and_loss(0, 8.0)
    for _ in range(5):
        two.unscale_and_apply(two.scaled(1, 1.0), 1)
    two.unscale_and_apply(first, 0, loss)


def _whole_steps_while_a_named_loss_of_keras_waits(two):
    first, loss = two.scaled_and_loss(0, 8.0, "scale_loss")
    for _ in range(2):
        two.unscale_and_apply(two.scaled(1, 2.5), 1)
    two.optimizer.apply(first, two.weights[:1], loss=loss)


def _a_pipeline_by_name(two):
    held = None
    for _ in range(5):
        (grad,), loss = two.scaled_and_loss(0, 2.0)
        if held is not None:
            two.unscale_and_apply([held[0] * 1.0], 0, held[1])
        held = grad, loss
    two.minimize(1, 5.0)


def _a_pipeline_of_unscaled_gradients(two):
    held = []
    for batch in range(6):
        grads = two.scaled(0, 2.0)
        if batch > 1:
            two.apply(held.pop(0), 0)
        held.append([two.unscale(grads)[0] * 1.0])
    two.minimize(1, 5.0)


def _compute_gradients_after_keras(two):
    two.apply(two.scaled(0, 3.0, "scale_loss"), 0)
    two.processed(0, 5.0)
    two.processed(1, 5.0)


def _compute_gradients_after_a_loop(two):
    two.unscale_and_apply(two.scaled(0, 3.0), 0)
    two.processed(0, 5.0)
    two.processed(1, 5.0)


def _compute_gradients_of_another_network_before_a_loss_is_unscaled(two):
    first = two.scaled(0, 8.0)
    two.processed(1, 5.0)
    two.unscale_and_apply(first, 0)


def _gradients_for_a_log_in_between(two):
    for weight, gradient, apply in (
        (0, 8.0, lambda grads: two.optimizer.apply(grads, two.weights[:1])),
        (1, 5.0, lambda grads: two.apply(grads, 1)),
    ):
        grads, variables = two.scaled(weight, gradient, "scale_loss"), [two.weights[weight]]
        two.optimizer.get_gradients(lambda weight=weight: two.weights[weight] * 3.0, variables)
        apply(grads)


def _gradients_that_are_not_applied(two):
    two.optimizer.get_gradients(lambda: two.weights[0] * 3.0, two.weights[:1])
    two.optimizer.apply(two.scaled(0, 8.0, "scale_loss"), two.weights[:1])
    two.optimizer.compute_gradients(lambda: two.weights[1] * 3.0, two.weights[1:])
    two.unscale_and_apply(two.scaled(1, 5.0), 1)


def _unscaled_and_applied_later(two):
    (first,) = two.unscale(two.scaled(0, 3.0))
    two.minimize(1, 5.0)
    (second,) = two.unscale(two.scaled(0, 5.0))
    two.apply([first + second], 0)


def _halves_unscaled_and_applied_in_turn(two):
    first, second = two.of_one_tape(8.0, 5.0)
    two.unscale_and_apply(first, 0)
    two.unscale_and_apply(second, 1)


def _halves_unscaled_together_one_processed(two):
    first, second = map(two.unscale, two.of_one_tape(8.0, 2.5))
    two.apply(first, 0)
    two.apply([2.0 * second[0]], 1)


def _halves_applied_by_keras(two):
    first, second = two.of_one_tape(8.0, 5.0, "scale_loss")
    two.optimizer.apply(first, two.weights[:1])
    two.optimizer.apply(second, two.weights[1:])


def _some_gradients_are_processed(two):
    first, second = map(two.unscale, two.of_one_tape(8.0, 10.0))
    two.optimizer.apply_gradients(zip([*first, 0.5 * second[0]], two.weights, strict=True))


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


def _applied_in_either_branch(two):
    for weight, gradient in ((0, 8.0), (1, 5.0)):
        grads = two.scaled(weight, gradient, "scale_loss")
        step = lambda w=weight, g=grads: two.apply(g, w)  # noqa: E731
        tf.cond(two.weights[0] <= 0.0, step, step)


def _micro_batches_in_a_loop_of_the_graph(two):
    def micro_batch(count, total):
        return count + 1, total + two.scaled(0, 2.0)[0]

    _, total = tf.while_loop(lambda count, _: count < 4, micro_batch, (0, tf.constant(0.0)))
    two.unscale_and_apply([total], 0)
    two.minimize(1, 5.0)


@EACH_MODE
@pytest.mark.parametrize(
    "program",
    [
        _windows_of_four_four_and_two,
        _windows_that_grow,
        _one_batch_is_given_up,
        _one_batch_is_given_up_after_it_was_unscaled,
        _a_gradient_for_a_plot,
        _a_gradient_for_a_plot_beside_minimize,
        _a_retry_after_an_exception,
        _two_losses_unscaled_before_either_is_applied,
        _two_losses_interleaved,
        _two_losses_interleaved_and_processed,
        _two_losses_interleaved_by_keras,
        _minimize_between,
        _minimize_between_scaling_and_applying_by_keras,
        _another_network_by_name,
        _whole_steps_while_a_named_loss_of_keras_waits,
        _a_pipeline_by_name,
        _a_pipeline_of_unscaled_gradients,
        _compute_gradients_after_keras,
        _compute_gradients_after_a_loop,
        _compute_gradients_of_another_network_before_a_loss_is_unscaled,
        _gradients_for_a_log_in_between,
        _gradients_that_are_not_applied,
        _unscaled_and_applied_later,
        _halves_unscaled_and_applied_in_turn,
        _halves_unscaled_together_one_processed,
        _halves_applied_by_keras,
        _some_gradients_are_processed,
        _unscaled_for_their_norm_alone,
        _unscaled_in_a_branch,
        _applied_in_either_branch,
        _micro_batches_in_a_loop_of_the_graph,
    ],
)
def test_right_loops(mode, program):
    """The weights go by the true gradients, whatever comes between a loss and its step, and nothing is said."""
    two = Two()
    step = mode(lambda: program(two))
    for calls in (1, 2):
        step()
        two.went(8.0 * calls, 5.0 * calls)


@EACH_MODE
def test_a_loop_of_the_graph_that_takes_steps(mode):
    """`tf.range` over micro-batches, or over whole steps."""
    two = Two()

    def step(_):
        two.unscale_and_apply(two.scaled(0, 2.0), 0)
        return (_ + 1,)

    mode(lambda: tf.while_loop(lambda count: count < 4, step, (0,)))()
    two.went(8.0)


GRADIENT = st.sampled_from([1.0, 2.0, -3.0, 5.0])
WEIGHT = st.integers(0, 1)
WHICH = st.integers(0, 5)
OF_A_LOOP = st.one_of(
    st.tuples(st.just("scale"), WEIGHT, GRADIENT),
    st.tuples(st.just("unscale"), st.booleans()),
    st.tuples(st.just("unscale by name"), WHICH, st.booleans()),
    st.tuples(st.just("apply"), WHICH),
    st.tuples(st.just("give up"), WHICH),
    st.tuples(st.just("minimize"), WEIGHT, GRADIENT),
    st.tuples(st.just("compute"), WEIGHT, GRADIENT),
)
OF_KERAS = st.one_of(
    st.tuples(st.just("scale"), WEIGHT, GRADIENT),
    st.tuples(st.just("apply the last"), st.booleans()),
    st.tuples(st.just("apply by name"), WHICH),
    st.tuples(st.just("minimize"), WEIGHT, GRADIENT),
)


class Drawn(Two):
    """A loop that makes calls in any order, and the weights by the true gradients beside it."""

    def __init__(self, by):
        super().__init__()
        self.by, self.right = by, [0.0, 0.0]

    def run(self, calls):
        """Make the calls that a right loop may make; leave the others out."""
        last, scaled, held = (
            None,
            [],
            [],
        )  # losses with (gradients, loss, weight, true gradient), and unscaled gradients
        for call, *arguments in calls:
            if call == "scale":
                last = (*self.scaled_and_loss(*arguments, self.by), *arguments)
                scaled.append(last)
            elif call == "minimize":
                self.minimize(*arguments)
                self.right[arguments[0]] += arguments[1]
            elif call == "compute":
                weight, gradient = arguments
                pairs = self.optimizer.compute_gradients(lambda w=weight, g=gradient: self.weights[w] * g,
                                                         [self.weights[weight]])  # fmt: skip
                held.append((pairs[0][:1], weight, gradient))
            elif call.startswith("unscale") and scaled and (call != "unscale" or scaled[-1] is last):
                *which, is_processed = arguments
                grads, loss, weight, gradient = scaled.pop(which[0] % len(scaled) if which else -1)
                (grad,) = self.unscale(grads, loss if which else None)
                held.append(([grad * 1.0 if is_processed else grad], weight, gradient))
            elif call == "apply" and held:
                grads, weight, gradient = held.pop(arguments[0] % len(held))
                self.apply(grads, weight)
                self.right[weight] += gradient
            elif call == "give up" and held:
                held.pop(arguments[0] % len(held))
            elif call.startswith("apply ") and scaled and (call != "apply the last" or scaled[-1] is last):
                is_named = call == "apply by name"
                grads, loss, weight, gradient = scaled.pop(arguments[0] % len(scaled) if is_named else -1)
                if is_named or arguments[0]:
                    self.optimizer.apply(grads, [self.weights[weight]], loss=loss if is_named else None)
                else:
                    self.apply(grads, weight)
                self.right[weight] += gradient


@few_examples
@given(program=st.lists(OF_A_LOOP, max_size=12), mode=st.sampled_from([eager, eager, traced]))
def test_any_order_of_calls(program, mode):
    """Scale, unscale, process, apply, give up, and whole steps in between: a right loop is right, and silent."""
    two = Drawn("get_scaled_loss")
    mode(lambda: two.run(program))()
    two.went(*two.right)


@few_examples
@given(program=st.lists(OF_KERAS, max_size=12), mode=st.sampled_from([eager, eager, traced]))
def test_any_order_of_calls_by_keras(program, mode):
    """Scaled losses are applied, given up, applied later by name, with whole steps in between."""
    two = Drawn("scale_loss")
    mode(lambda: two.run(program))()
    two.went(*two.right)


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
    two, (first, second) = Two(), (ThreadPoolExecutor(1) for _ in range(2))
    with first, second:
        three = first.submit(two.scaled, 0, 3.0).result()
        two.optimizer.dynamic_scale.assign(16.0)
        five = second.submit(two.scaled, 0, 5.0).result()
        found = [*first.submit(two.unscale, three).result(), *second.submit(two.unscale, five).result()]
    assert [float(each) for each in found] == [3.0, 5.0]


@pytest.mark.parametrize("by", ["get_scaled_loss", "scale_loss"])
@pytest.mark.parametrize(
    ("scaled_in", "applied_in"),
    [(eager, _in_a_thread), (eager, traced), (traced, eager), (traced, traced), (compiled, compiled)],
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


@pytest.mark.parametrize("by", ["get_scaled_loss", "scale_loss"])
def test_a_function_that_two_traces_call(by):
    """It scales the loss, and is traced within the first of them; both apply its gradients."""
    two = Two()
    scaled = traced(lambda: two.scaled(0, 3.0, by)[0])

    @tf.function(autograph=False)
    def step(name):
        (two.apply if by == "scale_loss" else two.unscale_and_apply)([scaled()], 0)
        return name

    for name in ("first", "second", "first", "second"):
        step(name)
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


def test_replicas_with_two_losses():
    """Two losses are scaled before the first is applied, eagerly and in a graph; and a step is in two runs."""
    with STRATEGY.scope():
        two = Two()

    def interleaved():
        first, second = two.of_two_tapes(0.5, 1.0)
        two.unscale_and_apply(first, 0)
        two.unscale_and_apply(second, 1)

    step = lambda: STRATEGY.run(interleaved)  # noqa: E731
    for each in (step, step, traced(step), traced(step)):
        each()
    assert [float(each.numpy()) for each in two.weights] == [-4.0, -8.0]
    for _ in range(2):
        grads = STRATEGY.run(lambda: two.scaled(0, 0.5))
        STRATEGY.run(lambda: two.minimize(1, 1.0))
        STRATEGY.run(lambda grads: two.unscale_and_apply(grads, 0), args=(grads,))
    assert [float(each.numpy()) for each in two.weights] == [-6.0, -12.0]
    assert two.optimizer.steps_with_missing_calls == 0


@EACH_MODE
def test_a_scaled_loss_whose_gradients_are_not_unscaled(mode):
    """Is refused, at the first step and after right ones; nothing is applied, and the next right step is right."""
    two = Two()
    for steps in (0, 2):
        for _ in range(steps):
            mode(lambda: two.unscale_and_apply(two.scaled(0, 1.0), 0))()
        with pytest.raises(CallOrderError, match=r"get_unscaled_gradients was not; apply what get_unscaled_gradients"):
            mode(lambda: two.apply(two.scaled(0, 1.0), 0))()
        two.went(steps)

    def for_the_norm_alone():
        grads = two.scaled(0, 1.0)
        two.unscale(grads)
        two.apply(grads, 0)

    with pytest.raises(CallOrderError, match="still multiplied by the loss scale"):
        mode(for_the_norm_alone)()
    mode(lambda: two.unscale_and_apply(two.scaled(0, 1.0), 0))()
    two.went(3.0)


def test_a_loss_by_name():
    """It must be one that this optimizer has scaled, and it is scaled once."""
    two, other = Two(), Two()
    grads, loss = two.scaled_and_loss(0, 3.0)
    for wrong in (tf.constant(1.0), other.scaled_and_loss(0, 3.0)[1]):
        with pytest.raises(ValueError, match="was not scaled by this optimizer; pass what scale_loss or get_scaled"):
            two.unscale(grads, wrong)
        with pytest.raises(ValueError, match="was not scaled by this optimizer"):
            two.optimizer.apply(grads, two.weights[:1], loss=wrong)
    for scale in (two.optimizer.scale_loss, two.optimizer.get_scaled_loss):
        with pytest.raises(CallOrderError, match="this loss is scaled already"):
            scale(loss)


def test_a_step_that_fails_leaves_the_loss_as_it_was():
    """The same gradients are applied later, by the scale of their loss, which a whole step has changed since."""
    two = Two()
    grads = two.scaled(0, 3.0, "scale_loss")
    with pytest.raises(tf.errors.InvalidArgumentError, match="shapes must be equal"):
        two.optimizer.apply_gradients([(tf.ones(7), two.weights[0])])
    two.minimize(1, 5.0)
    two.apply(grads, 0)
    two.went(3.0, 5.0)


def test_a_copy_begins_with_a_new_step():
    """Neither threads nor graphs can be copied."""
    two = Two()
    two.scaled(0, 3.0)
    copied = copy.deepcopy(two.optimizer)
    with pytest.warns(UserWarning, match="get_scaled_loss and get_unscaled_gradients not called"):
        copied.apply_gradients([(tf.constant(2.0), two.weights[0])])
    assert copied.steps_with_missing_calls == 1


@EACH_MODE
@pytest.mark.parametrize("by", ["get_scaled_loss", "scale_loss"])
@pytest.mark.parametrize("unscale", [False, True])
def test_keras_entry(mode, by, unscale):
    """`apply` divides scaled gradients, and leaves alone what was unscaled, processed or not."""
    two = Two()

    def step():
        for weight, factor in ((0, 1.0), (1, 0.5)):
            grads = two.scaled(weight, 6.0, by)
            (grad,) = two.unscale(grads) if unscale else grads
            two.optimizer.apply([grad if factor == 1.0 else grad * factor], [two.weights[weight]])

    step = mode(step)
    step()
    step()
    two.went(12.0, 6.0)


def test_keras_entry_without_a_scaled_loss():
    """`apply` divides by the present scale, as Keras's own does, and says so once; under "none" it says nothing."""
    two = Two()
    with pytest.warns(UserWarning, match="get_scaled_loss not called before apply_gradients"):
        two.optimizer.apply([tf.constant(3.0) * two.optimizer.initial_scale], two.weights[:1])
    two.optimizer.apply([tf.constant(3.0) * two.optimizer.loss_scale], two.weights[:1])
    assert float(two.weights[0]) == -6.0
    variable = tf.Variable(0.0)
    LossScaleOptimizer(keras.optimizers.SGD(1.0), "none").apply([tf.constant(3.0)], [variable])
    assert float(variable) == -3.0


# -- what an earlier step leaves over ----------------------------------------------------------------------------------


def _grad_of_scaled(optimizer, variable):
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(variable * 1.0)
    return tape.gradient(loss, variable)


def _one():
    variable = tf.Variable(0.0)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), DynamicScaling(init_scale=1024.0))
    optimizer.build([variable])
    return optimizer, variable


@pytest.mark.parametrize(
    "divide",
    [
        lambda optimizer, grad: grad / optimizer.loss_scale,
        lambda optimizer, grad: lossscale_tf.unscale(grad, optimizer.scale_state),
    ],
    ids=["by hand", "by the verb"],
)
def test_gradients_that_are_divided_by_the_scale_are_not_refused(divide):
    """The caller has read the scale, and may have divided by it."""
    optimizer, variable = _one()
    for step in range(1, 4):
        optimizer.apply_gradients([(divide(optimizer, _grad_of_scaled(optimizer, variable)), variable)])
        assert variable.numpy() == -step


def test_a_trace_that_failed_is_forgotten():
    """Afterwards scaled gradients are refused as before it."""
    optimizer, variable = _one()

    @tf.function
    def step():
        _grad_of_scaled(optimizer, variable)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        step()
    del step
    gc.collect()
    with pytest.raises(CallOrderError):
        optimizer.apply_gradients([(_grad_of_scaled(optimizer, variable) + 0.0, variable)])
    assert variable.numpy() == 0.0


def test_a_processed_step_is_not_remembered():
    """After a step with clipped gradients, scaled ones are refused as before it."""
    optimizer, variable = _one()
    (unscaled,) = optimizer.get_unscaled_gradients([_grad_of_scaled(optimizer, variable)])
    optimizer.apply_gradients([(unscaled * 1.0, variable)])
    with pytest.raises(CallOrderError):
        optimizer.apply_gradients([(_grad_of_scaled(optimizer, variable) + 0.0, variable)])
    assert variable.numpy() == -1.0


def test_the_call_that_scaled_last_decides_in_whatever_order_functions_were_traced():
    """`scale_loss` in one function, `get_scaled_loss` in another that is called in between."""
    optimizer, variable = _one()

    @tf.function
    def grads():
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(variable * 1.0)
        return tape.gradient(loss, variable)

    @tf.function
    def evaluate():
        return optimizer.get_scaled_loss(variable * 1.0)

    for step in range(1, 4):
        optimizer.apply_gradients([(grads(), variable)])
        assert variable.numpy() == -step
        evaluate()


def test_another_thread_does_not_change_the_scale_of_this_ones_loss():
    """Although it scales a loss by a scale that has grown."""
    first, second = tf.Variable(0.0), tf.Variable(0.0)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), DynamicScaling(init_scale=1024.0, growth_interval=1))
    optimizer.build([first, second])
    with tf.GradientTape(persistent=True) as tape:
        loss = optimizer.get_scaled_loss(first + second)
    for variable in (first, second):
        (grad,) = optimizer.get_unscaled_gradients([tape.gradient(loss, variable)])
        optimizer.apply_gradients([(grad, variable)])
        thread = threading.Thread(target=optimizer.get_scaled_loss, args=(tf.constant(1.0),))
        thread.start()
        thread.join()
    assert (first.numpy(), second.numpy()) == (-1.0, -1.0)
