"""`loss_scaled`: any optax-shaped optimizer, its step applied or skipped as a whole."""

import sys
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from lossscale_core import as_policy, state_from_dict
from lossscale_core.errors import PolicyError, ScaleStateError
from lossscale_jax import _axes
from lossscale_jax._accumulation import Window, empty_window, extended, mean
from lossscale_jax._grads import cast_to, finite_when_unscaled, lifted_leaves, multiplied, select, unscale
from lossscale_jax._norm import clip_factor, global_norm
from lossscale_jax._state import beside, init_state
from lossscale_jax._step import apply_or_skip, no_updates, with_extra_args, with_updates


class LossScaledState(NamedTuple):
    """The optimizer state of `loss_scaled`."""

    scale_state: Any
    """The policy's state; `get_scale_state` finds it from the outside."""
    inner_state: Any
    """The wrapped optimizer's own state; a skipped step leaves it untouched."""
    window: Window | None
    """None without gradient accumulation."""

    def __getattr__(self, name: str) -> Any:
        if hasattr(self.scale_state, name):
            hint = f"did you mean get_scale_state(opt_state).{name}?"
        elif hasattr(self.inner_state, name):
            hint = f"did you mean opt_state.inner_state.{name}?"
        else:
            hint = "what the wrapped optimizer keeps is in opt_state.inner_state"
        raise AttributeError(f"the optimizer state of loss_scaled has no {name}; {hint}")


class _Pair(NamedTuple):
    init: Callable[..., Any]
    update: Callable[..., Any]


class Transformation(_Pair):
    """optax's shape of an optimizer, for where optax is not in use."""


def loss_scaled(
    inner: Any,
    policy: Any,
    *,
    axis_name: Any = None,
    max_norm: float | None = None,
    accumulation_steps: int = 1,
    drop: Literal["window", "micro_batch"] = "window",
    keep_dtypes: bool = False,
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

    `inner` is any optimizer of optax's shape, `policy` anything `as_policy` takes; parameters are a pytree of arrays
    (partition an Equinox model first). `inner` sees unscaled gradients, in float32 or wider, clipped to a global norm
    of `max_norm` by the read that proves them finite. A skipped step gives zero updates and leaves the inner state bit
    for bit. Where each device still has gradients of its own under `shard_map` or `pmap`, `axis_name` combines the
    decision over them (where you clip or accumulate, reduce first: `axis_name` goes with neither).

    With `accumulation_steps` the mean of that many micro-batches makes one step, and other calls give zero updates.
    `drop="window"` skips the whole window if one of them overflowed, and the window counts as one step of the policy.
    `drop="micro_batch"` leaves out only those that overflowed and divides by the number of the others; then every
    micro-batch counts, and the scale may change within a window.

    Of half-precision parameters, too, updates and inner state are float32. With `keep_dtypes` they are what they are
    without us: `inner` is initialised with the parameters as they are, and gets each gradient in the dtype in which it
    came, unscaled in float32 first. That halves the memory of the state, and loses what is too small for float16.

    The result is an `optax.GradientTransformationExtraArgs` where optax is in use. It can do one thing more, which
    saves memory and time: `params, opt_state = optimizer.apply_gradients(grads, opt_state, params)` updates and applies
    in one go; with parameters and state donated to `jit`, a step costs little more than reading the gradients once.
    Pure; does not synchronise with the host, though XLA may on GPUs: a step holds two `lax.cond`. Raises `PolicyError`
    for settings that make no sense.
    """
    optimizer = _LossScaled(as_policy(policy), axis_name, max_norm, accumulation_steps, drop, keep_dtypes, inner)
    optimizer.validate()
    optax = sys.modules.get("optax")
    shape: Any = Transformation if optax is None else optax.GradientTransformationExtraArgs
    transformation = shape(optimizer.init, optimizer.update)
    transformation.apply_gradients = optimizer.apply_gradients
    return transformation


def get_scale_state(opt_state: Any) -> Any:
    """Return the scale state in an optimizer state, however deep `loss_scaled` is nested in it.

    Raises `ScaleStateError` where there is none, or where there are several (the message lists their paths), and where
    a wrapper of optax around `loss_scaled` drops overflows before they can lower the scale.
    """
    _require_overflows_seen(opt_state)
    found = _find(opt_state)
    if len(found) == 1:
        (state,) = found.values()
        leaves = jax.tree.leaves(state)  # bare arrays, also where flax nnx keeps them in variables that it changes
        return state._make(leaves) if len(leaves) == len(state) else state
    if found:
        raise ScaleStateError(
            f"the optimizer state holds {len(found)} scale states, at {', '.join(found)}; pass the part that you mean"
        )
    raise ScaleStateError(
        "the optimizer state holds no scale state; wrap the optimizer in loss_scaled, or merge what was split"
    )


def load_scale_state(opt_state: Any, saved: Any, policy: Any) -> Any:
    """Return an optimizer state with its scale state restored from `saved`, however deep `loss_scaled` is nested in it.

    `saved` is what `lossscale_core.state_to_dict` made in this framework or another, and `policy` that of
    `loss_scaled`; the arrays go where those in `opt_state` are. As `lossscale_core.state_from_dict`, warns
    (`CheckpointWarning`) of each difference to the policy it was saved with, and raises `CheckpointError` for a newer
    version or what is no saved state. Raises `ScaleStateError` where `opt_state` holds no scale state, several, or one
    of another kind of policy.
    """
    get_scale_state(opt_state)
    state = state_from_dict(saved, policy)

    def restored(node: Any) -> Any:
        if not isinstance(node, LossScaledState):
            return node
        leaves, structure = jax.tree.flatten(node.scale_state)
        if len(leaves) != len(state):
            raise ScaleStateError(
                f"the optimizer state holds {len(leaves)} numbers of a scale state, and {policy!r} keeps {len(state)}; "
                "pass the policy that loss_scaled was given"
            )
        placed = [jnp.asarray(value, device=_place(old)) for value, old in zip(state, leaves, strict=True)]
        return node._replace(scale_state=jax.tree.unflatten(structure, placed))

    return jax.tree.map(restored, opt_state, is_leaf=lambda node: isinstance(node, LossScaledState))


def _place(array: Any) -> Any:
    """Return where `array` has to stay; None where JAX may move it, as to the mesh of what it meets under `jit`."""
    return array.sharding if getattr(array, "committed", False) else None


_REDUCE = "reduce them first, as with jax.lax.pmean"
_ADVICE = (
    f"{_REDUCE}; or, where the wrapped optimizer reduces them or each device owns a part of the parameters, pass "
    "axis_name={names}"
)


class _LossScaled(NamedTuple):
    policy: Any
    axis_name: Any
    max_norm: float | None
    accumulation_steps: int
    drop: str
    keep_dtypes: bool
    inner: Any

    def validate(self) -> None:
        if self.max_norm is not None and not 0.0 < self.max_norm < float("inf"):
            raise PolicyError(f"max_norm={self.max_norm!r} must be positive and finite; leave it out not to clip")
        if self.axis_name is not None and (self.max_norm is not None or self.accumulation_steps != 1):
            raise PolicyError(
                "max_norm and accumulation_steps are for gradients that are reduced already, and axis_name for those "
                "that are not; reduce the gradients over the axis first and leave axis_name out"
            )
        if not (isinstance(self.accumulation_steps, int) and self.accumulation_steps >= 1):
            raise PolicyError(f"accumulation_steps={self.accumulation_steps!r} must be an integer of at least 1")
        if not isinstance(self.keep_dtypes, bool):
            raise PolicyError(f"keep_dtypes={self.keep_dtypes!r} must be True or False")
        if self.drop not in ("window", "micro_batch"):
            raise PolicyError(f"drop={self.drop!r} must be 'window' or 'micro_batch'")

    def init(self, params: Any) -> LossScaledState:
        """Return the optimizer state before the first step."""
        inner_state = self.inner.init(self._shown(params))
        if _find(inner_state):
            raise PolicyError("inner is loss-scaled already; wrap the optimizer once")
        window = None if self.accumulation_steps == 1 else empty_window(params)
        return beside(LossScaledState(init_state(self.policy), inner_state, window), params)

    def update(self, updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, LossScaledState]:
        """Return the updates for scaled gradients `updates`, zero where the step is skipped, and the state after it."""
        inner_update = with_extra_args(self.inner.update)

        def step(grads: Any, inner_state: Any) -> Any:
            return inner_update(grads, inner_state, self._shown(params), **extra_args)

        def kept(grads: Any, inner_state: Any) -> Any:
            return no_updates(grads), inner_state

        return self._take(step, kept, updates, state)

    def apply_gradients(self, grads: Any, state: Any, params: Any, **extra_args: Any) -> tuple[Any, LossScaledState]:
        """Return the parameters and the state after a step with scaled gradients; as they were where it is skipped."""
        inner_update = with_extra_args(self.inner.update)

        def step(grads: Any, inner_state: Any) -> Any:
            updates, inner_state = inner_update(grads, inner_state, self._shown(params), **extra_args)
            return with_updates(params, updates), inner_state

        def kept(_: Any, inner_state: Any) -> Any:
            return params, inner_state

        return self._take(step, kept, grads, state)

    def _take(self, step: Any, kept: Any, grads: Any, state: Any) -> tuple[Any, LossScaledState]:
        if not isinstance(state, LossScaledState):
            raise ScaleStateError(
                f"{type(state).__name__} is no state of loss_scaled; pass what its init returned. To go on from a "
                "checkpoint of the wrapped optimizer alone, pass optimizer.init(params)._replace(inner_state=...)"
            )
        if (state.window is None) != (self.accumulation_steps == 1):
            raise PolicyError(
                f"accumulation_steps={self.accumulation_steps} does not fit a state made "
                f"{'without' if state.window is None else 'with'} accumulation; make the optimizer as it was saved"
            )
        if state.window is None:
            return self._take_step(step, kept, grads, state)
        return self._take_micro_step(step, kept, grads, state)

    def _take_step(self, step: Any, kept: Any, grads: Any, state: Any) -> tuple[Any, LossScaledState]:
        before, clip = state.scale_state, None
        if self.max_norm is None:
            finite = self._decision(self._finite(grads, before), before)
        else:
            norm = global_norm(grads, before.loss_scale)
            fits = self._finite(grads, before) if self.keep_dtypes else True
            finite = self._decision(jnp.isfinite(norm) & fits, before)
            clip = clip_factor(norm, self.max_norm)

        def unscaled_step(grads: Any, inner_state: Any) -> Any:
            return step(self._for_inner(multiplied(unscale(grads, before), clip), grads), inner_state)

        def unscaled_kept(grads: Any, inner_state: Any) -> Any:
            return kept(unscale(grads, before), inner_state)

        result, inner_state = apply_or_skip(finite, unscaled_step, unscaled_kept, grads, state.inner_state)
        return result, LossScaledState(self.policy.update(before, finite, xp=jnp), inner_state, None)

    def _take_micro_step(self, step: Any, kept: Any, grads: Any, state: Any) -> tuple[Any, LossScaledState]:
        before = state.scale_state
        finite = self._decision(self._finite(grads, before), before)
        window = extended(state.window, grads, finite, before, self.accumulation_steps)
        is_full = window.seen >= self.accumulation_steps
        if self.drop == "window":
            applies = window.finite == window.seen
            after = select(is_full, self.policy.update(before, applies, xp=jnp), before)
        else:
            applies = window.finite > 0
            after = self.policy.update(before, finite, xp=jnp)

        def mean_step(window: Any, inner_state: Any) -> Any:
            average = mean(window, self.accumulation_steps)
            clip = None if self.max_norm is None else clip_factor(global_norm(average), self.max_norm)
            return step(self._for_inner(multiplied(average, clip), grads), inner_state)

        def window_kept(window: Any, inner_state: Any) -> Any:
            return kept(window.total, inner_state)

        result, inner_state = apply_or_skip(is_full & applies, mean_step, window_kept, window, state.inner_state)
        window = select(is_full, jax.tree.map(jnp.zeros_like, window), window)._replace(stepped=is_full & applies)
        return result, LossScaledState(after, inner_state, window)

    def _finite(self, grads: Any, scale_state: Any) -> Array:
        return finite_when_unscaled(grads, scale_state.loss_scale, self.keep_dtypes)

    def _shown(self, params: Any) -> Any:
        """Return the parameters as the inner optimizer sees them: in the dtypes of the gradients that it is given."""
        return params if self.keep_dtypes else lifted_leaves(params)

    def _for_inner(self, unscaled: Any, grads: Any) -> Any:
        """Return `unscaled` in the dtypes of `grads` where they are to be kept."""
        return cast_to(unscaled, grads) if self.keep_dtypes else unscaled

    def _decision(self, finite: Array, scale_state: Any) -> Array:
        """Return `finite` combined over the axis; raise where devices would decide differently."""
        finite = _axes.all_true(finite, self.axis_name)
        _axes.require_reduced(finite, scale_state, _REDUCE if self.max_norm or self.accumulation_steps > 1 else _ADVICE)
        return finite


def _find(opt_state: Any) -> dict[str, Any]:
    """Return the scale states in `opt_state` by their paths."""
    nodes = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=lambda node: isinstance(node, LossScaledState))
    return {
        jax.tree_util.keystr(path) or "the top": node.scale_state
        for path, node in nodes
        if isinstance(node, LossScaledState)
    }


def _require_overflows_seen(opt_state: Any) -> None:
    """Raise `ScaleStateError` where optax skips what is not finite before `loss_scaled` sees it."""
    nodes = jax.tree.leaves(opt_state, is_leaf=_is_end)
    droppers = [_dropper(node) for node in nodes if _dropper(node) and _find(node)]
    if droppers:
        raise ScaleStateError(
            f"{droppers[0]} stands around loss_scaled and drops overflows before they can lower the loss scale; "
            "leave it out, since loss_scaled skips them itself, or wrap it: loss_scaled(optax.chain(...), policy)"
        )


def _is_end(node: Any) -> bool:
    return isinstance(node, LossScaledState) or _dropper(node) is not None


def _dropper(node: Any) -> str | None:
    """Return the name of the wrapper of optax that keeps what is not finite from the optimizer within."""
    optax = sys.modules.get("optax")
    if optax is None:
        return None
    if isinstance(node, optax.ApplyIfFiniteState):
        return "optax.apply_if_finite"
    # `skip_not_finite` and `skip_large_updates` both say so under this key; without such a function there is none.
    if isinstance(node, optax.MultiStepsState) and "should_skip" in node.skip_state:
        return "optax.MultiSteps with a should_skip_update_fn"
    return None
