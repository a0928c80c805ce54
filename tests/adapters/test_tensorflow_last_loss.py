"""Gradients belong to the last scaled loss, or to the loss that the caller names."""

from tests.adapters.tensorflow_devices import EACH_MODE, STRATEGY, eager, traced  # noqa: I001
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import tensorflow as tf
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from lossscale_core.errors import CallOrderError
from lossscale_tf import LossScaleOptimizer
from tests.adapters import keras_loops
from tests.sweeping import examples

SCALED, UNSCALED = "get_scaled_loss", "get_unscaled_gradients"
pytestmark = pytest.mark.filterwarnings("error::UserWarning")  # right loops are silent


def _in_a_thread(function):
    def run(*args):
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(function, *args).result()

    return run


def _in_a_branch(function):
    return traced(lambda *args: tf.cond(tf.constant(True), lambda: function(*args), lambda: function(*args)))


class Two(keras_loops.Two):
    """An optimizer around two weights at zero, and the calls of TensorFlow's documents."""

    def __init__(self):
        super().__init__(LossScaleOptimizer)

    def unscale(self, grads, loss=None):
        """Unscale gradients."""
        return self.optimizer.get_unscaled_gradients(grads, loss=loss)

    def apply_unscaled(self, grads, weight=0):
        """Apply gradients unchanged."""
        self.optimizer.apply_gradients([(grads[0], self.weights[weight])])

    def unscale_and_apply(self, grads, weight=0):
        """Unscale and apply gradients, like a loop."""
        self.apply_unscaled(self.unscale(grads), weight)

    def minimize(self, weight, gradient):
        """Take a whole step, after which the scale is twice what it was."""
        variable = self.weights[weight].value  # TensorFlow's variable, which a loop may name, too
        self.optimizer.minimize(lambda: variable * gradient, [variable])

    def went(self, first, second=0.0):
        """Require that the weights moved by these amounts, and that no call was missing."""
        super().went(first, second)
        assert self.optimizer.steps_with_missing_calls == 0


def _one_step_with_gradients_of_two_losses(two):
    first = two.unscale(two.scaled(8.0, SCALED)[0])
    two.minimize(1, 2.0)
    second = two.unscale(two.scaled(6.0, SCALED)[0])
    two.optimizer.apply_gradients(zip([*first, 0.5 * second[0]], two.weights, strict=True))


def _the_sum_over_a_loop_of_the_graph(two):
    def micro_batch(count, total):
        return count + 1, total + two.scaled(4.0, SCALED)[0][0]

    two.unscale_and_apply(tf.while_loop(lambda count, _: count < 2, micro_batch, (0, tf.constant(0.0)))[1:])
    two.minimize(1, 5.0)


def _unscaled_for_their_norm_alone(two):
    grads, _ = two.scaled(8.0, SCALED)
    tf.linalg.global_norm(two.unscale(grads))
    two.apply(grads)
    grads, _ = two.scaled(5.0)
    tf.linalg.global_norm(two.unscale(grads))
    two.apply_unscaled(grads, 1)


def _branches_with_different_calls(two):
    grads, _ = two.scaled(8.0, SCALED)
    tf.cond(two.weights[0].value >= 0.0, lambda: two.unscale_and_apply(grads), lambda: two.apply(grads))
    two.minimize(1, 5.0)


@EACH_MODE
@pytest.mark.parametrize(
    "program",
    [
        _one_step_with_gradients_of_two_losses,
        _the_sum_over_a_loop_of_the_graph,
        _unscaled_for_their_norm_alone,
        _branches_with_different_calls,
    ],
)
def test_right_loops(mode, program):
    """The weights move by the true gradients, without a warning, whatever happens between a loss and its step."""
    two = Two()
    step = mode(lambda: program(two))
    for calls in (1, 2):
        step()
        two.went(8.0 * calls, 5.0 * calls)


class AnyOrder(RuleBasedStateMachine):
    """Calls in any order. Each gradient belongs to the last loss, or to a loss that is named.

    The model is the true gradient. Calls are made eagerly, in a graph, in a thread, or in a branch of a graph.
    """

    waiting = Bundle("gradients that are not applied")
    places = st.sampled_from([eager, traced, _in_a_thread, _in_a_branch])

    def __init__(self):
        super().__init__()
        self.two, self.right, self.last, self.stage, self.change = Two(), [0.0, 0.0], None, None, None

    @rule(target=waiting, place=places, stage=st.sampled_from(["scale_loss", SCALED]))
    def scale(self, place, stage):
        """Scale a loss. Only outside of graphs can a later call name it."""
        gradient = float(self.two.optimizer.metrics()["steps"]) + 1.0
        grads, loss = place(lambda: self.two.scaled(gradient, stage))()
        self.last, self.stage = {"grads": grads, "gradient": gradient}, stage
        self.last["loss"] = loss if place in (eager, _in_a_thread) else None
        self.change = self.last
        return self.last

    @rule(target=waiting, place=places)
    def compute(self, place):
        """Compute the unscaled gradient of a loss."""
        variable = self.two.weights[0].value
        grads = place(lambda: self.two.optimizer.get_gradients(lambda: variable * 3.0, [variable]))()
        gradients = {"grads": grads, "gradient": 3.0, "is_marked": place in (eager, _in_a_thread)}
        gradients["before"] = self.stage, self.change
        self.stage, self.change = "unscaled", gradients
        return gradients

    @rule(place=places)
    def minimize(self, place):
        """Take a whole step between the calls of others."""
        place(lambda: self.two.minimize(1, 2.0))()
        self.right[1] += 2.0

    @rule(target=waiting, place=places, gradients=consumes(waiting), is_processed=st.booleans())
    def unscale(self, place, gradients, is_processed):
        """Unscale gradients of the last loss, or of one that is named."""
        is_last, loss = gradients is self.last, gradients.get("loss")
        if "is_marked" in gradients or not (is_last or loss is not None):
            return gradients
        named, place = (None, place) if is_last else (loss, eager)
        unscale = lambda grads: self.two.unscale(grads, named)  # noqa: E731
        grads = place(lambda grads: [grad * 1.0 for grad in unscale(grads)] if is_processed else unscale(grads))(
            gradients["grads"]
        )
        if is_last:
            self.stage, self.change = "unscaled", None
        return gradients | {"grads": grads, "is_marked": place in (eager, _in_a_thread) and not is_processed}

    @rule(place=places, gradients=consumes(waiting), by_keras=st.booleans())
    def apply(self, place, gradients, by_keras):
        """Apply gradients by `apply` or `apply_gradients`, if the stage of the loss allows it."""
        named = None
        if gradients.get("is_marked") and place in (eager, _in_a_thread):
            is_right = True
            if gradients is self.change:
                self.stage, self.change = gradients["before"]
        elif "is_marked" in gradients:
            is_right = self.stage == "unscaled" if by_keras else self.stage != "scale_loss"
        elif gradients is self.last:
            is_right = self.stage == "scale_loss" or (by_keras and self.stage == SCALED)
        else:
            named = gradients.get("loss")
            is_right = by_keras and place is eager and named is not None
        if is_right:
            step = (lambda grads: self.two.apply(grads, loss=named)) if by_keras else self.two.apply_unscaled
            place(step)(gradients["grads"])
            self.right[0] += gradients["gradient"]

    @invariant()
    def went(self):
        """Require that the weights moved by the true gradients."""
        self.two.went(*self.right)


def test_any_order_of_calls():
    """No step divides by the scale of another loss, and there is no warning."""
    run_state_machine_as_test(AnyOrder, settings=settings(examples(12), stateful_step_count=10))


def test_replicas_with_two_losses():
    """Replicas can scale two losses before the first step, eagerly and in a graph, and take a step in two runs."""
    with STRATEGY.scope():
        two, three = Two(), Two()

    def interleaved():
        (first, _), (second, _) = two.scaled(0.5, SCALED), two.scaled(1.0, SCALED)
        two.unscale_and_apply(first)
        two.unscale_and_apply(second, 1)

    step = lambda: STRATEGY.run(interleaved)  # noqa: E731
    for run_step in (step, step, traced(step), traced(step)):
        run_step()
    two.went(4.0, 8.0)
    for _ in range(2):
        grads = STRATEGY.run(lambda: two.scaled(0.5, SCALED)[0])
        STRATEGY.run(lambda: two.minimize(1, 1.0))
        STRATEGY.run(two.unscale_and_apply, args=(grads,))
    two.went(6.0, 12.0)
    with pytest.warns(UserWarning, match="get_scaled_loss and get_unscaled_gradients not called"):
        traced(lambda: STRATEGY.run(lambda: three.apply_unscaled([tf.constant(1.0)])))()
    assert three.optimizer.steps_with_missing_calls == 1  # a step of all replicas counts once
    with STRATEGY.scope(), pytest.raises(ValueError, match=r"call this inside strategy\.run"):
        two.apply([tf.constant(1.0)])


@pytest.mark.promise(72, 80)
@EACH_MODE
@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("apply the result of get_unscaled_grad", lambda two: two.apply_unscaled(two.scaled(1.0, SCALED)[0])),
        (
            # The gradient of an unscaled loss looks like a scaled gradient that was not unscaled.
            r"read optimizer.loss_scale before apply_gradients",
            lambda two: two.scaled(1.0, SCALED) and two.apply_unscaled([tf.constant(3.0)]),
        ),
        ("unscaled already", lambda two: two.unscale(two.unscale(two.scaled(1.0, SCALED)[0]))),
    ],
)
def test_scaling_and_unscaling_exactly_once(mode, words, wrong):
    """A step without unscaling and a second unscaling raise `CallOrderError`, and the next correct step works."""
    two = Two()
    with pytest.raises(CallOrderError, match=words):
        mode(lambda: wrong(two))()
    two.went(0.0)
    mode(lambda: two.unscale_and_apply(two.scaled(1.0, SCALED)[0]))()
    two.went(1.0)


def _divided_by(read):
    return lambda two: two.apply_unscaled([two.scaled(2.0, SCALED)[0][0] / read(two.optimizer)])


def _partly_unscaled(two):
    grads = [*two.scaled(2.0, SCALED)[0], tf.constant(0.0)]
    two.optimizer.apply_gradients(zip([two.unscale(grads)[0], grads[1]], two.weights, strict=True))


MISSING = {
    "partly unscaled": ("some of these gradients were unscaled, and others were", _partly_unscaled),
    "scaled by hand": (SCALED, lambda two: two.unscale_and_apply([2.0 * two.optimizer.loss_scale])),
    "scaled by hand, apply": (SCALED, lambda two: two.apply([2.0 * two.optimizer.loss_scale])),
    "divided by loss_scale": (UNSCALED, _divided_by(lambda optimizer: optimizer.loss_scale)),
    "divided by dynamic_scale": (UNSCALED, _divided_by(lambda optimizer: optimizer.dynamic_scale)),
    "divided by scale_state.loss_scale": (UNSCALED, _divided_by(lambda optimizer: optimizer.scale_state.loss_scale)),
    "neither": (f"{SCALED} and {UNSCALED}", lambda two: two.apply_unscaled([tf.constant(2.0)])),
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
    assert float(two.weights[0].value) == -4.0
    assert two.optimizer.steps_with_missing_calls == 2


def test_the_call_that_scaled_last_decides():
    """Of `scale_loss` and `get_scaled_loss`, the call that ran last decides whether a step unscales."""
    two = Two()
    grads, evaluate = (traced(lambda by=by: two.scaled(1.0, by)[0]) for by in ("scale_loss", SCALED))
    # A function that is traced but not called scales nothing.
    grads.get_concrete_function()
    two.apply([3.0 * two.optimizer.dynamic_scale])
    for step in range(1, 4):
        two.apply_unscaled(grads())
        two.went(3.0 + step)
        evaluate()
