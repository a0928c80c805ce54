"""The two lists of functions that `loss_scaled` applies to gradients: stages and transforms.

A stage returns the attempt with a result added: the finiteness check, the window of micro-batches, or the guard's
decision. If the step is then taken, transforms compute the gradients that the wrapped optimizer receives.
"""

from collections.abc import Callable, Hashable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
import optax
from jax import Array

from lossscale_core import GuardState, SpikeGuard
from lossscale_core.adapters import check_guard
from lossscale_core.errors import PolicyError
from lossscale_jax import _axes
from lossscale_jax._decide import Skip
from lossscale_jax._finite import clip_factor, finite_when_unscaled, global_norm
from lossscale_jax._leaves import multiply
from lossscale_jax._types import PyTree
from lossscale_jax._verbs import unscale

Drop = Literal["window", "micro_batch"]
"""The part that an overflow in a window of micro-batches drops: the window or the micro-batch."""


class Settings(NamedTuple):
    """The settings of `loss_scaled` that its stages read."""

    axis_name: Hashable
    max_norm: float | None
    accumulation_steps: int
    drop: Drop
    keep_dtypes: bool
    guard: SpikeGuard | None
    skip: Skip

    def validate(self) -> None:
        """Raise `PolicyError` for a setting that is not valid, or for settings that exclude each other."""
        if not (isinstance(self.accumulation_steps, int) and self.accumulation_steps >= 1):
            raise PolicyError(f"accumulation_steps={self.accumulation_steps!r} must be an integer of at least 1")
        if self.axis_name is not None and (self.max_norm is not None or self.accumulates):
            raise PolicyError(
                "max_norm and accumulation_steps are for gradients that are reduced already, and axis_name for those "
                "that are not; reduce the gradients over the axis first and leave axis_name out"
            )
        if self.drop not in ("window", "micro_batch"):
            raise PolicyError(f"drop={self.drop!r} must be 'window' or 'micro_batch'")
        if not isinstance(self.keep_dtypes, bool):
            raise PolicyError(f"keep_dtypes={self.keep_dtypes!r} must be True or False")
        check_guard(self.guard)
        if self.skip not in ("cond", "select"):
            raise PolicyError(f"skip={self.skip!r} must be 'cond' or 'select'; leave it out for 'cond'")

    @property
    def accumulates(self) -> bool:
        """Whether several micro-batches make one step."""
        return self.accumulation_steps > 1


class Attempt(NamedTuple):
    """One call of the optimizer: a step of the wrapped optimizer, a step of the policy, both or neither."""

    scaled: PyTree
    """The gradients that the caller passed."""
    scale_state: Any
    """The state that scaled their loss."""
    source: PyTree
    """The input of the transforms: these gradients, or a window of micro-batches."""
    window: Any
    """The state of the accumulation; None without accumulation."""
    guard_state: GuardState | None
    """The guard's state; None without a guard."""
    norm: Array | None = None
    """float32 or wider: the norm of the unscaled gradients, if a stage has computed it."""
    grads_finite: Any = None
    """bool: the flag for `policy.update`."""
    applies: Any = None
    """bool: whether the wrapped optimizer takes a step."""
    counts: Array | None = None
    """bool: whether the call is a step of the policy; None if every call is a step."""


Stage: TypeAlias = Callable[[Attempt, Settings], Attempt]
Transform: TypeAlias = Callable[[PyTree, Attempt, Settings], PyTree]

_REDUCE = "reduce them first, as with jax.lax.pmean"
_ADVICE = (
    f"{_REDUCE}; or, where the wrapped optimizer reduces them or each device owns a part of the parameters, pass "
    "axis_name={names}"
)


def check(attempt: Attempt, settings: Settings) -> Attempt:
    """Check whether the gradients are finite."""
    loss_scale = attempt.scale_state.loss_scale
    finite = finite_when_unscaled(attempt.scaled, loss_scale, settings.keep_dtypes, settings.skip)
    return _checked(attempt, finite, settings)


def check_by_norm(attempt: Attempt, settings: Settings) -> Attempt:
    """Check whether the gradients are finite, and compute their norm in the same read."""
    loss_scale = attempt.scale_state.loss_scale
    norm = global_norm(attempt.scaled, loss_scale, settings.skip)
    finite = jnp.isfinite(norm)
    if settings.keep_dtypes:  # a value that is finite in float32 may be infinite in the dtype of the gradient
        finite &= finite_when_unscaled(attempt.scaled, loss_scale, keep_dtypes=True, by=settings.skip)
    return _checked(attempt._replace(norm=norm), finite, settings)


def _checked(attempt: Attempt, finite: Array, settings: Settings) -> Attempt:
    finite = _axes.all_true(finite, settings.axis_name)
    advice = _ADVICE if settings.max_norm is None and not settings.accumulates else _REDUCE
    _axes.require_reduced(finite, attempt.scale_state, advice)
    return attempt._replace(grads_finite=finite, applies=finite)


def check_spike(attempt: Attempt, settings: Settings) -> Attempt:
    """Check the norm for a spike; a spike is not applied and is not a step of the policy."""
    guard: Any = settings.guard
    norm: Any = attempt.norm
    # The norm over all devices may overflow although each norm is finite, and infinity would not count as a spike.
    total = jnp.minimum(_axes.total_norm(norm, settings.axis_name), float(jnp.finfo(jnp.float32).max))
    checked_norm = jnp.where(attempt.applies, total, jnp.inf).astype(jnp.float32)  # infinity changes no guard state
    accepted, guard_state = guard.check(attempt.guard_state, checked_norm, xp=jnp)
    spiked = attempt.applies & ~accepted
    counts = ~(spiked & attempt.grads_finite)  # an overflow in the same call still counts
    return attempt._replace(
        applies=attempt.applies & accepted,
        counts=counts if attempt.counts is None else attempt.counts & counts,
        guard_state=guard_state,
    )


def unscaled(grads: PyTree, attempt: Attempt, _: Settings) -> PyTree:
    """Return gradients divided by the loss scale."""
    return unscale(grads, attempt.scale_state)


def clipped(grads: PyTree, attempt: Attempt, settings: Settings) -> PyTree:
    """Return gradients with a norm of at most `max_norm`; the norm is computed here if no stage has computed it."""
    norm = global_norm(grads, by=settings.skip) if attempt.norm is None else attempt.norm
    most: Any = settings.max_norm
    # A norm above float32's range clips nothing, and would be infinite in float32.
    return grads if most > float(jnp.finfo(jnp.float32).max) else multiply(grads, clip_factor(norm, most))


def cast_back(grads: PyTree, attempt: Attempt, _: Settings) -> PyTree:
    """Return gradients in the dtypes in which the caller passed them."""
    return optax.tree.cast_like(grads, attempt.scaled)
