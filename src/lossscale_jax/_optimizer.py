"""`loss_scaled`: any optax optimizer, its step applied or skipped as a whole."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lossscale_core import GuardState, PolicyLike, ScalingPolicy, SpikeGuard, as_policy
from lossscale_core.errors import PolicyError, ScaleStateError
from lossscale_jax import _axes
from lossscale_jax._accumulation import Accumulation, Attempt, Drop
from lossscale_jax._arguments import require_optimizer
from lossscale_jax._debug import unchecked
from lossscale_jax._gradients import finite_when_unscaled, lift_leaves, multiply
from lossscale_jax._late import update_or_skip
from lossscale_jax._norm import clip_factor, global_norm
from lossscale_jax._placement import place_beside
from lossscale_jax._state import GuardedLossScaledState, LossScaledState, find_scale_states, is_own_state
from lossscale_jax._step import Skip, apply_or_skip, with_extra_args, with_updates, zeros_unless
from lossscale_jax._types import PyTree, Tree
from lossscale_jax._verbs import init_state, select, unscale


class Optimizer(Protocol):
    """An optimizer of optax's shape."""

    @property
    def init(self) -> Callable[..., Any]:
        """Takes the parameters; returns the state before the first step."""

    @property
    def update(self) -> Callable[..., Any]:
        """Takes gradients, state and parameters; returns updates and the state after the step."""


class _Init(Protocol):
    def __call__(self, params: PyTree) -> LossScaledState: ...


class _Update(Protocol):
    def __call__(
        self, updates: Tree, state: LossScaledState, params: PyTree = None, **extra_args: Any
    ) -> tuple[Tree, LossScaledState]: ...


class _ApplyGradients(Protocol):
    def __call__(
        self, grads: PyTree, state: LossScaledState, params: Tree, **extra_args: Any
    ) -> tuple[Tree, LossScaledState]: ...


class LossScaledTransformation(optax.GradientTransformationExtraArgs):
    """A transformation of optax that takes the gradients of a scaled loss; `loss_scaled` makes it."""

    init: _Init
    """`init(params)` returns the optimizer state before the first step."""
    update: _Update
    """`update(grads, state, params, **extra_args)` returns the updates, zero where the step is skipped, and the state
    after it."""

    # optax unpacks a transformation into two, and flax nnx rebuilds it from its two elements, so the third function is
    # found through them.
    @property
    def apply_gradients(self) -> _ApplyGradients:
        """`apply_gradients(grads, state, params, **extra_args)` returns the parameters and the state after a step.

        Both are as they were where the step is skipped. It updates and applies in one go, which saves memory and time.
        """
        wrapper = getattr(self.update, "__self__", None)
        if not isinstance(wrapper, _Wrapper):
            raise AttributeError("update was replaced, so there is no apply_gradients; call loss_scaled last")
        return wrapper.apply_gradients


def loss_scaled(
    inner: Optimizer,
    policy: PolicyLike,
    *,
    axis_name: Hashable = None,
    max_norm: float | None = None,
    accumulation_steps: int = 1,
    drop: Drop = "window",
    keep_dtypes: bool = False,
    guard: SpikeGuard | None = None,
    skip: Skip = "cond",
) -> LossScaledTransformation:
    """Wrap `inner` so that it takes the gradients of a scaled loss, and skips those that overflowed.

    ```python
    optimizer = loss_scaled(optax.adam(1e-3), "dynamic")
    opt_state = optimizer.init(params)

    def step(params, opt_state, batch):
        grads = jax.grad(lambda params: scale(loss(params, batch), get_scale_state(opt_state)))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state
    ```

    `inner` sees unscaled gradients, in float32 or wider. A skipped step gives zero updates and leaves the inner state
    bit for bit. Pure; does not synchronise with the host, though XLA may on GPUs: a step holds two `lax.cond`, unless
    `skip="select"`.

    Args:
        inner: Any optimizer of optax's shape, for a pytree of arrays (partition an Equinox model first).
        policy: Anything that `lossscale_core.as_policy` accepts.
        axis_name: The axis of `shard_map` or `pmap`, or a tuple of them, over which to combine the decision, where each
            device still has gradients of its own. Where you clip or accumulate, reduce the gradients first: `axis_name`
            goes with neither.
        max_norm: The global norm to which unscaled gradients are clipped, by the read that proves them finite.
        accumulation_steps: The number of micro-batches whose mean makes one step; other calls give zero updates.
        drop: What an overflow drops. `"window"` skips the whole window, which counts as one step of the policy.
            `"micro_batch"` leaves out those that overflowed and divides by the number of the others; then every
            micro-batch counts, and the scale may change within a window.
        keep_dtypes: Whether `inner` is initialised with half-precision parameters as they are and gets each gradient in
            the dtype in which it came, unscaled in float32 first. That halves the memory of the state, and loses what
            is too small for float16. By default, updates and inner state are float32.
        guard: Skips a step whose norm is far above the norms before it, and then leaves the scale state as it was. The
            norm is that of the unscaled gradients before clipping: of a window's mean where you accumulate, and with
            `axis_name` of the gradients of all devices together. The guard's own state is in `opt_state.guard_state`.
            Its `max_streak` is not checked, since a step does not read its state; call
            `lossscale_core.check_spike_streak` where you read it.
        skip: How a compiled step is skipped, with the same results. `"cond"` takes the step in a conditional, so that a
            skipped step costs little and donated buffers are not copied. `"select"` always takes it, of zeros where
            it is skipped, and then chooses between the old and the new values: no conditional whose predicate XLA
            could read on the host, as it may on GPUs. The state is the same, so that a run may change between them.

    Returns:
        An `optax.GradientTransformationExtraArgs` that can do one thing more, which saves memory and time:
        `params, opt_state = optimizer.apply_gradients(grads, opt_state, params)` updates and applies in one go. With
        parameters and state donated to `jit`, a step costs little more than reading the gradients once.

    Raises:
        TypeError: `inner` is not an optimizer.
        PolicyError: The settings make no sense, or `policy` is not a policy.
    """
    require_optimizer(inner)
    accumulation = Accumulation(accumulation_steps, drop)
    wrapper = _Wrapper(as_policy(policy), inner, axis_name, max_norm, keep_dtypes, accumulation, guard, skip)
    wrapper.validate()
    return LossScaledTransformation(wrapper.init, wrapper.update)


_REDUCE = "reduce them first, as with jax.lax.pmean"
_ADVICE = (
    f"{_REDUCE}; or, where the wrapped optimizer reduces them or each device owns a part of the parameters, pass "
    "axis_name={names}"
)


_Step = Callable[[PyTree, PyTree], tuple[Tree, PyTree]]
"""Takes gradients and the inner state; returns a result of that step and the inner state after it."""


class _Wrapper(NamedTuple):
    """The settings of `loss_scaled`, and what it does with them."""

    policy: ScalingPolicy
    inner: Optimizer
    axis_name: Hashable
    max_norm: float | None
    keep_dtypes: bool
    accumulation: Accumulation
    guard: SpikeGuard | None
    skip: Skip

    def validate(self) -> None:
        if self.max_norm is not None and not 0.0 < self.max_norm < float("inf"):
            raise PolicyError(f"max_norm={self.max_norm!r} must be positive and finite; leave it out not to clip")
        if self.axis_name is not None and (self.max_norm is not None or self.accumulation.size != 1):
            raise PolicyError(
                "max_norm and accumulation_steps are for gradients that are reduced already, and axis_name for those "
                "that are not; reduce the gradients over the axis first and leave axis_name out"
            )
        if not isinstance(self.keep_dtypes, bool):
            raise PolicyError(f"keep_dtypes={self.keep_dtypes!r} must be True or False")
        if not isinstance(self.guard, SpikeGuard | None):
            raise PolicyError(f"guard={self.guard!r} must be a SpikeGuard; pass SpikeGuard(), or leave it out")
        if self.skip not in ("cond", "select"):
            raise PolicyError(f"skip={self.skip!r} must be 'cond' or 'select'; leave it out for 'cond'")
        self.accumulation.validate()

    @property
    def _accumulates(self) -> bool:
        return self.accumulation.size > 1

    @property
    def _branches(self) -> bool:
        return self.skip == "cond"

    def init(self, params: PyTree) -> LossScaledState:
        inner_state = self.inner.init(self._shown(params))
        if find_scale_states(inner_state):
            raise PolicyError("inner is loss-scaled already; wrap the optimizer once")
        window = self.accumulation.init(params) if self._accumulates else None
        guard_state = None if self.guard is None else jax.tree.map(jnp.asarray, self.guard.init_state())
        return place_beside(_state(init_state(self.policy), inner_state, window, guard_state), params)

    def update(
        self, updates: Tree, state: LossScaledState, params: PyTree = None, **extra_args: Any
    ) -> tuple[Tree, LossScaledState]:
        inner_update = with_extra_args(self.inner.update)

        def step(grads: Tree, inner_state: PyTree) -> tuple[Tree, PyTree]:
            return inner_update(grads, inner_state, self._shown(params), **extra_args)

        def take(applies: Array, apply: _Step[Tree], source: PyTree) -> tuple[Tree, PyTree]:
            like = updates if state.window else source
            return update_or_skip(applies, apply, source, state.inner_state, like, self.skip)

        return self._take(step, take, updates, state)

    def apply_gradients(
        self, grads: PyTree, state: LossScaledState, params: Tree, **extra_args: Any
    ) -> tuple[Tree, LossScaledState]:
        inner_update = with_extra_args(self.inner.update)

        def step(grads: PyTree, inner_state: PyTree) -> tuple[Tree, PyTree]:
            updates, inner_state = inner_update(grads, inner_state, self._shown(params), **extra_args)
            return with_updates(params, updates), inner_state

        def take(applies: Array, apply: _Step[Tree], source: PyTree) -> tuple[Tree, PyTree]:
            def skip(_: PyTree, inner_state: PyTree) -> tuple[Tree, PyTree]:
                return params, inner_state

            return apply_or_skip(applies, apply, skip, source, state.inner_state, by=self.skip)

        return self._take(step, take, grads, state)

    def _take(
        self,
        step: _Step[Tree],
        take: Callable[[Array, _Step[Tree], PyTree], tuple[Tree, PyTree]],
        grads: PyTree,
        state: LossScaledState,
    ) -> tuple[Tree, LossScaledState]:
        """Return the result of `step`, which `take` applies or skips, and the next state."""
        self._require_own(state)
        before = state.scale_state
        finite, norm = self._check(grads, before)
        if state.window is None:
            attempt = Attempt(finite, finite, None, grads, lambda grads: unscale(grads, before), None)
        else:
            attempt = self.accumulation.attempt(state.window, grads, finite, before)
        attempt, norm, guard_state = self._judge(attempt, norm, state.guard_state)

        def apply(source: PyTree, inner_state: PyTree) -> tuple[Tree, PyTree]:
            unscaled = self._clip(attempt.gradients(source), norm)
            return step(optax.tree.cast_like(unscaled, grads) if self.keep_dtypes else unscaled, inner_state)

        source = attempt.source if self._branches else zeros_unless(attempt.applies, attempt.source)
        result, inner_state = take(attempt.applies, apply, source)
        after = self.policy.update(before, attempt.grads_finite, xp=jnp)
        if attempt.counts is not None:
            after = select(attempt.counts, after, before)
        return result, _state(after, inner_state, attempt.window, guard_state)

    @unchecked
    def _judge(
        self, attempt: Attempt, norm: Array | None, state: GuardState | None
    ) -> tuple[Attempt, Array | None, GuardState | None]:
        """Return what is left of `attempt` once the guard has judged its norm; the norm, and the guard's next state."""
        if self.guard is None or state is None:
            return attempt, norm, None
        if norm is None:  # of a window's mean, which is worth a read only where it would be applied
            norm = apply_or_skip(
                attempt.applies,
                lambda source: self._norm(attempt.gradients(source)),
                lambda _: jnp.float32(jnp.inf),
                attempt.source,
                by=self.skip,
            )
        # All devices together may overflow where each one's norm is finite, and infinity would not count as a spike.
        total = jnp.minimum(_axes.total_norm(norm, self.axis_name), float(jnp.finfo(jnp.float32).max))
        judged = jnp.where(attempt.applies, total, jnp.inf).astype(jnp.float32)  # infinity leaves the guard as it is
        accepted, after = self.guard.judge(state, judged, xp=jnp)
        return attempt.unless(attempt.applies & ~accepted), norm, after

    def _require_own(self, state: Any) -> None:
        """Raise where `state` was not made by `init`, or with other settings."""
        if not is_own_state(state):
            raise ScaleStateError(
                f"{type(state).__name__} is not a state of loss_scaled; pass what its init returned, after the "
                "gradients. To go on from a checkpoint of the wrapped optimizer alone, pass "
                "optimizer.init(params)._replace(inner_state=...)"
            )
        if (state.window is not None) != self._accumulates:
            raise PolicyError(
                f"accumulation_steps={self.accumulation.size} does not fit a state made "
                f"{'without' if state.window is None else 'with'} accumulation; make the optimizer as it was saved"
            )
        if (state.guard_state is None) != (self.guard is None):
            raise PolicyError(
                f"guard={self.guard!r} does not fit a state made {'without' if self.guard else 'with'} a guard; make "
                "the optimizer as it was saved, or pass "
                "optimizer.init(params)._replace(scale_state=..., inner_state=..., window=...)"
            )

    def _check(self, grads: PyTree, before: Any) -> tuple[Array, Array | None]:
        """Return whether the gradients are finite, and their norm where the same read tells it."""
        norm = None
        # Of a micro-batch no norm is wanted: clipping and the guard look at the window's mean.
        if self._accumulates or (self.max_norm is None and self.guard is None):
            finite = finite_when_unscaled(grads, before.loss_scale, self.keep_dtypes, self._branches)
        else:
            norm = self._norm(grads, before.loss_scale)
            finite = jnp.isfinite(norm)
            if self.keep_dtypes:  # what is finite in float32 may be infinite in the dtype that is kept
                finite &= finite_when_unscaled(grads, before.loss_scale, keep_dtypes=True, branches=self._branches)
        finite = _axes.all_true(finite, self.axis_name)
        _axes.require_reduced(finite, before, _REDUCE if self.max_norm or self._accumulates else _ADVICE)
        return finite, norm

    def _clip(self, unscaled: PyTree, norm: Array | None) -> PyTree:
        """Return gradients clipped to `max_norm`; `norm` is None for a window's mean that no guard has judged."""
        if self.max_norm is None:
            return unscaled
        return multiply(unscaled, clip_factor(self._norm(unscaled) if norm is None else norm, self.max_norm))

    def _norm(self, grads: PyTree, loss_scale: Array | None = None) -> Array:
        return global_norm(grads, loss_scale, self._branches)

    def _shown(self, params: PyTree) -> PyTree:
        """Return the parameters as the inner optimizer sees them: in the dtypes of the gradients that it is given."""
        return params if self.keep_dtypes else lift_leaves(params)


def _state(scale_state: Any, inner_state: PyTree, window: Any, guard_state: GuardState | None) -> LossScaledState:
    if guard_state is None:
        return LossScaledState(scale_state, inner_state, window)
    guarded: Any = GuardedLossScaledState(scale_state, inner_state, window, guard_state)
    return cast(LossScaledState, guarded)  # whose members it has
