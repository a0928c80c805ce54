"""Calls of a wrapper in any order, with a model: each gradient belongs to the last scaled loss, or to a named loss.

The scale grows after each step, so that gradients divided by the scale of another step are wrong by a factor of two.
It starts below 1, so that a rule with a minimum of 1 fails.
"""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from lossscale_core import DynamicScaling
from tests.adapters.keras_loops import BACKEND, LossScaleOptimizer, value_of
from tests.sweeping import few_examples

GROWS = DynamicScaling(init_scale=0.25, min_scale=0.25, growth_interval=1)


class TwoWeights:
    """An optimizer around two weights at zero, and the calls that a loop may make."""

    def __init__(self, wrapper=LossScaleOptimizer):
        self.weights = [keras.Variable(0.0), keras.Variable(0.0)]
        self.optimizer = wrapper(keras.optimizers.SGD(1.0), GROWS)
        self.optimizer.build(self.weights)

    def scaled(self, gradient, by="scale_loss"):
        """Return the scaled gradient of a loss, and the scaled loss, which is the gradient times a weight of 1."""
        loss = getattr(self.optimizer, by)(keras.ops.convert_to_tensor(float(gradient)))
        return [keras.ops.copy(loss)], loss

    def apply(self, grads, weight, loss=None):
        """Apply the gradient of one weight by `apply`."""
        self.optimizer.apply(grads, [self.weights[weight]], loss=loss)

    def apply_gradients(self, grads, weight=0):
        """Apply the gradient of one weight by `apply_gradients`."""
        self.optimizer.apply_gradients(zip(grads, [self.weights[weight]], strict=True))

    def went(self, first, second=0.0):
        """Require that the weights moved by these amounts, and that no call was missing."""
        assert [float(value_of(weight)) for weight in self.weights] == [-first, -second]
        assert getattr(self.optimizer, "steps_with_missing_calls", 0) == 0


def _eagerly(function, times, count):
    def run(*inputs):
        return [function(*inputs) for _ in range(times)][-1]

    return run


def _in_a_thread(function, times, count):
    def run(*inputs):
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(_eagerly(function, times, count), *inputs).result()

    return run


PLACES = {"eager": _eagerly, "thread": _in_a_thread}
"""Each place runs a function a number of times, and returns its last `count` results."""
KEEPS_MARKS = {"eager", "thread"}
"""The places where tensors stay the same objects, so that a call finds the marks that an earlier call has set."""

if BACKEND == "tensorflow":
    import tensorflow as tf

    def _in_a_graph(function, times, count):
        return _eagerly(tf.function(function, autograph=False), times, count)

    def _in_a_branch(function, times, count):
        def branch(*inputs):
            return tf.cond(tf.constant(True), lambda: function(*inputs), lambda: function(*inputs))

        return _in_a_graph(branch, times, count)

    def _in_a_loop(function, times, count):
        def loop(*inputs):
            variables = (0, *[tf.constant(0.0)] * count)
            body = lambda n, *_: (n + 1, *function(*inputs))  # noqa: E731
            return list(tf.while_loop(lambda n, *_: n < times, body, variables)[1:])

        return _in_a_graph(loop, 1, count)

    PLACES |= {"graph": _in_a_graph, "branch": _in_a_branch, "loop": _in_a_loop}


@dataclasses.dataclass(eq=False)
class Loss:
    """A scaled loss in the model."""

    is_named: bool = True
    """Whether a call can name it."""
    tensor: Any = None


@dataclasses.dataclass(eq=False)
class Gradient:
    """A gradient in the model."""

    value: float
    """The true gradient."""
    loss: Loss | None = None
    """The loss of a scaled gradient."""
    steps: int = 0
    """The number of steps before its loss, which gives the scale."""
    is_marked: bool = False
    before: Any = None
    """The stage and the change before a call that computed and unscaled this gradient."""
    tensor: Any = None


NAMES = ["scale", "apply", "apply", "process", "add"]
NAMES_OF_TENSORFLOW = [
    "scale",
    "scale",
    "unscale",
    "unscale",
    "apply",
    "apply",
    "compute",
    "minimize",
    "process",
    "add",
]


class AnyOrder(RuleBasedStateMachine):
    """Some calls in one place, then some in another. A call that the documentation does not allow is left out.

    The stage is the last call that scaled a loss, or "unscaled". The change is the loss or the gradient that caused it.
    """

    wrapper, names = LossScaleOptimizer, NAMES

    def __init__(self):
        super().__init__()
        self.two, self.right, self.steps, self.waiting = TwoWeights(self.wrapper), [0.0, 0.0], 0, []
        self.last = self.stage = self.change = None

    @rule(place=st.sampled_from(sorted(PLACES)), times=st.integers(1, 2), data=st.data())
    def run(self, place, times, data):
        """Make calls in one place. Calls that run twice begin with a loss, and use no gradients from outside."""
        outside = [] if times > 1 else list(self.waiting)
        marks = [gradient.is_marked for gradient in outside]
        rest = self.waiting if times > 1 else []
        self.waiting, self.new, self.place, self.actions = list(outside), [], place, []
        right, steps = list(self.right), self.steps
        call = st.tuples(st.sampled_from(self.names), *[st.integers(0, 5)] * 3)
        calls = data.draw(st.lists(call, min_size=3, max_size=6))
        for name, *numbers in [("scale", 0, 0, 0)] * (times > 1) + calls:
            getattr(self, name)(*numbers)
        results = [gradient for gradient in self.waiting if gradient in self.new]
        if place not in KEEPS_MARKS:
            for gradient, mark in zip([*outside, *results], [*marks, *[False] * len(results)], strict=True):
                gradient.is_marked = mark
        self.execute(PLACES[place], times, outside, results)
        self.right = [new + (new - old) * (times - 1) for new, old in zip(self.right, right, strict=True)]
        for gradient in results:
            gradient.steps += (self.steps - steps) * (times - 1)
        self.steps += (self.steps - steps) * (times - 1)
        self.waiting += rest

    def execute(self, place, times, outside, results):
        """Run the actions of this place as one function of the gradients from outside."""
        tensors = [gradient.tensor for gradient in outside]

        def function(*inputs):
            for gradient, tensor in zip(outside, inputs, strict=True):
                gradient.tensor = tensor
            for action in self.actions:
                action()
            return [gradient.tensor for gradient in results]

        values = place(function, times, len(results))(*tensors) if self.actions else []
        for gradient, tensor in zip([*outside, *results], [*tensors, *values], strict=True):
            gradient.tensor = tensor
        for made in self.new:
            if isinstance(made, Loss):
                made.is_named = self.place in KEEPS_MARKS

    def choose(self, number, is_right=lambda gradient: True):
        """Return the first waiting gradient from this number on for which a call is right, or None."""
        start = number % max(len(self.waiting), 1)
        return next(filter(is_right, self.waiting[start:] + self.waiting[:start]), None)

    def is_here(self, made):
        """Return whether this place knows the marks of a gradient, or the name of a loss."""
        return made in self.new or self.place in KEEPS_MARKS

    def has_last_or_named_loss(self, gradient):
        """Return whether the loss of a gradient is the last one, or can be named here."""
        return gradient.loss is self.last or (gradient.loss.is_named and self.is_here(gradient.loss))

    def add_gradient(self, gradient, action):
        """Add a gradient, and the action that sets its tensor."""
        self.waiting.append(gradient)
        self.new.append(gradient)
        self.actions.append(action)

    def scale(self, number, by, _):
        """Scale a loss."""
        gradient, by = Gradient(1.0 + number, Loss(), self.steps), ["scale_loss", "get_scaled_loss"][by % 2]
        by = by if "unscale" in self.names else "scale_loss"

        def action():
            (gradient.tensor,), gradient.loss.tensor = self.two.scaled(gradient.value, by)

        self.last = self.change = gradient.loss
        self.stage = by
        self.new.append(gradient.loss)
        self.add_gradient(gradient, action)

    def compute(self, number, weight, _):
        """Compute an unscaled gradient."""
        gradient = Gradient(1.0 + number, is_marked=True, before=(self.stage, self.change))
        weight = self.two.weights[weight % 2].value

        def action():
            (gradient.tensor,) = self.two.optimizer.get_gradients(lambda: weight * gradient.value, [weight])

        self.stage, self.change = "unscaled", gradient
        self.add_gradient(gradient, action)

    def minimize(self, number, weight, _):
        """Take a whole step between the calls of others."""
        weight, gradient = weight % 2, 1.0 + number
        variable = self.two.weights[weight].value
        self.actions.append(lambda: self.two.optimizer.minimize(lambda: variable * gradient, [variable]))
        self.right[weight] += gradient
        self.steps += 1

    def unscale(self, number, is_kept, _):
        """Unscale a gradient of the last loss or of a loss that is named. The caller may keep the scaled gradient."""
        scaled = self.choose(number, lambda gradient: gradient.loss and self.has_last_or_named_loss(gradient))
        if scaled is None:
            return
        unscaled, is_last = Gradient(scaled.value, is_marked=True), scaled.loss is self.last

        def action():
            loss = None if is_last else scaled.loss.tensor
            (unscaled.tensor,) = self.two.optimizer.get_unscaled_gradients([scaled.tensor], loss=loss)

        if is_last:
            self.stage, self.change = "unscaled", None
        scaled.is_marked = True
        if is_kept % 2 == 0:
            self.waiting.remove(scaled)
        self.add_gradient(unscaled, action)

    def process(self, number, _, __):
        """Double a gradient."""
        old = self.choose(number)
        if old is None:
            return
        new = Gradient(2.0 * old.value, old.loss, old.steps)

        def action():
            new.tensor = 2.0 * old.tensor

        self.waiting.remove(old)
        self.add_gradient(new, action)

    def add(self, first, second, _):
        """Add two gradients of equal scale. The sum belongs to the later loss."""
        first, second = self.choose(first), self.choose(second)
        if first is second or (first.loss is None) != (second.loss is None) or first.steps != second.steps:
            return
        later = second.loss if second.loss is self.last else first.loss
        new = Gradient(first.value + second.value, later, first.steps)

        def action():
            new.tensor = first.tensor + second.tensor

        self.waiting.remove(first)
        self.waiting.remove(second)
        self.add_gradient(new, action)

    def is_right(self, gradients, by_apply):
        """Return whether the documentation allows to apply these gradients, of one loss or unscaled, in one step."""
        loss, marked = gradients[0].loss, self.marked(gradients)
        if any(gradient.loss is not loss for gradient in gradients):
            return False
        if loss is None:
            return bool(marked) or (self.stage == "unscaled" if by_apply else self.stage != "scale_loss")
        if loss is self.last and len(marked) < len(gradients):
            return self.stage == "scale_loss" or (by_apply and self.stage == "get_scaled_loss")
        return len(marked) == len(gradients) or (by_apply and self.has_last_or_named_loss(gradients[0]))

    def marked(self, gradients):
        """Return the gradients with a mark that this place knows."""
        return [gradient for gradient in gradients if gradient.is_marked and self.is_here(gradient)]

    def apply(self, number, how, other):
        """Apply a gradient, or two gradients in one step, by `apply` or `apply_gradients`."""
        by_apply = how % 2 == 0
        gradients = [self.choose(number, lambda gradient: self.is_right([gradient], by_apply))]
        if how in (2, 3):
            gradients = [self.choose(number), self.choose(other)]
        if None in gradients or not self.is_right(gradients, by_apply):
            return
        (loss, *_), marked = [gradient.loss for gradient in gradients], self.marked(gradients)
        named = loss is not None and loss is not self.last and len(marked) < len(gradients)

        def action():
            grads, weights = [gradient.tensor for gradient in gradients], self.two.weights[: len(gradients)]
            if by_apply:
                self.two.optimizer.apply(grads, weights, loss=loss.tensor if named else None)
            else:
                self.two.optimizer.apply_gradients(zip(grads, weights, strict=True))

        self.actions.append(action)
        if loss is None and marked and marked[0] is self.change:
            self.stage, self.change = self.change.before
        for weight, gradient in enumerate(gradients):
            self.right[weight] += gradient.value
        self.steps += 1

    @invariant()
    def went(self):
        """Require that the weights moved by the true gradients."""
        self.two.went(*self.right)


def check_any_order(wrapper_class):
    """Require that no step divides by the scale of another loss, and that there is no warning."""

    class Calls(AnyOrder):
        wrapper = wrapper_class
        names = NAMES_OF_TENSORFLOW if hasattr(wrapper_class, "get_scaled_loss") else NAMES

    run_state_machine_as_test(Calls, settings=settings(few_examples, stateful_step_count=4))
