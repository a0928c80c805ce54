"""A JAX user's code, for type checkers alone: `nox -s typing` runs mypy and pyright on it, as strictly as they can."""

from collections.abc import Callable
from typing import NamedTuple, assert_type

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]

import lossscale_jax
from lossscale_core import ScaleState, ScaleWatch, ScalingPolicy, gradient_range, metrics, state_to_dict
from lossscale_core.adapters import GradientReport
from lossscale_jax import LossScaledState, get_scale_state, loss_scaled, scale, select, value_and_grad
from lossscale_jax.testing import check_train_step


class Params(NamedTuple):
    """A user's parameters."""

    weight: jax.Array
    bias: jax.Array


def loss(params: Params, inputs: jax.Array) -> jax.Array:
    """Compute a custom loss."""
    return jnp.mean((inputs @ params.weight + params.bias) ** 2)


def loss_and_count(params: Params, inputs: jax.Array) -> tuple[jax.Array, int]:
    """Compute a loss and something next to it."""
    return loss(params, inputs), len(inputs)


POLICY = lossscale_jax.DynamicScaling(growth_interval=100)


def gradients(params: Params, inputs: jax.Array, opt_state: LossScaledState) -> Params:
    """Differentiate the scaled loss."""

    def scaled_loss(params: Params) -> jax.Array:
        return scale(loss(params, inputs), get_scale_state(opt_state))

    grads: Params = jax.grad(scaled_loss)(params)  # pyright: ignore[reportUnknownVariableType]  # jax' own
    return grads  # pyright: ignore[reportUnknownVariableType]


def train_around_an_optimizer(params: Params, inputs: jax.Array) -> Params:
    """Train by `loss_scaled`, in both ways."""
    loss_scaled(optax.sgd(0.1), "none", guard=lossscale_jax.SpikeGuard())
    optimizer = loss_scaled(optax.adam(1e-3), POLICY, max_norm=1.0, accumulation_steps=2)
    assert_type(optimizer, lossscale_jax.LossScaledTransformation)
    opt_state = optimizer.init(params)
    assert_type(opt_state, LossScaledState)
    assert_type(optimizer.policy, ScalingPolicy)
    assert_type(opt_state.scale_state, ScaleState[jax.Array])

    grads = gradients(params, inputs, opt_state)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    assert_type(updates, Params)
    params, opt_state = optimizer.apply_gradients(grads, opt_state, params, value=jnp.float32(1.0))
    assert_type(params, Params)
    assert_type(get_scale_state(opt_state), ScaleState[jax.Array])
    saved = state_to_dict(get_scale_state(opt_state), POLICY)
    restored = lossscale_jax.load_scale_state(opt_state, saved, POLICY)
    assert_type(restored, LossScaledState)
    last_step = lossscale_jax.get_last_step(opt_state)
    assert_type(last_step.applied, jax.Array)
    assert_type(last_step.norm, jax.Array | None)
    if opt_state.window is not None:
        assert_type(opt_state.window.seen, jax.Array)
    return select(last_step.applied, params, params)


def train_around_a_function(params: Params, inputs: jax.Array) -> Params:
    """Train by `value_and_grad` and the verbs."""
    state = lossscale_jax.init_state(POLICY)
    assert_type(state, ScaleState[jax.Array])
    out = value_and_grad(loss)(state, params, inputs)
    assert_type(out.value, jax.Array)
    assert_type(out.aux, None)
    assert_type(out.grads, Params)
    assert_type(out.grads_finite, jax.Array)
    with_aux = value_and_grad(loss_and_count, has_aux=True)(state, params, inputs)
    assert_type(with_aux.aux, int)
    assert_type(with_aux.grads, Params)
    value_and_grad(loss_and_count, 0, True)(state, params, inputs)
    averaged = value_and_grad(loss, axis_name=("data", "model"))(state, params, inputs=inputs)
    assert_type(averaged.grads, Params)
    value_and_grad(loss, argnums=(0, 1))(state, params, inputs)
    assert_type(POLICY.update(state, out.grads_finite, xp=jnp), ScaleState[jax.Array])
    lambda_loss: Callable[[Params], jax.Array] = lambda params: jnp.sum(params.weight) * loss(params, inputs)  # noqa: E731
    assert_type(value_and_grad(lambda_loss)(state, params).value, jax.Array)
    return select(out.grads_finite, out.grads, params)


def watch(params: Params, opt_state: LossScaledState, grads_at: Callable[[float], dict[str, jax.Array]]) -> None:
    """Log and check a run."""
    ScaleWatch().log(POLICY, get_scale_state(opt_state), loss=jnp.float32(1.0))
    print(gradient_range(grads_at), metrics(get_scale_state(opt_state))["skipped_steps"])
    step: Callable[[Params, jax.Array], Params] = lambda params, inputs: params  # noqa: E731
    check_train_step(step, params, [params.weight] * 6, may_move=["[1].step"])


def use_the_verbs(grads: dict[str, jax.Array], losses: tuple[jax.Array, jax.Array]) -> list[GradientReport]:
    """Keep what goes in where it comes out."""
    state = lossscale_jax.init_state(POLICY, device=jax.devices()[0])  # pyright: ignore[reportUnknownArgumentType]
    assert_type(scale(1.0, state), jax.Array)
    assert_type(scale(losses, state), tuple[jax.Array, jax.Array])
    assert_type(lossscale_jax.unscale(grads, state), dict[str, jax.Array])
    assert_type(lossscale_jax.all_finite(grads, axis_name="data"), jax.Array)
    return lossscale_jax.overflow_report(select(True, grads, grads))


def make_mistakes(opt_state: LossScaledState) -> None:
    """Make mistakes that a type checker has to find: `--warn-unused-ignores` says where it does not."""
    scale(1.0, opt_state)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    opt_state.mu  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018
    loss_scaled(optax.sgd(0.1), POLICY, skip_by="never")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    loss_scaled(optax.sgd(0.1), object())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
