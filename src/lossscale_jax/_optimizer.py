"""`loss_scaled`: any optax-shaped optimizer, its step applied or skipped as a whole."""

import functools
import sys
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from lossscale_core import as_policy
from lossscale_core.errors import PolicyError, ScaleStateError
from lossscale_jax import _axes
from lossscale_jax._accumulation import Window, empty_window, extended, mean
from lossscale_jax._grads import finite_when_unscaled, is_gradient, select, unscale
from lossscale_jax._norm import clip_factor, global_norm
from lossscale_jax._state import init_state
from lossscale_jax._step import apply_or_skip, with_extra_args


class LossScaledState(NamedTuple):
    """The optimizer state of `loss_scaled`."""

    scale_state: Any
    """The policy's state; `get_scale_state` finds it from the outside."""
    inner_state: Any
    """The wrapped optimizer's own state; a skipped step leaves it untouched."""
    window: Window | None
    """None without gradient accumulation."""


class Transformation(NamedTuple):
    """optax's shape of an optimizer, for where optax is not in use."""

    init: Callable[..., Any]
    update: Callable[..., Any]


def loss_scaled(
    inner: Any,
    policy: Any,
    *,
    axis_name: Any = None,
    max_norm: float | None = None,
    accumulation_steps: int = 1,
    drop: Literal["window", "micro_batch"] = "window",
) -> Any:
    """Return `inner` so that it takes the gradients of a scaled loss, and skips those that overflowed.

    ```python
    optimizer = loss_scaled(optax.adam(1e-3), "dynamic")
    opt_state = optimizer.init(params)

    def step(params, opt_state, batch):
        grads = jax.grad(lambda params: scale(loss(params, batch), get_scale_state(opt_state)))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state
    ```

    `inner` is any optimizer of optax's shape, `policy` anything `as_policy` takes. `inner` sees unscaled gradients, in
    float32 or wider, clipped to a global norm of `max_norm` by the read that proves them finite. A skipped step gives
    zero updates and leaves the inner state bit for bit. Where each device still has gradients of its own under
    `shard_map` or `pmap`, `axis_name` combines the decision over them (clip after reducing, then: with `axis_name`
    there is no `max_norm`).

    With `accumulation_steps` the mean of that many micro-batches makes one step, and other calls give zero updates.
    `drop="window"` skips the whole window if one of them overflowed, and the window counts as one step of the policy.
    `drop="micro_batch"` leaves out only those that overflowed and divides by the number of the others; then every
    micro-batch counts, and the scale may change within a window.

    The result is an `optax.GradientTransformationExtraArgs` where optax is in use. Pure; never synchronises with the
    host. Donate the optimizer state to `jit`: a step then costs next to nothing beyond the optimizer's own. Raises
    `PolicyError` for settings that make no sense.
    """
    settings = _Settings(as_policy(policy), axis_name, max_norm, accumulation_steps, drop)
    settings.validate()
    inner_update = with_extra_args(inner.update)

    def init(params: Any) -> LossScaledState:
        inner_state = inner.init(params)
        if _find(inner_state):
            raise PolicyError("inner is loss-scaled already; wrap the optimizer once")
        window = None if accumulation_steps == 1 else empty_window(params)
        return LossScaledState(init_state(policy), inner_state, window)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, LossScaledState]:
        step = functools.partial(inner_update, params=params, **extra_args)
        take = _take_step if state.window is None else _take_micro_step
        return take(settings, step, updates, state)

    optax = sys.modules.get("optax")
    return (Transformation if optax is None else optax.GradientTransformationExtraArgs)(init, update)


def get_scale_state(opt_state: Any) -> Any:
    """Return the scale state in an optimizer state, however deep `loss_scaled` is nested in it.

    Raises `ScaleStateError` where there is none, or where there are several: the message lists their paths.
    """
    found = _find(opt_state)
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise ScaleStateError(
            f"the optimizer state holds {len(found)} scale states, at {', '.join(found)}; pass the part that you mean"
        )
    raise ScaleStateError("the optimizer state holds no scale state; wrap the optimizer in loss_scaled")


class _Settings(NamedTuple):
    policy: Any
    axis_name: Any
    max_norm: float | None
    accumulation_steps: int
    drop: str

    def validate(self) -> None:
        if self.max_norm is not None and not 0.0 < self.max_norm < float("inf"):
            raise PolicyError(f"max_norm={self.max_norm!r} must be positive and finite; leave it out not to clip")
        if self.max_norm is not None and self.axis_name is not None:
            raise PolicyError(
                "max_norm clips what is already reduced, and axis_name is for what is not; reduce the gradients over "
                "the axis first and leave axis_name out"
            )
        if isinstance(self.accumulation_steps, bool) or not self.accumulation_steps >= 1:
            raise PolicyError(f"accumulation_steps={self.accumulation_steps!r} must be an integer of at least 1")
        if self.drop not in ("window", "micro_batch"):
            raise PolicyError(f"drop={self.drop!r} must be 'window' or 'micro_batch'")


def _take_step(settings: _Settings, step: Any, grads: Any, state: Any) -> tuple[Any, LossScaledState]:
    before, clip = state.scale_state, None
    if settings.max_norm is None:
        finite = _decision(settings, finite_when_unscaled(grads, before.loss_scale), before)
    else:
        norm = global_norm(grads, before.loss_scale)
        finite = _decision(settings, jnp.isfinite(norm), before)
        clip = clip_factor(norm, settings.max_norm)

    def unscaled_step(grads: Any, inner_state: Any) -> Any:
        return step(_multiplied(unscale(grads, before), clip), inner_state)

    updates, inner_state = apply_or_skip(finite, unscaled_step, grads, state.inner_state)
    return updates, LossScaledState(settings.policy.update(before, finite, xp=jnp), inner_state, None)


def _take_micro_step(settings: _Settings, step: Any, grads: Any, state: Any) -> tuple[Any, LossScaledState]:
    before = state.scale_state
    finite = _decision(settings, finite_when_unscaled(grads, before.loss_scale), before)
    window = extended(state.window, grads, finite, before)
    is_full = window.seen >= settings.accumulation_steps
    if settings.drop == "window":
        applies = window.finite == window.seen
        after = select(is_full, settings.policy.update(before, applies, xp=jnp), before)
    else:
        applies = window.finite > 0
        after = settings.policy.update(before, finite, xp=jnp)

    def mean_step(window: Any, inner_state: Any) -> Any:
        grads = mean(window)
        clip = None if settings.max_norm is None else clip_factor(global_norm(grads), settings.max_norm)
        return step(_multiplied(grads, clip), inner_state)

    updates, inner_state = apply_or_skip(is_full & applies, mean_step, window, state.inner_state)
    window = select(is_full, jax.tree.map(jnp.zeros_like, window), window)
    return updates, LossScaledState(after, inner_state, window)


def _decision(settings: _Settings, finite: Array, scale_state: Any) -> Array:
    """Return `finite` combined over the axis; raise where devices would decide differently."""
    finite = _axes.all_true(finite, settings.axis_name)
    _axes.require_reduced(finite, scale_state)
    return finite


def _multiplied(grads: Any, factor: Array | None) -> Any:
    if factor is None:
        return grads
    return jax.tree.map(lambda grad: grad * factor.astype(grad.real.dtype) if is_gradient(grad) else grad, grads)


def _find(opt_state: Any) -> dict[str, Any]:
    """Return the scale states in `opt_state` by their paths."""
    nodes = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=lambda node: isinstance(node, LossScaledState))
    return {
        jax.tree_util.keystr(path) or "the top": node.scale_state
        for path, node in nodes
        if isinstance(node, LossScaledState)
    }
