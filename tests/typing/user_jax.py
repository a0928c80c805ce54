"""A JAX user's code, for type checkers alone: `nox -s typing` runs mypy and pyright on it, as strictly as they can."""

from collections.abc import Callable
from typing import NamedTuple, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]

from lossscale_core import (
    ScaleState,
    ScaleWatch,
    ScalingPolicy,
    diagnose,
    gradient_range,
    metrics,
    state_to_dict,
    step_info,
)
from lossscale_core.adapters import GradientReport
from lossscale_jax import (
    DynamicScaling,
    LossScaledState,
    LossScaledTransformation,
    SpikeGuard,
    all_finite,
    get_scale_state,
    init_state,
    load_scale_state,
    loss_scaled,
    overflow_report,
    scale,
    select,
    unscale,
    value_and_grad,
)
from lossscale_jax.testing import check_train_step


class Params(NamedTuple):
    """A user's parameters."""

    weight: jax.Array
    bias: jax.Array


class Batch(NamedTuple):
    """A user's data."""

    inputs: jax.Array
    targets: jax.Array


def loss(params: Params, batch: Batch) -> jax.Array:
    """Compute a custom loss."""
    return jnp.mean((batch.inputs @ params.weight + params.bias - batch.targets) ** 2)


def loss_and_count(params: Params, batch: Batch) -> tuple[jax.Array, int]:
    """Compute a loss and something next to it."""
    return loss(params, batch), len(batch.targets)


POLICY = DynamicScaling(growth_interval=100)


def gradients(params: Params, batch: Batch, opt_state: LossScaledState) -> Params:
    """Differentiate the scaled loss."""

    def scaled_loss(params: Params) -> jax.Array:
        return scale(loss(params, batch), get_scale_state(opt_state))

    grads: Params = jax.grad(scaled_loss)(params)  # pyright: ignore[reportUnknownVariableType]  # jax' own
    return grads  # pyright: ignore[reportUnknownVariableType]


def train_around_an_optimizer(params: Params, batch: Batch) -> Params:
    """Train by `loss_scaled`, in both ways."""
    loss_scaled(optax.sgd(0.1), "none", guard=SpikeGuard())
    optimizer = loss_scaled(optax.adam(1e-3), POLICY, max_norm=1.0, accumulation_steps=2, drop="micro_batch")
    assert_type(optimizer, LossScaledTransformation)
    opt_state = optimizer.init(params)
    assert_type(opt_state, LossScaledState)
    assert_type(optimizer.policy, ScalingPolicy)
    assert_type(opt_state.scale_state, ScaleState[jax.Array])

    grads = gradients(params, batch, opt_state)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    assert_type(updates, Params)
    params, opt_state = optimizer.apply_gradients(grads, opt_state, params, value=jnp.float32(1.0))
    assert_type(params, Params)
    assert_type(get_scale_state(opt_state), ScaleState[jax.Array])
    restored = load_scale_state(opt_state, state_to_dict(get_scale_state(opt_state), POLICY), POLICY)
    assert_type(restored, LossScaledState)
    info = step_info(get_scale_state(opt_state), get_scale_state(restored))
    assert_type(info.applied, jax.Array | np.bool_)
    params = select(info.applied, params, params)
    if opt_state.window is not None:
        assert_type(opt_state.window.stepped, jax.Array)
    return params


def train_around_a_function(params: Params, batch: Batch) -> Params:
    """Train by `value_and_grad` and the verbs."""
    state = init_state(POLICY)
    assert_type(state, ScaleState[jax.Array])
    out = value_and_grad(loss)(state, params, batch)
    assert_type(out.value, jax.Array)
    assert_type(out.aux, None)
    assert_type(out.grads, Params)
    assert_type(out.grads_finite, jax.Array)
    with_aux = value_and_grad(loss_and_count, has_aux=True)(state, params, batch)
    assert_type(with_aux.aux, int)
    assert_type(with_aux.grads, Params)
    value_and_grad(loss_and_count, 0, True)(state, params, batch)
    averaged = value_and_grad(loss, axis_name=("data", "model"))(state, params, batch=batch)
    assert_type(averaged.grads, Params)
    value_and_grad(loss, argnums=(0, 1))(state, params, batch)
    assert_type(POLICY.update(state, out.grads_finite, xp=jnp), ScaleState[jax.Array])
    lambda_loss: Callable[[Params], jax.Array] = lambda params: jnp.sum(params.weight) * loss(params, batch)  # noqa: E731
    of_a_lambda = value_and_grad(lambda_loss)(state, params)
    assert_type(of_a_lambda.value, jax.Array)
    new = Params(params.weight - out.grads.weight, params.bias - out.grads.bias)
    return select(out.grads_finite, new, params)


def watch(
    params: Params, batch: Batch, opt_state: LossScaledState, grads_at: Callable[[float], dict[str, jax.Array]]
) -> str:
    """Log and diagnose a run."""
    log = ScaleWatch()
    log.log(POLICY, get_scale_state(opt_state), loss=loss(params, batch))
    print(gradient_range(grads_at), metrics(get_scale_state(opt_state))["skipped_steps"])
    bool(step_info(get_scale_state(opt_state), get_scale_state(opt_state), spiked=jnp.bool_(True)).applied)
    step: Callable[[Params, Batch], Params] = lambda params, batch: params  # noqa: E731
    check_train_step(step, params, [batch] * 6, may_move=["[1].step"])
    return diagnose(POLICY, get_scale_state(opt_state))


def use_the_verbs(grads: dict[str, jax.Array], losses: tuple[jax.Array, jax.Array]) -> list[GradientReport]:
    """Keep what goes in where it comes out."""
    state = init_state(DynamicScaling(), device=jax.devices()[0])  # pyright: ignore[reportUnknownArgumentType]
    assert_type(state, ScaleState[jax.Array])
    assert_type(scale(1.0, state), jax.Array)
    assert_type(scale(losses, state), tuple[jax.Array, jax.Array])
    assert_type(unscale(grads, state), dict[str, jax.Array])
    assert_type(all_finite(grads, axis_name="data"), jax.Array)
    assert_type(select(True, grads, grads), dict[str, jax.Array])
    return overflow_report(grads)


def make_mistakes(opt_state: LossScaledState) -> None:
    """Make mistakes that a type checker has to find: `--warn-unused-ignores` says where it does not."""
    scale(1.0, opt_state)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    opt_state.mu  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018
    loss_scaled(optax.sgd(0.1), POLICY, drop="batch")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    loss_scaled(optax.sgd(0.1), object())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
