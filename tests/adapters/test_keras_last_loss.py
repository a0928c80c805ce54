"""Gradients belong to the last scaled loss, or to the loss that the caller names, on the backend of this process.

The scale grows after each step, so that gradients divided by the scale of another step are wrong by a factor of two.
"""

from contextlib import nullcontext

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossscale_core import DynamicScaling
from lossscale_core.errors import CallOrderError
from tests.adapters.keras_loops import BACKEND, EACH_WRAPPER, LossScaleOptimizer, value_of
from tests.sweeping import few_examples

GROWS = DynamicScaling(init_scale=0.25, min_scale=0.25, growth_interval=1)
pytestmark = pytest.mark.filterwarnings("error::UserWarning")  # right loops are silent


class Two:
    """An optimizer around two weights at zero, and eager calls."""

    def __init__(self, wrapper=LossScaleOptimizer):
        self.weights = [keras.Variable(0.0), keras.Variable(0.0)]
        self.optimizer = wrapper(keras.optimizers.SGD(1.0), GROWS)
        self.optimizer.build(self.weights)

    def scaled(self, gradient):
        """Return the scaled gradient of a loss, and the loss, which is the gradient times a weight of 1."""
        loss = self.optimizer.scale_loss(keras.ops.convert_to_tensor(float(gradient)))
        return [keras.ops.copy(loss)], loss

    def apply(self, grads, weight, loss=None):
        """Apply scaled gradients."""
        self.optimizer.apply(grads, [self.weights[weight]], loss=loss)

    def gradients(self, weights, state):
        """Return the scaled gradients of a loss, as a pure function of JAX of the values of variables."""
        import jax

        def scaled_loss(weights):
            with keras.StatelessScope(state_mapping=list(zip(self.optimizer.variables, state, strict=True))):
                return self.optimizer.scale_loss(weights[0] * 3.0 + weights[1] * 5.0)

        return jax.grad(scaled_loss)(weights)

    def went(self, first, second=0.0):
        """Require that the weights moved by these amounts."""
        assert [float(value_of(weight)) for weight in self.weights] == [-first, -second]


@EACH_WRAPPER
@few_examples
@given(
    program=st.lists(
        st.one_of(
            st.tuples(st.just("scale"), st.integers(0, 1), st.sampled_from([1.0, 2.0, -3.0])),
            st.tuples(st.just("apply the last")),
            st.tuples(st.just("apply by name"), st.integers(0, 5)),
        ),
        max_size=12,
    )
)
def test_any_order_of_calls(wrapper, program):
    """Losses are applied, dropped, or applied later by name, and each gradient is divided by its own scale."""
    two, scaled, right, last = Two(wrapper), [], [0.0, 0.0], None
    for call, *arguments in program:
        if call == "scale":
            weight, gradient = arguments
            last = (*two.scaled(gradient), weight, gradient)
            scaled.append(last)
        elif scaled and (arguments or scaled[-1] is last):
            grads, loss, weight, gradient = scaled.pop(arguments[0] % len(scaled) if arguments else -1)
            two.apply(grads, weight, loss if arguments else None)
            right[weight] += gradient
    two.went(*right)


@EACH_WRAPPER
def test_two_losses_and_halves_of_one(wrapper):
    """Two losses, and the halves of one loss, are scaled before the first step. The scale grows between the steps."""
    two = Two(wrapper)
    for _ in range(2):
        first, second = two.scaled(3.0)[0], two.scaled(5.0)[0]
        two.apply(first, 0)
        two.apply(second, 1)
        (half,), _ = two.scaled(2.0)
        two.apply([half], 0)
        two.apply([half], 1)
    two.went(10.0, 14.0)


@EACH_WRAPPER
def test_a_failed_step_keeps_the_loss(wrapper):
    """After a step that raises an error, the gradients of the loss can still be applied."""
    two, unbuilt = Two(wrapper), wrapper(keras.optimizers.SGD(1.0))
    grads, _ = two.scaled(3.0)
    for step, counts in (
        (lambda: two.optimizer.apply(grads * 2, two.weights[:1]), "2 gradients came for 1 variables"),
        (lambda: unbuilt.apply([unbuilt.scale_loss(keras.ops.ones(()))]), "1 gradients came for 0 variables"),
    ):
        with pytest.raises(ValueError, match=counts):
            step()
    assert int(two.optimizer.metrics()["steps"]) == int(unbuilt.metrics()["steps"]) == 0
    two.optimizer.dynamic_scale.assign(64.0)
    two.apply(grads, 0)
    two.went(3.0)


@EACH_WRAPPER
def test_a_named_loss_is_scaled_once(wrapper):
    """`loss=` must be a loss that this optimizer scaled, and a scaled loss cannot be scaled again."""
    two, other = Two(wrapper), Two(wrapper)
    grads, loss = two.scaled(3.0)
    for wrong in (keras.ops.ones(()), other.scaled(3.0)[1], []):
        with pytest.raises(ValueError, match="was not scaled by this optimizer; pass what scale_loss"):
            two.apply(grads, 0, wrong)
    with pytest.raises(CallOrderError, match="this loss is scaled already"):
        two.optimizer.scale_loss(loss)
    two.went(0.0)


@EACH_WRAPPER
@pytest.mark.parametrize("by", ["apply", "apply_gradients"])
def test_reading_the_scale_before_apply_warns(wrapper, by):
    """Reading the scale between `scale_loss` and `apply` warns once, because `apply` divides by it, too."""
    two = Two(wrapper)
    step = {
        "apply": lambda grads: two.apply(grads, 0),
        "apply_gradients": lambda grads: two.optimizer.apply_gradients(zip(grads, two.weights[:1], strict=True)),
    }[by]
    for _ in range(2):
        step(two.scaled(float(two.optimizer.loss_scale))[0])
        assert float(two.optimizer.loss_scale) > 0.0
    for is_first in (True, False):
        grads, _ = two.scaled(2.0)
        scale = float(two.optimizer.loss_scale)
        with pytest.warns(UserWarning, match="read it after apply") if is_first else nullcontext():
            step([grads[0] / scale])


@pytest.mark.skipif(BACKEND != "jax", reason="pure functions")
@pytest.mark.parametrize("as_scan", [False, True])
def test_pure_steps_use_their_own_state(as_scan):
    """Pure gradients and steps work in separate `jit` calls, and in a `scan` after an eager loss was scaled.

    A later eager step divides by the scale of its own loss.
    """
    import jax

    two = Two()
    if as_scan:
        two.scaled(7.0)

    def step(carry, _):
        weights, state = carry
        return two.optimizer.stateless_apply(state, two.gradients(weights, state), weights), None

    carry = [weight.value for weight in two.weights], [variable.value for variable in two.optimizer.variables]
    if as_scan:
        (weights, state), _ = jax.lax.scan(step, carry, None, length=4)
    else:
        gradients, apply = jax.jit(two.gradients), jax.jit(two.optimizer.stateless_apply)
        for step in (apply, apply, two.optimizer.stateless_apply, jax.jit(two.optimizer.stateless_apply)):
            weights, state = carry
            carry = step(state, gradients(weights, state), weights)
        weights, state = carry
    assert [float(weight) for weight in weights] == [-12.0, -20.0]
    is_scale = [variable is two.optimizer.dynamic_scale for variable in two.optimizer.variables]
    assert float(state[is_scale.index(True)]) == 4.0
    grads, _ = two.scaled(3.0)
    two.optimizer.dynamic_scale.assign(64.0)
    two.apply(grads, 0)
    two.went(3.0)


@pytest.mark.skipif(BACKEND != "jax", reason="pure functions")
def test_eager_steps_with_pure_gradients():
    """The gradients are divided by the current scale, not by the scale of the last eager loss. No tracer is stored."""
    import jax

    two = Two()
    gradients = jax.jit(two.gradients)
    for _ in range(3):
        two.scaled(7.0)
        two.optimizer.dynamic_scale.assign(64.0)
        for weight in (0, 1):
            values = (
                [variable.value for variable in variables] for variables in (two.weights, two.optimizer.variables)
            )
            with jax.checking_leaks():
                grads = gradients(*values)
            two.apply([grads[weight]], weight)
    two.went(9.0, 15.0)


@pytest.mark.skipif(BACKEND != "torch", reason="torch.compile")
def test_torch_compile_scales_the_loss():
    """torch.compile records no loss. The step divides by the current scale, without a warning."""
    import torch

    two = Two()
    scaled = torch.compile(lambda weight: two.optimizer.scale_loss(weight * 3.0), backend="eager", fullgraph=True)
    for _ in range(3):
        weight = torch.zeros((), requires_grad=True)
        scaled(weight).backward()
        two.apply([weight.grad], 0)
    two.went(9.0)


@pytest.mark.parametrize("policy", ["none", 8.0])
def test_a_nested_loss_can_be_named(policy):
    """A nested structure of losses is scaled in float32 or wider, and can be passed as `loss=`."""
    optimizer, weight = LossScaleOptimizer(keras.optimizers.SGD(1.0), policy), keras.Variable(np.zeros(2, "float32"))
    losses = optimizer.scale_loss({"a": keras.ops.ones((), "float16"), "b": keras.ops.ones(())})
    assert keras.backend.standardize_dtype(losses["a"].dtype) == "float32"
    assert float(losses["a"]) == float(optimizer.loss_scale)
    optimizer.scale_loss(keras.ops.ones(()))
    grad = keras.ops.ones(2) * (8.0 if policy == 8.0 else 1.0)
    optimizer.apply([grad], [weight], loss=losses)
    assert list(value_of(weight)) == [-1.0, -1.0]
