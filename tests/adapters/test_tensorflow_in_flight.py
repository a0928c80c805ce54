"""Several scaled losses at once: each gradient is unscaled by what scaled its own loss, or the loss is refused."""

from tests.adapters.tensorflow_devices import STRATEGY  # noqa: I001
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
    """Return a scaled gradient without its tape and loss; unscaled it is 3."""
    with tf.GradientTape() as tape:
        scaled = getattr(optimizer, scale)(VARIABLE * 3.0)
    return tape.gradient(scaled, VARIABLE)


def _unscaled(optimizer, grad):
    return float(optimizer.get_unscaled_gradients([grad])[0])


EACH_MODE = pytest.mark.parametrize(
    "mode", [lambda step: step, lambda step: tf.function(step, autograph=False)], ids=["eager", "traced"]
)
OTHER = tf.Variable(1.0)


def _minimize_another(optimizer):
    """Take a whole step, after which the scale is twice what it was."""
    optimizer.minimize(lambda: OTHER * 2.0, [OTHER])


@pytest.fixture
def both(optimizer):
    """Return an optimizer that is built for both variables."""
    both = LossScaleOptimizer(keras.optimizers.SGD(0.0), GROWS)
    both.build([VARIABLE, OTHER])
    return both


@EACH_MODE
def test_two_losses_at_two_scales_have_to_be_named(both, mode):
    """Without their names the gradients are refused, and nothing else is; after `forget_losses` all is right again."""

    def step(named):
        with tf.GradientTape() as tape:
            first = both.get_scaled_loss(VARIABLE * 3.0)
        grad = tape.gradient(first, VARIABLE)
        _minimize_another(both)
        with tf.GradientTape() as tape:
            second = both.get_scaled_loss(VARIABLE * 3.0)
        grads = [(grad, first), (tape.gradient(second, VARIABLE), second)]
        return [both.get_unscaled_gradients([each * 1.0], loss=loss if named else None)[0] for each, loss in grads]

    for _ in range(2):
        assert mode(step)(True) == [3.0, 3.0]
    if mode(step) is not step:  # in a graph the operations tell which loss it was
        assert mode(step)(False) == [3.0, 3.0]
        return
    with pytest.raises(CallOrderError, match=r"loss=scaled_loss.*forget_losses\(\)"):
        step(False)
    both.forget_losses()
    (grad,) = mode(lambda: both.get_unscaled_gradients([_gradient(both)]))()
    assert float(grad) == 3.0
    with pytest.raises(ValueError, match="was not scaled by this optimizer"):
        both.get_unscaled_gradients([_gradient(both)], loss=tf.constant(1.0))


@EACH_MODE
@pytest.mark.parametrize("named", [True, False])
def test_a_pipeline(mode, named):
    """Each step applies the processed gradients of the step before: right by the name of the loss, else refused."""
    two = Two()

    def steps():
        held = None
        for _ in range(4):
            with tf.GradientTape() as tape:
                loss = two.optimizer.get_scaled_loss(two.weights[0] * 3.0)
            grad = tape.gradient(loss, two.weights[0]) * 1.0
            if held is not None:
                two.apply(two.optimizer.get_unscaled_gradients(held[:1], loss=held[1] if named else None), 0)
            held = grad, loss

    is_known = named or mode(steps) is not steps  # in a graph the operations tell which loss it was
    with contextlib.nullcontext() if is_known else pytest.raises(CallOrderError, match="at two scales"):
        mode(steps)()
    assert float(two.weights[0]) == (-9.0 if is_known else -3.0)
    assert two.optimizer.steps_with_missing_calls == 0


@EACH_MODE
def test_a_loss_that_is_only_logged_is_not_open(both, mode):
    """Only its backward pass would make it wait for gradients."""

    def step():
        both.get_scaled_loss(VARIABLE * 7.0)
        _minimize_another(both)
        return both.get_unscaled_gradients([_gradient(both)])[0]

    assert [float(mode(step)()) for _ in range(3)] == [3.0] * 3


@EACH_MODE
def test_keras_loss_waits_beside_whole_steps(mode):
    """The record of a loss that `scale_loss` scaled is not lost."""
    two = Two()

    def step():
        first = two.scaled(0, 3.0, "scale_loss")
        for _ in range(2):
            two.unscale_and_apply(two.scaled(1, 5.0), 1)
        two.apply(first, 0)

    step = mode(step)
    step()
    step()
    assert [float(each) for each in two.weights] == [-6.0, -20.0]


@EACH_MODE
def test_gradients_that_are_unscaled_let_the_next_loss_have_another_scale(both, mode):
    """They may be kept and applied later, and so may gradients of a loss from an earlier step."""

    def step():
        kept = both.get_unscaled_gradients([_gradient(both)])
        _minimize_another(both)
        latest = both.get_unscaled_gradients([_gradient(both)])
        both.apply_gradients([(kept[0] + latest[0], VARIABLE)])
        return kept[0], latest[0]

    step = mode(step)
    for _ in range(3):
        assert [float(each) for each in step()] == [3.0, 3.0]
    assert both.steps_with_missing_calls == 0


@EACH_MODE
def test_a_gradient_waits_while_minimize_grows_the_scale(both, mode):
    """It is divided by the scale of its own loss, processed or not."""

    def step():
        first = _gradient(both)
        _minimize_another(both)
        (grad,) = both.get_unscaled_gradients([first * 1.0])
        both.apply_gradients([(grad, VARIABLE)])
        return grad

    step = mode(step)
    assert [float(step()) for _ in range(3)] == [3.0] * 3


@pytest.mark.parametrize("differentiated", [False, True])
def test_a_dropped_loss_does_not_block_later_ones(both, differentiated):
    """After `forget_losses`, if its backward pass has run."""

    def step():
        (grad,) = both.get_unscaled_gradients([_gradient(both)])
        both.apply_gradients([(grad, VARIABLE)])
        return float(grad)

    for _ in range(2):
        with tf.GradientTape() as tape:
            scaled = both.get_scaled_loss(VARIABLE * 3.0)
        if differentiated:
            tape.gradient(scaled, VARIABLE)
            both.forget_losses()
        assert [step(), step()] == [3.0, 3.0]


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
    for load in (
        lambda: checkpoint.read(written).assert_consumed(),
        lambda: model.optimizer.load_state_dict(saved),
        lambda: model.load_weights(tmp_path / "model.keras"),
    ):
        model.optimizer.load_state_dict({**saved, "loss_scale": 4.0})
        _gradient(model.optimizer)
        load()
        assert float(model.optimizer.loss_scale) == 32.0
        assert _unscaled(model.optimizer, _gradient(model.optimizer)) == 3.0


def test_losses_of_one_scale_are_added_up(optimizer):
    """Micro-batches are unscaled at once, step after step."""
    for _ in range(3):
        total = tf.add_n([_gradient(optimizer) for _ in range(4)])
        (grad,) = optimizer.get_unscaled_gradients([total])
        assert float(grad) == 12.0
        optimizer.apply_gradients([(grad, VARIABLE)])


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
    """A thread that scales nothing unscales by the last scale that was used."""

    def from_a_thread():
        found = []
        thread = threading.Thread(target=lambda: found.append(_gradient(optimizer)))
        thread.start()
        thread.join()
        return found[0]

    for _ in range(2):
        grad = from_a_thread()
        _grow(optimizer)
        assert _unscaled(optimizer, grad) == 3.0


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


@EACH_MODE
def test_some_gradients_are_processed(mode):
    """Before they are applied with those that are not: no call is missing, step after step."""
    optimizer, variables = LossScaleOptimizer(keras.optimizers.SGD(1.0), GROWS), [tf.Variable(0.0), tf.Variable(0.0)]
    optimizer.build(variables)

    def step():
        with tf.GradientTape() as tape:
            scaled = optimizer.get_scaled_loss(3.0 * variables[0] + 5.0 * variables[1])
        first, second = optimizer.get_unscaled_gradients(tape.gradient(scaled, variables))
        optimizer.apply_gradients([(first, variables[0]), (tf.clip_by_value(second, -1.0, 1.0), variables[1])])

    step = mode(step)
    for _ in range(3):
        step()
    assert [float(each) for each in variables] == [-9.0, -3.0]
    assert optimizer.steps_with_missing_calls == 0


class Two:
    """An optimizer around two weights at zero, and the steps that a loop may take."""

    def __init__(self):
        self.weights = [tf.Variable(0.0), tf.Variable(0.0)]
        self.optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), GROWS)
        self.optimizer.build(self.weights)

    def scaled(self, weight, gradient, by="get_scaled_loss"):
        """Return the scaled gradient of a loss."""
        return self.scaled_and_loss(weight, gradient, by)[0]

    def scaled_and_loss(self, weight, gradient, by="get_scaled_loss"):
        """Return the scaled gradient of a loss, and the loss."""
        with tf.GradientTape() as tape:
            loss = getattr(self.optimizer, by)(self.weights[weight] * gradient)
        return tape.gradient(loss, [self.weights[weight]]), loss

    def apply(self, grads, weight):
        """Apply gradients as they are."""
        self.optimizer.apply_gradients([(grads[0], self.weights[weight])])

    def unscale_and_apply(self, grads, weight, loss=None):
        """Apply scaled gradients as a loop does."""
        self.apply(self.optimizer.get_unscaled_gradients(grads, loss=loss), weight)

    def processed(self, weight, gradient):
        """Take a step by `compute_gradients`, and process the gradients."""
        weight = self.weights[weight]
        pairs = self.optimizer.compute_gradients(lambda: weight * gradient, [weight])
        self.optimizer.apply_gradients([(grad * 1.0, each) for grad, each in pairs])


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
    two.optimizer.minimize(lambda: two.weights[1] * 5.0, two.weights[1:])
    two.apply(first, 0)


def _gradients_for_a_log_in_between(two):
    first = two.scaled(0, 8.0, "scale_loss")
    two.optimizer.get_gradients(lambda: two.weights[0] * 3.0, two.weights[:1])
    two.optimizer.apply(first, two.weights[:1])
    second = two.scaled(1, 5.0, "scale_loss")
    two.optimizer.get_gradients(lambda: two.weights[1] * 3.0, two.weights[1:])
    two.optimizer.apply(second, two.weights[1:])


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


def _another_network_spelled_out(two):
    first, loss = two.scaled_and_loss(0, 8.0)
    for _ in range(5):
        second, second_loss = two.scaled_and_loss(1, 1.0)
        two.unscale_and_apply(second, 1, second_loss)
    two.unscale_and_apply(first, 0, loss)


def _two_halves_with_a_step_in_between(two):
    with tf.GradientTape(persistent=True) as tape:
        loss = two.optimizer.get_scaled_loss(two.weights[0] * 3.0 + two.weights[1] * 5.0)
    first, second = tape.gradient(loss, two.weights[:1]), tape.gradient(loss, two.weights[1:])
    two.unscale_and_apply(first, 0)
    third, third_loss = two.scaled_and_loss(0, 5.0)
    two.unscale_and_apply(third, 0, third_loss)
    two.unscale_and_apply(second, 1, loss)


def _micro_batches_unscaled_at_once(two):
    grads, losses = zip(*[two.scaled_and_loss(0, 1.0) for _ in range(3)], strict=True)
    (first,) = two.optimizer.get_unscaled_gradients([tf.add_n([grad for (grad,) in grads])], loss=losses[-1])
    two.optimizer.minimize(lambda: two.weights[1] * 5.0, [two.weights[1]])
    second, loss = two.scaled_and_loss(0, 5.0)
    (second,) = two.optimizer.get_unscaled_gradients(second, loss=loss)
    two.apply([first + second], 0)


def _unscaled_for_their_norm_alone(two):
    for weight, gradient, by in ((0, 8.0, "scale_loss"), (1, 5.0, "get_scaled_loss")):
        grads = two.scaled(weight, gradient, by)
        tf.linalg.global_norm(two.optimizer.get_unscaled_gradients(grads))
        two.optimizer.apply(grads, [two.weights[weight]])


@EACH_MODE
@pytest.mark.parametrize(
    "program",
    [
        _compute_gradients_after_keras,
        _compute_gradients_after_a_loop,
        _compute_gradients_in_between,
        _gradients_for_a_log_in_between,
        _gradients_that_are_not_applied,
        _the_next_loss_before_the_second_is_unscaled,
        _another_network_spelled_out,
        _two_halves_with_a_step_in_between,
        _micro_batches_unscaled_at_once,
        _unscaled_for_their_norm_alone,
    ],
)
def test_programs_of_two_weights(mode, program):
    """The weights go by the true gradients, whatever comes between a loss and its step, and no call is missing."""
    two = Two()
    step = mode(lambda: program(two))
    for calls in (1, 2):
        step()
        assert [float(each) for each in two.weights] == [-8.0 * calls, -5.0 * calls]
    assert two.optimizer.steps_with_missing_calls == 0


@pytest.mark.parametrize("by", ["get_scaled_loss", "scale_loss"])
@pytest.mark.parametrize("place", ["thread", "function"])
def test_gradients_that_another_place_applies(by, place):
    """Scaled here, unscaled and applied in a thread or in a `tf.function` of its own: each step is right."""
    two = Two()
    for _ in range(4):
        grads = two.scaled(0, 3.0, by)
        apply = two.apply if by == "scale_loss" else two.unscale_and_apply
        if place == "thread":
            thread = threading.Thread(target=apply, args=(grads, 0))
            thread.start()
            thread.join()
        else:
            tf.function(lambda grad, apply=apply: apply([grad], 0), autograph=False)(grads[0])
    assert float(two.weights[0]) == -12.0
    assert two.optimizer.steps_with_missing_calls == 0


def test_a_micro_batch_outside_of_the_function_that_takes_the_step():
    """The function scales the last micro-batch, and unscales the sum."""
    two = Two()

    @tf.function(autograph=False)
    def last(total):
        two.unscale_and_apply([total + two.scaled(0, 3.0)[0]], 0)

    for _ in range(4):
        last(two.scaled(0, 3.0)[0])
    assert float(two.weights[0]) == -24.0


def test_a_loss_that_keras_scales_in_a_function():
    """Its gradients are applied eagerly, after an eager step of another weight."""
    two = Two()
    backward = tf.function(lambda: two.scaled(1, 5.0, "scale_loss"), autograph=False)
    for _ in range(3):
        two.apply(two.scaled(0, 3.0, "scale_loss"), 0)
        two.apply(backward(), 1)
    assert [float(each) for each in two.weights] == [-9.0, -15.0]


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
    np.testing.assert_array_equal(variables[0], [-11.0] * 4)
    np.testing.assert_array_equal(variables[1], [2.0] * 4)


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


@EACH_MODE
def test_two_networks_under_one_loss(optimizer, mode):
    """Their gradients are unscaled one after the other, processed or not; the same tensor twice is refused."""
    variables = [tf.Variable([1.0]), tf.Variable([1.0, 2.0])]

    def step(twice=False):
        with tf.GradientTape() as tape:
            scaled = optimizer.get_scaled_loss(tf.add_n([3.0 * tf.reduce_sum(each) for each in variables]))
        grads = tape.gradient(scaled, variables)
        first = optimizer.get_unscaled_gradients(grads[:1])
        return optimizer.get_unscaled_gradients(first if twice else [2.0 * grads[1]])

    step = mode(step)
    for _ in range(3):
        np.testing.assert_array_equal(step()[0], [6.0, 6.0])
    with pytest.raises(CallOrderError, match="unscaled already"):
        step(True)
    np.testing.assert_array_equal(step()[0], [6.0, 6.0])


def test_keras_entry_without_a_scaled_loss():
    """`apply` of gradients that were multiplied by hand is refused, since they look like unscaled ones."""
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
