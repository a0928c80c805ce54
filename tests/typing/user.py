"""A user's code, for type checkers alone: `nox -s typing` runs mypy and pyright on it, as strictly as they can.

Each function has the code of one kind of user. Keras, TensorFlow and optax declare no types, so that only the types of
this library are checked there.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, assert_type

import jax
import jax.numpy as jnp
import keras  # type: ignore[import-untyped]
import numpy as np
import optax  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

import lossscale_core as core
import lossscale_jax
import lossscale_keras
import lossscale_tf
import lossscale_torch
from lossscale import from_tool, state_from_tool
from lossscale_core import DynamicScaling, FixedScaling, ScaleState, ScalingPolicy, StepInfo, testing
from lossscale_jax import LossScaledState, get_scale_state, loss_scaled, value_and_grad
from lossscale_jax.testing import check_train_step
from lossscale_torch import GradScaler, GuardedOptimizer, guarded
from lossscale_torch.testing import check_training_loop

HostState = ScaleState[np.float32 | np.int32]
HostParams = dict[str, NDArray[np.float32]]
ArrayState = ScaleState[jax.Array]
POLICY = DynamicScaling(growth_interval=100)


def use_policies(any_policy: ScalingPolicy, saved: dict[str, Any]) -> list[ScalingPolicy]:
    """Make policies of everything that describes one, restore states, and try a policy on a run."""
    assert_type(POLICY, DynamicScaling)
    assert_type(core.as_policy("dynamic"), DynamicScaling)
    assert_type(core.as_policy(1024.0), FixedScaling)
    assert_type(state_from_tool("torch", saved), ScaleState)
    assert_type(testing.simulate(POLICY, [True, False]).loss_scale_after, NDArray[np.float32])
    _state: HostState = core.state_from_dict(saved, POLICY)
    read = [core.as_policy("policy.toml"), core.load_policy("policy.toml"), from_tool("torch", {"growth_interval": 1})]
    return [*read, core.as_policy(core.policy_to_dict(any_policy))]


def use_numpy(params: HostParams, grads: HostParams) -> tuple[HostParams, str, dict[str, Any]]:
    """Take a step with the five verbs on NumPy."""
    assert_type(core.init_state(POLICY), ScaleState)
    state = assert_type(POLICY.init_state(), HostState)
    assert_type(core.scale(0.5, state), np.floating[Any])
    assert_type(core.scale(np.float16(0.5), state), np.floating[Any])
    finite = assert_type(core.all_finite(grads), np.bool_)
    assert_type(core.unscale(grads, state), HostParams)
    after = assert_type(POLICY.update(state, finite), HostState)
    info = assert_type(core.step_info(state, after), StepInfo[np.float32 | np.int32, np.float32 | np.int32 | np.bool_])
    assert_type(info.applied, np.float32 | np.int32 | np.bool_)
    assert_type(info.loss_scale_after, np.float32 | np.int32)
    assert_type(core.metrics(after), dict[str, np.float32 | np.int32])
    return core.select(finite, params, grads), core.diagnose("dynamic", after), core.state_to_dict(after, "dynamic")


class OwnState(NamedTuple):
    """The state of a policy of the user's own; where it goes into the library, it is `Any`."""

    loss_scale: Any
    steps: Any


class OwnPolicy:
    """A policy of the user's own, with the two methods that it needs."""

    def init_state(self) -> Any:
        """Return the state before the first step."""
        return OwnState(1.0, 0)

    def update(self, state: OwnState, grads_finite: Any, *, xp: Any = None) -> OwnState:
        """Return the state after a step."""
        return state._replace(steps=state.steps + 1)


def use_own_policy() -> str:
    """Pass a policy of the user's own in place of the library's."""
    policy = assert_type(core.as_policy(OwnPolicy()), OwnPolicy)
    saved = core.state_to_dict(policy.init_state(), policy)
    use_policies(policy, saved)
    return core.diagnose(policy, core.state_from_dict(saved, policy))


def use_torch(scaler: GradScaler, optimizer: torch.optim.Optimizer, model: torch.nn.Module, x: Tensor) -> None:
    """Take one step with the drop-in, or again while it overflows, and find the cause of skips."""
    prediction = assert_type(scaler.attach(x, x.square()), Tensor)
    loss = assert_type(scaler.scale(prediction.mean()), Tensor)
    assert_type(scaler.scale([x, x]), list[Tensor])
    assert_type(scaler.scale((x, x)), tuple[Tensor, Tensor])
    assert_type(scaler.scale({"first": x}), dict[str, Tensor])
    assert_type(scaler.scale(each for each in (x, x)), Iterable[Tensor])
    assert_type(scaler.unscale_and_clip_(optimizer, max_norm=1.0), Tensor)
    info = assert_type(scaler.update(), lossscale_torch.StepInfo)
    assert_type(info.applied, bool | Tensor)
    assert_type(info.loss_scale_used, float | Tensor)
    assert_type(info.applied_of(optimizer), bool | Tensor)
    assert_type(scaler.get_scale(), float)
    for attempt in scaler.attempts(model, retries=16):
        if attempt.info:
            assert_type(attempt.info.applied, bool | Tensor)
        assert_type(attempt.scales, list[float])
    assert_type(scaler.last_step.applied, bool | Tensor)  # after the loop, as on the page of retries
    plan = lossscale_torch.float32_plan(model, [lambda: assert_type(model(x), Any).mean()], at_least=2.0)
    assert_type(plan.after.init_scale, float | None)
    with lossscale_torch.keep_in_float32(model, plan.modules):
        print(lossscale_torch.overflow_report(model.named_parameters(), loss=loss).verdict)
    scale = lossscale_torch.range_report(model, lambda: loss).init_scale
    GradScaler("cpu", init_scale=scale or 1.0, half_gradients=True, norm_group=dist.group.WORLD)


def use_a_guarded_optimizer(model: torch.nn.Module, any_adam: torch.optim.AdamW) -> None:
    """Make any optimizer atomic; the result has the methods of the optimizer and those of the guard."""
    optimizer = guarded(torch.optim.AdamW(model.parameters(), lr=1e-3), max_norm=1.0)
    assert_type(optimizer.last_step.applied, bool | Tensor)
    assert_type(optimizer.last_step.norm, Tensor | None)
    assert_type(optimizer.metrics(), dict[str, Any])
    assert_type(optimizer.param_groups, list[dict[str, Any]])
    use_a_guarded_optimizer(model, optimizer)
    if isinstance(any_adam, GuardedOptimizer):
        assert_type(any_adam.last_step, lossscale_torch.StepInfo)


def use_torch_verbs(params: list[Tensor], loss: Tensor) -> list[Tensor]:
    """Take one step with the verbs."""
    state = assert_type(lossscale_torch.init_state("dynamic", device="cpu"), ScaleState[Tensor])
    assert_type(lossscale_torch.scale(loss, state), Tensor)
    grads = assert_type(lossscale_torch.unscale([param.clone() for param in params], state), list[Tensor])
    finite = assert_type(lossscale_torch.all_finite(grads, process_group=dist.group.WORLD), Tensor)
    assert_type(lossscale_torch.clip_and_check_(params, max_norm=1.0), tuple[Tensor, Tensor])
    return assert_type(lossscale_torch.select(finite, grads, params), list[Tensor])


class Params(NamedTuple):
    """A JAX user's parameters."""

    weight: jax.Array
    bias: jax.Array


def loss(params: Params, inputs: jax.Array) -> jax.Array:
    """Compute a custom loss."""
    return jnp.mean((inputs @ params.weight + params.bias) ** 2)


def loss_and_count(params: Params, inputs: jax.Array) -> tuple[jax.Array, int]:
    """Compute a loss and something next to it."""
    return loss(params, inputs), len(inputs)


def use_optax(params: Params, grads: Params) -> Params:
    """Train by `loss_scaled`, in both ways."""
    optimizer = loss_scaled(optax.adam(1e-3), POLICY, max_norm=1.0, accumulation_steps=2)
    assert_type(optimizer, lossscale_jax.LossScaledTransformation)
    assert_type(optimizer.policy, ScalingPolicy)
    opt_state = assert_type(optimizer.init(params), LossScaledState)
    assert_type(opt_state.scale_state, ArrayState)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    assert_type(updates, Params)
    params, opt_state = optimizer.apply_gradients(grads, opt_state, params, value=jnp.float32(1.0))
    saved = core.state_to_dict(assert_type(get_scale_state(opt_state), ArrayState), POLICY)
    assert_type(lossscale_jax.load_scale_state(opt_state, saved, POLICY), LossScaledState)
    last_step = lossscale_jax.get_last_step(opt_state)
    assert_type(last_step.applied, jax.Array)
    assert_type(last_step.norm, jax.Array | None)
    if opt_state.window is not None:
        assert_type(opt_state.window.seen, jax.Array)
    return assert_type(params, Params)


def use_value_and_grad(params: Params, inputs: jax.Array) -> Params:
    """Train by `value_and_grad` and the verbs."""
    state = assert_type(lossscale_jax.init_state(POLICY), ArrayState)
    assert_type(lossscale_jax.scale(loss(params, inputs), state), jax.Array)
    out = value_and_grad(loss)(state, params, inputs)
    assert_type(out.value, jax.Array)
    assert_type(out.aux, None)
    assert_type(out.grads, Params)
    assert_type(out.grads_finite, jax.Array)
    with_aux = value_and_grad(loss_and_count, has_aux=True)(state, params, inputs)
    assert_type(with_aux.aux, int)
    assert_type(with_aux.grads, Params)
    averaged = value_and_grad(loss, axis_name=("data", "model"))(state, params, inputs=inputs)
    assert_type(averaged.grads, Params)
    assert_type(POLICY.update(state, out.grads_finite, xp=jnp), ArrayState)
    return lossscale_jax.select(out.grads_finite, out.grads, params)


def use_jax_verbs(grads: dict[str, jax.Array], losses: tuple[jax.Array, jax.Array]) -> str:
    """Keep the structure of the arguments in the results."""
    state = lossscale_jax.init_state(POLICY, device=jax.devices()[0])  # pyright: ignore[reportUnknownArgumentType]
    assert_type(lossscale_jax.scale(1.0, state), jax.Array)
    assert_type(lossscale_jax.scale(losses, state), tuple[jax.Array, jax.Array])
    assert_type(lossscale_jax.unscale(grads, state), dict[str, jax.Array])
    assert_type(lossscale_jax.all_finite(grads, axis_name="data"), jax.Array)
    return lossscale_jax.overflow_report(lossscale_jax.select(True, grads, grads)).verdict


def use_the_checks(build: Callable[[GradScaler], Any], step: Callable[[Params, jax.Array], Params]) -> list[str]:
    """Check training loops."""
    params = Params(jnp.ones(2), jnp.ones(2))
    check_train_step(step, params, [params.weight] * 6, may_move=["[1].step"])
    return check_training_loop(build)


def use_keras(model: Any, loss: Any, grads: list[Any]) -> str:
    """Train by `fit`, or take a step in a loop of one's own, on each backend."""
    guard, adam = lossscale_keras.SpikeGuard(), keras.optimizers.Adam(0.05)
    optimizer = lossscale_keras.LossScaleOptimizer(adam, POLICY, global_clipnorm=1.0, guard=guard)
    assert_type(optimizer.policy, ScalingPolicy)
    assert_type(optimizer.last_step, StepInfo)
    assert_type(optimizer.scale_state, ScaleState)
    assert_type(optimizer.metrics(), dict[str, Any])
    weights, _ = optimizer.stateless_apply(list(model.variables), grads, model.trainable_variables)
    print(lossscale_keras.overflow_report(list(zip(grads, weights, strict=True)), loss=loss).verdict)
    return optimizer.diagnose() if optimizer.last_step.applied else str(float(optimizer.loss_scale))


def use_tensorflow(model: Any, tape: Any, loss: Any) -> Any:
    """Take a step with the calls of TensorFlow's documents, eagerly and in a session of `tf.compat.v1`."""
    guard, sgd = lossscale_tf.SpikeGuard(), keras.optimizers.SGD(0.5)
    optimizer = lossscale_tf.LossScaleOptimizer(sgd, lossscale_tf.DynamicScaling(init_scale=2.0**20), guard=guard)
    scaled_loss = optimizer.get_scaled_loss(loss)
    optimizer.get_unscaled_gradients(tape.gradient(scaled_loss, model.trainable_variables), loss=scaled_loss)
    assert_type(optimizer.last_step, StepInfo)
    assert_type(optimizer.scale_state, ScaleState)
    assert_type(optimizer.diagnose(), str)
    return lossscale_tf.v1.LossScaleOptimizer(sgd, "dynamic").minimize(loss, tape)  # pyright: ignore[reportUnknownVariableType]


def use_tensor_verbs(grads: dict[str, Any]) -> dict[str, Any]:
    """Keep the structure of the arguments in the results."""
    state = assert_type(lossscale_tf.init_state("dynamic"), ScaleState)
    assert_type(lossscale_tf.unscale(lossscale_tf.scale(grads, state), state), dict[str, Any])
    state = assert_type(lossscale_keras.init_state("dynamic"), ScaleState)
    grads = assert_type(lossscale_keras.unscale(lossscale_keras.scale(grads, state), state), dict[str, Any])
    return assert_type(lossscale_keras.select(lossscale_keras.all_finite(grads), grads, grads), dict[str, Any])


def make_mistakes(state: ScaleState, scaler: GradScaler, opt_state: LossScaledState) -> None:
    """Make mistakes that a type checker has to find: `--warn-unused-ignores` says where it does not."""
    core.diagnose(object(), state)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    core.scale(1.0, object())  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    state.scale  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018
    DynamicScaling(growth_interval="100")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    GradScaler("cpu", max_grad_norm=1.0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    _ = scaler.update().aplied  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
    scaler.scale(1.0)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    lossscale_jax.scale(1.0, opt_state)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    loss_scaled(optax.sgd(0.1), POLICY, skip_by="never")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    loss_scaled(optax.sgd(0.1), object())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
