"""Gradients belong to the last scaled loss, or to the loss that the caller names, on the backend of this process."""

from contextlib import nullcontext

import keras
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossscale_core.errors import CallOrderError
from tests.adapters.keras_loops import BACKEND, EACH_WRAPPER, Two
from tests.sweeping import few_examples

pytestmark = pytest.mark.filterwarnings("error::UserWarning")  # right loops are silent


@EACH_WRAPPER
@few_examples
@given(
    program=st.lists(
        st.one_of(
            st.tuples(st.just("scale"), st.sampled_from([1.0, 2.0, -3.0])),
            st.tuples(st.just("apply"), st.none() | st.integers(0, 5)),
            st.tuples(st.just("fail"), st.none()),
        ),
        max_size=12,
    )
)
def test_any_order_of_calls(wrapper, program):
    """In any order of losses, steps and failed steps, each gradient is divided by the scale of its own loss."""
    two, losses, right = Two(wrapper), [], 0.0
    for call, argument in program:
        if call == "scale":
            losses.append((*two.scaled(argument), argument))
        elif losses:
            grads, loss, gradient = losses[-1 if argument is None else argument % len(losses)]
            if call == "apply":
                two.apply(grads, loss=None if argument is None else loss)
                right += gradient
            else:
                with pytest.raises(ValueError, match="2 gradients came for 1 variables"):
                    two.apply(grads * 2)
    two.went(right)


@EACH_WRAPPER
def test_a_named_loss_is_scaled_once(wrapper):
    """`loss=` must be a loss, or a nested structure of losses, that this optimizer scaled once."""
    two, other = Two(wrapper), Two(wrapper)
    grads, loss = two.scaled(3.0)
    for wrong in (keras.ops.ones(()), other.scaled(3.0)[1], []):
        with pytest.raises(ValueError, match="was not scaled by this optimizer; pass what scale_loss"):
            two.apply(grads, loss=wrong)
    with pytest.raises(CallOrderError, match="this loss is scaled already"):
        two.optimizer.scale_loss(loss)
    losses = two.optimizer.scale_loss({"a": keras.ops.ones((), "float16"), "b": loss / 0.25})
    two.apply(grads)
    two.scaled(7.0)
    two.apply([losses["a"] + losses["b"]], loss=losses)
    two.went(7.0)


@EACH_WRAPPER
def test_reading_the_scale_before_apply_warns(wrapper):
    """Reading the scale between `scale_loss` and `apply` warns once, because `apply` divides by it, too."""
    two = Two(wrapper)
    step = lambda grads: two.optimizer.apply_gradients(zip(grads, two.weights[:1], strict=True))  # noqa: E731
    for _ in range(2):
        step(two.scaled(float(two.optimizer.loss_scale))[0])
        assert float(two.optimizer.loss_scale) > 0.0
    for is_first in (True, False):
        grads, _ = two.scaled(2.0)
        scale = float(two.optimizer.loss_scale)
        with pytest.warns(UserWarning, match="read it after apply") if is_first else nullcontext():
            step([grads[0] / scale])


def _pure_gradients(two):
    """Return a pure function of JAX from the values of variables to the scaled gradients of a loss."""
    import jax

    def scaled_loss(weights, state):
        with keras.StatelessScope(state_mapping=list(zip(two.optimizer.variables, state, strict=True))):
            return two.optimizer.scale_loss(weights[0] * 3.0 + weights[1] * 5.0)

    return jax.grad(scaled_loss)


def _values(two):
    return [[variable.value for variable in variables] for variables in (two.weights, two.optimizer.variables)]


@pytest.mark.skipif(BACKEND != "jax", reason="pure functions")
def test_pure_steps_use_their_own_state():
    """Pure steps in a `scan` use the scale of their own state, also after an eager loss was scaled."""
    import jax

    two = Two()
    two.scaled(7.0)

    def step(carry, _):
        weights, state = carry
        return two.optimizer.stateless_apply(state, _pure_gradients(two)(weights, state), weights), None

    (weights, _), _ = jax.lax.scan(step, tuple(_values(two)), None, length=4)
    assert [float(weight) for weight in weights] == [-12.0, -20.0]
    grads, _ = two.scaled(3.0)
    two.optimizer.dynamic_scale.assign(64.0)
    two.apply(grads)
    two.went(3.0)


@pytest.mark.skipif(BACKEND != "torch", reason="torch.compile")
def test_compiled_steps_use_the_current_scale():
    """A step that `torch.compile` compiles divides by the scale of the state."""
    import torch

    two = Two()
    step = torch.compile(two.apply, backend="eager")
    for _ in range(2):
        step(two.scaled(3.0)[0])
    two.went(6.0)


@pytest.mark.skipif(BACKEND == "tensorflow", reason="its variables record a loss of a trace, too")
def test_eager_steps_with_traced_gradients():
    """An eager step divides traced gradients by the current scale, not by the scale of the last eager loss."""
    two = Two()
    if BACKEND == "jax":
        import jax

        jitted = jax.jit(_pure_gradients(two))
        gradients = lambda: jitted(*_values(two))  # noqa: E731
    else:
        import torch

        loss = torch.compile(lambda a, b: two.optimizer.scale_loss(a * 3.0 + b * 5.0), backend="eager", fullgraph=True)
        weights = [torch.zeros((), requires_grad=True) for _ in range(2)]
        gradients = lambda: torch.autograd.grad(loss(*weights), weights)  # noqa: E731
    for _ in range(3):
        two.scaled(7.0)
        two.optimizer.dynamic_scale.assign(64.0)
        for weight in (0, 1):
            with jax.checking_leaks() if BACKEND == "jax" else nullcontext():
                grads = gradients()
            two.apply([grads[weight]], weight)
    two.went(9.0, 15.0)
