"""Gradients belong to the last scaled loss, or to the loss that the caller names.

The scale grows after each step, so that gradients divided by the scale of another step are wrong by a factor of two.
It starts below 1, so that a rule with a minimum of 1 fails.
"""

from tests.adapters.tensorflow_devices import EACH_MODE, STRATEGY, compiled, eager, traced  # noqa: I001
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import keras
import pytest
import tensorflow as tf
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from lossscale_core import DynamicScaling
from lossscale_core.errors import CallOrderError
from lossscale_tf import LossScaleOptimizer
from tests.sweeping import few_examples

GROWS = DynamicScaling(init_scale=0.25, min_scale=0.25, growth_interval=1)
pytestmark = pytest.mark.filterwarnings("error::UserWarning")  # right loops are silent


def _in_a_thread(function):
    def run(*args):
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(function, *args).result()

    return run


def _in_a_branch(function):
    return traced(lambda *args: tf.cond(tf.constant(True), lambda: function(*args), lambda: function(*args)))


class Two:
    """An optimizer around two weights at zero, and the calls that a loop may make."""

    def __init__(self):
        self.variables = [keras.Variable(0.0), keras.Variable(0.0)]
        self.weights = [variable.value for variable in self.variables]
        """The same variables as TensorFlow's: a loop may name either."""
        self.optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), GROWS)
        self.optimizer.build(self.weights)

    def scaled_with_loss(self, weight, gradient, by):
        """Return the scaled gradient of a loss, and the scaled loss."""
        with tf.GradientTape() as tape:
            loss = getattr(self.optimizer, by)(self.weights[weight] * gradient)
        return tape.gradient(loss, [self.weights[weight]]), loss

    def scaled(self, weight, gradient, by="get_scaled_loss"):
        """Return the scaled gradient of a loss."""
        return self.scaled_with_loss(weight, gradient, by)[0]

    def unscale(self, grads, loss=None):
        """Unscale gradients."""
        return self.optimizer.get_unscaled_gradients(grads, loss=loss)

    def apply(self, grads, weight):
        """Apply gradients unchanged."""
        self.optimizer.apply_gradients([(grads[0], self.variables[weight])])

    def unscale_and_apply(self, grads, weight):
        """Unscale and apply gradients, like a loop."""
        self.apply(self.unscale(grads), weight)

    def minimize(self, weight, gradient):
        """Take a whole step, after which the scale is twice what it was."""
        self.optimizer.minimize(lambda: self.weights[weight] * gradient, [self.weights[weight]])

    def went(self, first, second=0.0):
        """Require that the weights moved by these amounts, and that no call was missing."""
        assert [float(weight) for weight in self.weights] == [-first, -second]
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


def _an_earlier_loss_by_name(two):
    with tf.GradientTape(persistent=True) as tape:
        first = two.optimizer.get_scaled_loss(two.weights[0] * 8.0)
        second = two.optimizer.scale_loss(two.weights[1] * 5.0)
    grads = two.unscale(tape.gradient(first, two.weights[:1]), loss=first)
    two.apply(tape.gradient(second, two.weights[1:]), 1)
    two.apply(grads, 0)


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


def _zeros_that_tensorflow_keeps_for_variables_without_a_part_in_the_loss(two):
    for by in ("get_scaled_loss", "scale_loss"):
        with tf.GradientTape() as tape:
            first, _ = tf.identity_n(two.weights)
            loss = getattr(two.optimizer, by)(first * 4.0)
        grads = tape.gradient(loss, two.weights)  # the second one is older than the loss
        grads = grads if by == "scale_loss" else two.unscale(grads)
        two.optimizer.apply_gradients(zip(grads, two.weights, strict=True))
    two.minimize(1, 5.0)


@EACH_MODE
@pytest.mark.parametrize(
    "program",
    [
        _steps_in_a_loop_of_the_graph,
        _some_gradients_are_processed,
        _one_step_with_gradients_of_two_losses,
        _an_earlier_loss_by_name,
        _the_sum_over_a_loop_of_the_graph,
        _unscaled_for_their_norm_alone,
        _unscaled_in_a_branch,
        _zeros_that_tensorflow_keeps_for_variables_without_a_part_in_the_loss,
    ],
)
def test_right_loops(mode, program):
    """The weights move by the true gradients, without a warning, whatever happens between a loss and its step."""
    two = Two()
    step = mode(lambda: program(two))
    for calls in (1, 2):
        step()
        two.went(8.0 * calls, 5.0 * calls)


@EACH_MODE
@pytest.mark.parametrize("is_unscaled", [True, False], ids=["unscaled each", "unscaled once"])
def test_gradients_are_accumulated(mode, is_unscaled):
    """Windows have 4, 4 and 2 micro-batches, in separate functions. Each gradient is unscaled, or their sum."""
    two, total = Two(), tf.Variable(0.0)

    def micro_batch():
        grads = two.scaled(0, 3.0)
        total.assign_add((two.unscale(grads) if is_unscaled else grads)[0])

    def step():
        grads = [tf.convert_to_tensor(total)]
        two.apply(grads if is_unscaled else two.unscale(grads), 0)
        total.assign(0.0)

    micro_batch, step = mode(micro_batch), mode(step)
    for length in (4, 4, 2):
        for _ in range(length):
            micro_batch()
        step()
    two.went(30.0)


class AnyOrder(RuleBasedStateMachine):
    """Calls in any order. Each gradient belongs to the last loss, or to a loss that is named.

    The model is the true gradient. Calls are made eagerly, in a graph, in a thread, or in a branch of a graph.
    """

    waiting = Bundle("gradients that are not applied")
    places = st.sampled_from([eager, traced, _in_a_thread, _in_a_branch])

    def __init__(self):
        super().__init__()
        self.two, self.right, self.last, self.stage, self.change = Two(), [0.0, 0.0], None, None, None

    @rule(
        target=waiting,
        place=places,
        stage=st.sampled_from(["scale_loss", "get_scaled_loss"]),
        weight=st.sampled_from([0, 1]),
    )
    def scale(self, place, stage, weight):
        """Scale a loss. Only outside of graphs can a later call name it."""
        gradient = float(self.two.optimizer.metrics()["steps"]) + 1.0
        grads, loss = place(lambda: self.two.scaled_with_loss(weight, gradient, stage))()
        self.last, self.stage = {"grads": grads, "weight": weight, "gradient": gradient}, stage
        self.last["loss"] = loss if place in (eager, _in_a_thread) else None
        self.change = self.last
        return self.last

    @rule(target=waiting, place=places, weight=st.sampled_from([0, 1]))
    def compute(self, place, weight):
        """Compute the unscaled gradient of a loss."""
        loss, variables = lambda: self.two.weights[weight] * 3.0, self.two.weights[weight : weight + 1]
        grads = place(lambda: self.two.optimizer.get_gradients(loss, variables))()
        gradients = {"grads": grads, "weight": weight, "gradient": 3.0, "is_marked": place in (eager, _in_a_thread)}
        gradients["before"] = self.stage, self.change
        self.stage, self.change = "unscaled", gradients
        return gradients

    @rule(place=places, weight=st.sampled_from([0, 1]))
    def minimize(self, place, weight):
        """Take a whole step between the calls of others."""
        place(lambda: self.two.minimize(weight, 2.0))()
        self.right[weight] += 2.0

    @rule(target=waiting, place=places, gradients=consumes(waiting), is_processed=st.booleans())
    def unscale(self, place, gradients, is_processed):
        """Unscale gradients of the last loss, or of one that is named."""
        is_last, loss = gradients is self.last, gradients.get("loss")
        if "is_marked" in gradients or not (is_last or loss is not None):
            return gradients
        factor, named = 1.0 if is_processed else None, None if is_last else loss
        place = place if is_last else eager
        unscale = lambda grads: self.two.unscale(grads, named)  # noqa: E731
        grads = place(lambda grads: [grad * factor for grad in unscale(grads)] if factor else unscale(grads))(
            gradients["grads"]
        )
        if is_last:
            self.stage, self.change = "unscaled", None
        return gradients | {"grads": grads, "is_marked": place in (eager, _in_a_thread) and not is_processed}

    @rule(place=places, gradients=consumes(waiting), by_keras=st.booleans())
    def apply(self, place, gradients, by_keras):
        """Apply gradients by `apply` or `apply_gradients`, if the stage of the loss allows it."""
        weight, named = gradients["weight"], None
        if gradients.get("is_marked") and place in (eager, _in_a_thread):
            is_right = True
            if gradients is self.change:
                self.stage, self.change = gradients["before"]
        elif "is_marked" in gradients:
            is_right = self.stage == "unscaled" if by_keras else self.stage != "scale_loss"
        elif gradients is self.last:
            is_right = self.stage == "scale_loss" or (by_keras and self.stage == "get_scaled_loss")
        else:
            named = gradients.get("loss")
            is_right = by_keras and place is eager and named is not None
        if not is_right:
            return
        variables = self.two.weights[weight : weight + 1]
        step = lambda grads: self.two.optimizer.apply(grads, variables, loss=named)  # noqa: E731
        place(step if by_keras else lambda grads: self.two.apply(grads, weight))(gradients["grads"])
        self.right[weight] += gradients["gradient"]

    @invariant()
    def went(self):
        """Require that the weights moved by the true gradients."""
        self.two.went(*self.right)


def test_any_order_of_calls():
    """No step divides by the scale of another loss, and there is no warning."""
    run_state_machine_as_test(AnyOrder, settings=settings(few_examples, stateful_step_count=10))


@pytest.mark.parametrize("by", ["get_unscaled_gradients", "apply_gradients", "apply"])
def test_gradients_between_two_compiled_functions(by):
    """The scale changes between the two functions."""
    two = Two()
    scaled = compiled(lambda: two.scaled(0, 3.0, "get_scaled_loss" if by == "get_unscaled_gradients" else "scale_loss"))
    steps = {
        "get_unscaled_gradients": lambda grads: two.unscale_and_apply(grads, 0),
        "apply_gradients": lambda grads: two.apply(grads, 0),
        "apply": lambda grads: two.optimizer.apply(grads, two.weights[:1]),
    }
    apply = compiled(steps[by])
    for _ in range(4):
        grads = scaled()
        two.optimizer.dynamic_scale.assign(64.0)
        apply(grads)
    two.went(12.0)


@pytest.mark.parametrize("first", ["unscale_and_apply", "apply_scaled"])
def test_branches_with_different_calls(first):
    """One branch of `tf.cond` unscales gradients, and the other applies them while they are scaled."""
    two = Two()

    def unscale_and_apply(grads):
        two.unscale_and_apply(grads, 0)

    def apply_scaled(grads):
        two.optimizer.apply(grads, two.weights[:1])

    branches = unscale_and_apply, apply_scaled
    one, other = branches if first == "unscale_and_apply" else branches[::-1]

    @traced
    def step(takes_one):
        grads = two.scaled(0, 3.0, "get_scaled_loss")
        tf.cond(takes_one, lambda: one(grads), lambda: other(grads))

    for takes_one in (True, False, False, True):
        step(tf.constant(takes_one))
    two.went(12.0)


def test_replicas_with_two_losses():
    """Two losses are scaled before the first step, eagerly and in a graph. A step may consist of two runs."""
    with STRATEGY.scope():
        two = Two()

    def interleaved():
        first, second = two.scaled(0, 0.5), two.scaled(1, 1.0)
        two.unscale_and_apply(first, 0)
        two.unscale_and_apply(second, 1)

    step = lambda: STRATEGY.run(interleaved)  # noqa: E731
    for run_step in (step, step, traced(step), traced(step)):
        run_step()
    assert [float(weight.numpy()) for weight in two.weights] == [-4.0, -8.0]
    for _ in range(2):
        grads = STRATEGY.run(lambda: two.scaled(0, 0.5))
        STRATEGY.run(lambda: two.minimize(1, 1.0))
        STRATEGY.run(lambda grads: two.unscale_and_apply(grads, 0), args=(grads,))
    assert [float(weight.numpy()) for weight in two.weights] == [-6.0, -12.0]
    assert two.optimizer.steps_with_missing_calls == 0
    with STRATEGY.scope():
        three = Two()
    with pytest.warns(UserWarning, match="get_scaled_loss and get_unscaled_gradients not called"):
        traced(lambda: STRATEGY.run(lambda: three.apply([tf.constant(1.0)], 0)))()
    assert three.optimizer.steps_with_missing_calls == 1  # a step of all replicas counts once
    with STRATEGY.scope(), pytest.raises(ValueError, match=r"call this inside strategy\.run"):
        two.optimizer.apply([tf.constant(1.0)], two.weights[:1])


@pytest.mark.promise(72, 80)
@EACH_MODE
def test_scaling_and_unscaling_exactly_once(mode):
    """The first step without unscaling is an error, and so is unscaling twice.

    These calls change nothing, and the next correct step works. A gradient of an unscaled loss after a scaled loss that
    was dropped looks like a gradient that was not unscaled, and is an error, too.
    """

    def of_an_unscaled_loss(two):
        two.scaled(0, 1.0)
        two.apply([tf.constant(3.0)], 0)

    for wrong, words in (
        (
            lambda two: two.apply(two.scaled(0, 1.0), 0),
            r"get_unscaled_gradients was not.* apply the result of get_unscaled_grad",
        ),
        (of_an_unscaled_loss, r"read optimizer.loss_scale before apply_gradients"),
        (lambda two: two.unscale(two.unscale(two.scaled(0, 1.0))), "unscaled already"),
    ):
        two = Two()
        with pytest.raises(CallOrderError, match=words):
            mode(lambda wrong=wrong, two=two: wrong(two))()
        two.went(0.0)
        mode(lambda two=two: two.unscale_and_apply(two.scaled(0, 1.0), 0))()
        two.went(1.0)


def _within(step):
    return lambda two, mode: mode(lambda: step(two))


def _divided_by(read):
    return _within(lambda two: two.apply([two.scaled(0, 2.0)[0] / read(two.optimizer)], 0))


def _partly_unscaled(two):
    with tf.GradientTape() as tape:
        loss = two.optimizer.get_scaled_loss(two.weights[0] * 2.0 + two.weights[1] * 0.0)
    grads = tape.gradient(loss, two.weights)
    two.optimizer.apply_gradients(zip([two.unscale(grads)[0], grads[1]], two.weights, strict=True))


SCALED = "get_scaled_loss"
UNSCALED = "get_unscaled_gradients"
MISSING = {
    "partly unscaled": ("some of these gradients were unscaled, and others were", _within(_partly_unscaled)),
    "scaled by hand": (SCALED, _within(lambda two: two.unscale_and_apply([2.0 * two.optimizer.loss_scale], 0))),
    "scaled by hand, apply": (
        SCALED,
        _within(lambda two: two.optimizer.apply([2.0 * two.optimizer.loss_scale], two.weights[:1])),
    ),
    "divided by loss_scale": (UNSCALED, _divided_by(lambda optimizer: optimizer.loss_scale)),
    "divided by dynamic_scale": (UNSCALED, _divided_by(lambda optimizer: optimizer.dynamic_scale)),
    "divided by scale_state.loss_scale": (UNSCALED, _divided_by(lambda optimizer: optimizer.scale_state.loss_scale)),
    "neither": (f"{SCALED} and {UNSCALED}", _within(lambda two: two.apply([tf.constant(2.0)], 0))),
}


@pytest.mark.promise(80)
@EACH_MODE
@pytest.mark.parametrize(("calls", "make"), MISSING.values(), ids=MISSING)
def test_a_call_that_is_missing(mode, calls, make):
    """If the caller may have scaled or unscaled itself, the step is applied and counted, and the first step warns."""
    two = Two()
    step = make(two, mode)
    for is_first in (True, False):
        with pytest.warns(UserWarning, match=f"^{calls} not") if is_first else nullcontext():
            step()
    assert float(two.weights[0]) == -4.0
    assert two.optimizer.steps_with_missing_calls == 2


def test_the_call_that_scaled_last_decides():
    """`scale_loss` runs in one function, and `get_scaled_loss` in a function that is called in between."""
    two = Two()
    grads = traced(lambda: two.scaled(0, 1.0, "scale_loss"))
    evaluate = traced(lambda: two.optimizer.get_scaled_loss(two.weights[0] * 1.0))
    for step in range(1, 4):
        two.apply(grads(), 0)
        two.went(step)
        evaluate()


def test_a_trace_without_a_run():
    """Scaled gradients are divided by the first scale, and unscaled gradients are applied unchanged."""
    two = Two()
    grads = traced(lambda: two.scaled(0, 1.0, "scale_loss"))
    grads.get_concrete_function()
    two.optimizer.apply([3.0 * two.optimizer.dynamic_scale], two.weights[:1])
    two.apply([tf.constant(2.0)], 0)
    two.went(5.0)
