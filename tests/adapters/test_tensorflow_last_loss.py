"""Gradients belong to the last loss that was scaled, or to the one that the caller names.

The scale grows after each step, so that gradients divided by a scale of another step would be found by a factor of two.
It begins below 1, so that a rule that stops at 1 is found.
"""

from tests.adapters.tensorflow_devices import EACH_MODE, STRATEGY, compiled, eager, traced  # noqa: I001
import copy
import gc
import itertools
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import keras
import pytest
import tensorflow as tf

from lossscale_core import DynamicScaling
from lossscale_core.errors import CallOrderError
from lossscale_tf import LossScaleOptimizer

GROWS = DynamicScaling(init_scale=0.25, min_scale=0.25, growth_interval=1)
pytestmark = pytest.mark.filterwarnings("error::UserWarning")  # right loops are silent


def _in_a_thread(function):
    def run(*args):
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(function, *args).result()

    return run


class Two:
    """An optimizer around two weights at zero, and the calls that a loop may make."""

    def __init__(self):
        self.variables = [keras.Variable(0.0), keras.Variable(0.0)]
        self.weights = [each.value for each in self.variables]
        """The same variables as TensorFlow's: a loop may name either."""
        self.optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), GROWS)
        self.optimizer.build(self.weights)

    def scaled(self, weight, gradient, by="get_scaled_loss"):
        """Return the scaled gradient of a loss."""
        with tf.GradientTape() as tape:
            loss = getattr(self.optimizer, by)(self.weights[weight] * gradient)
        return tape.gradient(loss, [self.weights[weight]])

    def unscale(self, grads, loss=None):
        """Unscale gradients."""
        return self.optimizer.get_unscaled_gradients(grads, loss=loss)

    def apply(self, grads, weight):
        """Apply gradients as they are."""
        self.optimizer.apply_gradients([(grads[0], self.variables[weight])])

    def unscale_and_apply(self, grads, weight):
        """Apply scaled gradients as a loop does."""
        self.apply(self.unscale(grads), weight)

    def minimize(self, weight, gradient):
        """Take a whole step, after which the scale is twice what it was."""
        self.optimizer.minimize(lambda: self.weights[weight] * gradient, [self.weights[weight]])

    def went(self, first, second=0.0):
        """Require that the weights went so far, and that no call was missed."""
        assert [float(each) for each in self.weights] == [-first, -second]
        assert self.optimizer.steps_with_missing_calls == 0


def _steps_in_a_loop_of_the_graph(two):
    def step(count):
        two.unscale_and_apply(two.scaled(0, 2.0), 0)
        return (count + 1,)

    tf.while_loop(lambda count: count < 4, step, (0,))
    two.minimize(1, 5.0)


def _some_gradients_are_processed(two):
    first, second = (two.unscale(two.scaled(weight, gradient)) for weight, gradient in ((0, 8.0), (1, 10.0)))
    two.optimizer.apply_gradients(zip([*first, 0.5 * second[0]], two.weights, strict=True))


def _one_step_with_gradients_of_two_losses(two):
    first = two.unscale(two.scaled(0, 8.0))
    two.minimize(1, 2.0)
    second = two.unscale(two.scaled(1, 3.0))
    two.optimizer.apply_gradients(zip([*first, *second], two.weights, strict=True))


def _computed_gradients_are_processed(two):
    def computed(gradient):
        (grad,) = two.optimizer.get_gradients(lambda: two.weights[1] * gradient, two.weights[1:])
        return [1.0 * grad]

    two.apply(computed(1.0), 1)
    two.apply(two.scaled(0, 5.0, "scale_loss"), 0)
    two.apply(computed(2.0), 1)
    grads = computed(2.0)
    first = two.scaled(0, 3.0)
    two.apply(grads, 1)
    two.unscale_and_apply(first, 0)


def _computed_gradients_are_given_up(two):
    two.optimizer.get_gradients(lambda: two.weights[1] * 7.0, two.weights[1:])
    with tf.GradientTape() as tape:
        loss = two.optimizer.scale_loss(two.weights[0] * 8.0 + two.weights[1] * 5.0)
    for weight, grad in enumerate(tape.gradient(loss, two.weights)):
        two.apply([grad], weight)


def _a_loss_is_scaled_while_gradients_wait(two):
    waiting = [1.0 * two.unscale(two.scaled(0, 2.0))[0]]
    two.scaled(0, 7.0)
    two.apply(waiting, 0)
    two.unscale_and_apply(two.scaled(0, 6.0), 0)
    two.minimize(1, 5.0)


def _the_last_loss_by_name(two):
    with tf.GradientTape() as tape:
        loss = two.optimizer.scale_loss(two.weights[0] * 8.0)
    (grad,) = two.unscale(tape.gradient(loss, two.weights[:1]), loss)
    two.apply([1.0 * grad], 0)
    two.minimize(1, 5.0)


def _losses_by_name(two):
    with tf.GradientTape(persistent=True) as tape:
        first = two.optimizer.get_scaled_loss(two.weights[0] * 8.0)
        second = two.optimizer.scale_loss(two.weights[1] * 5.0)
    two.minimize(0, 0.0)
    two.scaled(0, 7.0)
    grads = two.unscale(tape.gradient(first, two.weights[:1]), loss=first)
    two.optimizer.apply(iter(tape.gradient(second, two.weights[1:])), iter(two.weights[1:]), loss=second)
    two.apply([1.0 * grads[0]], 0)


def _the_sum_over_a_loop_of_the_graph(two):
    def micro_batch(count, total):
        return count + 1, total + two.scaled(0, 4.0)[0]

    two.unscale_and_apply(tf.while_loop(lambda count, _: count < 2, micro_batch, (0, tf.constant(0.0)))[1:], 0)
    two.minimize(1, 5.0)


def _unscaled_for_their_norm_alone(two):
    for weight, gradient, by, apply in (
        (0, 3.0, "scale_loss", two.optimizer.apply),
        (0, 5.0, "get_scaled_loss", lambda grads, _: two.apply(grads, 0)),
        (1, 5.0, "get_scaled_loss", two.optimizer.apply),
    ):
        grads = two.scaled(weight, gradient, by)
        tf.linalg.global_norm(two.unscale(grads))
        apply(grads, [two.weights[weight]])


def _unscaled_in_a_branch(two):
    for weight, gradient in ((0, 4.0), (1, 5.0), (0, 4.0)):
        unscale = lambda grads: two.unscale(grads)[0]  # noqa: E731
        grads = two.scaled(weight, gradient)
        grad = tf.cond(two.weights[0] <= 0.0, lambda g=grads, u=unscale: u(g), lambda: tf.constant(0.0))
        two.apply([grad], weight)


def _applied_in_either_branch(two):
    first, second = two.scaled(0, 8.0, "scale_loss"), lambda: two.unscale(two.scaled(1, 5.0))
    for weight, grads in ((0, first), (1, None)):
        grads = second() if grads is None else grads
        step = lambda w=weight, g=grads: two.apply(g, w)  # noqa: E731
        tf.cond(two.weights[0] <= 0.0, step, step)


def _zeros_that_tensorflow_keeps_for_variables_without_a_part_in_the_loss(two):
    for by in ("get_scaled_loss", "scale_loss"):
        with tf.GradientTape() as tape:
            first, _ = tf.identity_n(two.weights)
            loss = getattr(two.optimizer, by)(first * 4.0)
        grads = tape.gradient(loss, two.weights)  # the second one is older than the loss
        grads = grads if by == "scale_loss" else two.unscale(grads)
        two.optimizer.apply_gradients(zip(grads, two.weights, strict=True))
    two.minimize(1, 5.0)


def _keras_entry_divides_scaled_gradients_alone(two):
    for by, unscale in itertools.product(("get_scaled_loss", "scale_loss"), (False, True)):
        for weight, gradient, process in ((0, 2.0, lambda grad: grad), (1, 2.5, lambda grad: grad * 0.5)):
            grads = two.scaled(weight, gradient, by)
            (grad,) = two.unscale(grads) if unscale else grads
            two.optimizer.apply([process(grad)], [two.weights[weight]])


@EACH_MODE
@pytest.mark.parametrize(
    "program",
    [
        _steps_in_a_loop_of_the_graph,
        _some_gradients_are_processed,
        _one_step_with_gradients_of_two_losses,
        _computed_gradients_are_processed,
        _computed_gradients_are_given_up,
        _a_loss_is_scaled_while_gradients_wait,
        _the_last_loss_by_name,
        _losses_by_name,
        _the_sum_over_a_loop_of_the_graph,
        _unscaled_for_their_norm_alone,
        _unscaled_in_a_branch,
        _applied_in_either_branch,
        _zeros_that_tensorflow_keeps_for_variables_without_a_part_in_the_loss,
        _keras_entry_divides_scaled_gradients_alone,
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
@pytest.mark.parametrize("each", [True, False], ids=["unscaled each", "unscaled once"])
def test_gradients_are_accumulated(mode, each):
    """Over windows of 4, 4 and 2 micro-batches, in functions that are traced apart; each is unscaled, or their sum."""
    two, total = Two(), tf.Variable(0.0)

    def micro_batch():
        grads = two.scaled(0, 3.0)
        total.assign_add((two.unscale(grads) if each else grads)[0])

    def step():
        grads = [tf.convert_to_tensor(total)]
        two.apply(grads if each else two.unscale(grads), 0)
        total.assign(0.0)

    micro_batch, step = mode(micro_batch), mode(step)
    for length in (4, 4, 2):
        for _ in range(length):
            micro_batch()
        step()
    two.went(30.0)


def test_functions_within_functions():
    """One that is traced within a caller serves others, too."""
    two = Two()
    scaled, unscale = traced(lambda: two.scaled(0, 1.0)), traced(two.unscale)
    apply = traced(lambda grads: two.apply(grads, 0))
    apply_scaled = traced(lambda grads: two.optimizer.apply(grads, two.weights[1:]))
    for mode in (traced, traced, eager):
        mode(lambda: apply(unscale(scaled())))()
        mode(lambda: apply_scaled(two.scaled(1, 2.0, "scale_loss")))()
    two.went(3.0, 6.0)


def test_unscaled_gradients_that_wait_for_the_step_of_another_loss():
    """In a function that has not unscaled its own loss yet."""
    two = Two()

    @traced
    def step(grads):
        own = two.scaled(1, 5.0)
        two.apply(grads, 0)
        two.unscale_and_apply(own, 1)

    for _ in range(2):
        step([2.0 * grad for grad in two.unscale(two.scaled(0, 1.5))])
    two.went(6.0, 10.0)


def test_unscaled_gradients_that_wait_for_an_earlier_loss():
    """They may be another loss's that nothing has unscaled, which cannot be told: a warning, and no refusal."""
    two = Two()
    with tf.GradientTape() as tape:
        earlier = two.optimizer.get_scaled_loss(two.weights[0] * 2.0)
    grads, (waiting,) = tape.gradient(earlier, two.weights[:1]), two.unscale(two.scaled(0, 3.0))
    two.optimizer.apply(grads, two.weights[:1], loss=earlier)
    with pytest.warns(UserWarning, match=f"^{UNSCALED} not called"):
        two.apply([1.0 * waiting], 0)
    assert float(two.weights[0]) == -5.0


def test_two_threads():
    """Each thread's gradient is unscaled by the scale that it used, whatever the other does in between."""
    two, (first, second) = Two(), (ThreadPoolExecutor(1) for _ in range(2))
    with first, second:
        three = first.submit(two.scaled, 0, 3.0).result()
        two.optimizer.dynamic_scale.assign(16.0)
        five = second.submit(two.scaled, 0, 5.0).result()
        found = [*first.submit(two.unscale, three).result(), *second.submit(two.unscale, five).result()]
    assert [float(each) for each in found] == [3.0, 5.0]


@pytest.mark.parametrize("by", ["get_unscaled_gradients", "apply_gradients", "apply"])
@pytest.mark.parametrize(
    ("scaled_in", "applied_in"),
    [
        (eager, eager),
        (eager, _in_a_thread),
        (_in_a_thread, eager),
        (eager, traced),
        (traced, eager),
        (traced, traced),
        (compiled, compiled),
    ],
)
def test_gradients_that_another_place_applies(by, scaled_in, applied_in):
    """Scaled in one place, applied in another, and the scale is set in between: each step is right.

    Those that `apply` gets are the sum over a loop of the graph.
    """
    two = Two()
    scale = "get_scaled_loss" if by == "get_unscaled_gradients" else "scale_loss"

    def micro_batch(count, total):
        return count + 1, total + two.scaled(0, 1.5, scale)[0]

    def scaled():
        if by != "apply":
            return two.scaled(0, 3.0, scale)
        return tf.while_loop(lambda count, _: count < 2, micro_batch, (0, tf.constant(0.0)))[1:]

    def apply(grads):
        if by == "apply":
            two.optimizer.apply(grads, two.weights[:1])
        else:
            (two.apply if by == "apply_gradients" else two.unscale_and_apply)(grads, 0)

    scaled, apply = scaled_in(scaled), applied_in(apply)
    for _ in range(4):
        grads = scaled()
        two.optimizer.dynamic_scale.assign(64.0)
        apply(grads)
    two.went(12.0)


def test_replicas_with_two_losses():
    """Two losses are scaled before the first is applied, eagerly and in a graph; and a step is in two runs."""
    with STRATEGY.scope():
        two = Two()

    def interleaved():
        first, second = two.scaled(0, 0.5), two.scaled(1, 1.0)
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
    with pytest.warns(UserWarning, match="get_scaled_loss and get_unscaled_gradients not called"):
        traced(lambda: STRATEGY.run(lambda: two.apply([tf.constant(1.0)], 0)))()
    assert two.optimizer.steps_with_missing_calls == 1  # a step of all replicas counts once
    with STRATEGY.scope(), pytest.raises(ValueError, match=r"call this inside strategy\.run"):
        two.optimizer.apply([tf.constant(1.0)], two.weights[:1])


@EACH_MODE
def test_promises_072_080_each_exactly_once(mode):
    """A missing unscaling is refused, at the first step and after right ones, and so is a second one.

    Nothing is applied then, and the next right step is right. The gradient of an unscaled loss after a scaled one that
    was given up looks the same as one that was not unscaled.
    """
    two = Two()
    for steps in (0, 2):
        for _ in range(steps):
            float(two.optimizer.loss_scale)  # for a log: what was read before a step is of that step
            two.unscale_and_apply(two.scaled(0, 1.0), 0)
        with pytest.raises(CallOrderError, match=r"get_unscaled_gradients was not.* apply what get_unscaled_gradients"):
            mode(lambda: two.apply(two.scaled(0, 1.0), 0))()
        two.went(steps)

    def of_an_unscaled_loss():
        two.scaled(0, 1.0)
        two.apply([tf.constant(3.0)], 0)

    with pytest.raises(CallOrderError, match=r"read optimizer.loss_scale before apply_gradients"):
        mode(of_an_unscaled_loss)()
    with pytest.raises(CallOrderError, match="unscaled already"):
        mode(lambda: two.unscale(two.unscale(two.scaled(0, 1.0))))()
    mode(lambda: two.unscale_and_apply(two.scaled(0, 1.0), 0))()
    two.went(3.0)


def _within(step):
    return lambda two, mode: mode(lambda: step(two))


def _divided_by(read):
    return _within(lambda two: two.apply([two.scaled(0, 2.0)[0] / read(two.optimizer)], 0))


def _read_before_the_step(two, mode):
    step = mode(lambda loss_scale: two.apply([two.scaled(0, 2.0)[0] / loss_scale], 0))
    return lambda: step(two.optimizer.loss_scale)


def _of_a_function(two, _):
    scaled = traced(lambda: two.scaled(0, 2.0))  # it may be that of another loop
    return lambda: two.apply([scaled()[0] / two.optimizer.state_dict()["loss_scale"]], 0)


def _unscaled_between_right_steps(two, mode):
    right = mode(lambda: (two.minimize(0, 0.0), two.unscale_and_apply(two.scaled(0, 0.0), 0), two.minimize(0, 0.0)))
    unscaled = mode(lambda: two.apply([tf.constant(2.0)], 0))
    return lambda: (right(), unscaled(), right())


def _unscaled_beside_a_function(two, mode):
    scaled, unscaled = traced(lambda: two.scaled(0, 7.0)), mode(lambda: two.apply([tf.constant(2.0)], 0))
    return lambda: (scaled(), unscaled())


def _applied_twice(two, by_name=False):
    with tf.GradientTape() as tape:
        loss = two.optimizer.get_scaled_loss(two.weights[0] * 1.0)
    grads = two.unscale(tape.gradient(loss, two.weights[:1]), loss if by_name else None)
    for _ in range(2):
        two.apply(grads, 0)


def _applied_twice_in_a_branch(two):
    step = lambda: _applied_twice(two, by_name=True)  # noqa: E731
    tf.cond(two.weights[0] <= 0.0, step, step)


SCALED = "get_scaled_loss"
UNSCALED = "get_unscaled_gradients"
MISSING = {
    "scaled by hand": (SCALED, _within(lambda two: two.unscale_and_apply([2.0 * two.optimizer.loss_scale], 0))),
    "scaled by hand, apply": (
        SCALED,
        _within(lambda two: two.optimizer.apply([2.0 * two.optimizer.loss_scale], two.weights[:1])),
    ),
    "divided by loss_scale": (UNSCALED, _divided_by(lambda optimizer: optimizer.loss_scale)),
    "divided by dynamic_scale": (UNSCALED, _divided_by(lambda optimizer: optimizer.dynamic_scale)),
    "divided by that of scale_state": (UNSCALED, _divided_by(lambda optimizer: optimizer.scale_state.loss_scale)),
    "divided by what was read before the step": (UNSCALED, _read_before_the_step),
    "divided outside of a function": (UNSCALED, _of_a_function),
    "unscaled beside a function": (UNSCALED, _unscaled_beside_a_function),
    "applied twice": (SCALED, _within(_applied_twice)),
    "applied twice in a branch": (SCALED, _within(_applied_twice_in_a_branch)),
    "neither": (f"{SCALED} and {UNSCALED}", _unscaled_between_right_steps),
}


@EACH_MODE
@pytest.mark.parametrize(("calls", "make"), MISSING.values(), ids=MISSING)
def test_promise_080_a_call_that_is_missing(mode, calls, make):
    """Where the caller may have done it by hand, the gradients are applied, each step counted, the first warned of."""
    two = Two()
    step = make(two, mode)
    for is_first in (True, False):
        with pytest.warns(UserWarning, match=f"^{calls} not called before apply_g") if is_first else nullcontext():
            step()
    assert float(two.weights[0]) == -4.0
    assert two.optimizer.steps_with_missing_calls == 2


def test_a_copy_begins_with_a_new_step():
    """Neither threads nor graphs can be copied."""
    two = Two()
    two.scaled(0, 3.0)
    copied = copy.deepcopy(two.optimizer)
    with pytest.warns(UserWarning, match="get_scaled_loss and get_unscaled_gradients not called"):
        copied.apply_gradients([(tf.constant(2.0), two.weights[0])])
    assert copied.steps_with_missing_calls == 1


# -- what an earlier step leaves over ----------------------------------------------------------------------------------


def test_a_trace_that_failed_is_forgotten():
    """Afterwards scaled gradients are refused as before it."""
    two = Two()

    @traced
    def step():
        two.scaled(0, 1.0)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        step()
    del step
    gc.collect()
    with pytest.raises(CallOrderError):
        two.apply([two.scaled(0, 1.0)[0] + 0.0], 0)
    two.went(0.0)


def test_the_call_that_scaled_last_decides_in_whatever_order_functions_were_traced():
    """`scale_loss` in one function, `get_scaled_loss` in another that is called in between."""
    two = Two()
    grads = traced(lambda: two.scaled(0, 1.0, "scale_loss"))
    evaluate = traced(lambda: two.optimizer.get_scaled_loss(two.weights[0] * 1.0))
    for step in range(1, 4):
        two.apply(grads(), 0)
        two.went(step)
        evaluate()


def test_a_function_that_was_traced_and_has_not_run_yet():
    """The present scale is that of scaled gradients then, and unscaled ones are applied as they are."""
    two = Two()
    grads = traced(lambda: two.scaled(0, 1.0, "scale_loss"))
    grads.get_concrete_function()
    two.optimizer.apply([3.0 * two.optimizer.loss_scale], two.weights[:1])
    two.apply([tf.constant(2.0)], 0)
    two.went(5.0)
