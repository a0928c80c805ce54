"""A check for train steps: a step that is skipped must return everything but the scale state as it was."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lossscale_jax._gradients import name_of
from lossscale_jax._types import PyTree

__all__ = ["TrainStepError", "check_train_step"]

# The first step, when nothing has moved yet, and two in a row, when the second meets what the first has left.
_BAD_STEPS = frozenset((0, 3, 4))
_SCALES = (1.0, 2.0**10)  # powers of two, by which scaling and unscaling round nothing
_CLOSE = 0.02
_FEW = 4


class TrainStepError(AssertionError):
    """A train step does not follow the decision of loss scaling; the message says at which step, and in what."""


def check_train_step(
    step: Callable[..., Any], state: PyTree, batches: Iterable[Any], *, may_move: Sequence[str] = ()
) -> None:
    """Require that a train step skips as a whole, counts what it skips, and gives the same result at any loss scale.

    The check makes the loss scale infinite for steps 0, 3 and 4, so that every gradient overflows. After such a step
    everything but the scale state must be as before, bit for bit, and the scale state must have counted an overflow.
    It also requires that steps with a loss scale of 1 and of 1024 move everything alike.

    ```python
    check_train_step(step, (params, opt_state, average), [batch] * 6)
    ```

    Args:
        step: `step(state, batch)` returns the state after the step, or a tuple of it and anything else. `jax.jit` it as
            in training, without donation.
        state: All that the step carries on, a pytree that holds the state of `loss_scaled`, or the scale state itself.
        batches: A batch for each step: five or more, so that all planned overflows happen.
        may_move: Paths that a skipped step may change, as in the message of the error: random keys, a count of batches.

    Raises:
        TrainStepError: The step fails; the message says at which step, and what has moved.
        ValueError: There are fewer than five batches, or `state` holds no scale state.
    """
    batches = list(batches)
    if len(batches) <= max(_BAD_STEPS):
        raise ValueError(f"{len(batches)} batches are too few; pass at least {max(_BAD_STEPS) + 1}")
    if not _scale_states(state):
        raise ValueError("the state holds no scale state; pass all that the step carries on, the optimizer state too")
    for number, batch in enumerate(batches):
        if number in _BAD_STEPS:
            after = _result(step, _with_scale(state, jnp.inf), batch, state)
            _require_skipped(number, state, after, may_move)
            _require_counted(number, state, after)
        else:
            state = _require_same_at_any_scale(number, step, state, batch)


def _result(step: Callable[..., Any], state: PyTree, batch: Any, like: PyTree) -> PyTree:
    """Return the state after a step, with or without what else the step returned."""
    result = step(state, batch)
    expected: Any = jax.tree.structure(like)
    if jax.tree.structure(result) == expected:
        return result
    if isinstance(result, tuple) and result and jax.tree.structure(result[0]) == expected:
        return result[0]
    raise ValueError(
        "step(state, batch) returned another structure than that of state; return the state after the step, alone or "
        f"first in a tuple: {jax.tree.structure(result)} against {expected}"
    )


def _require_skipped(number: int, before: PyTree, after: PyTree, may_move: Sequence[str]) -> None:
    old, new = _followers(before), _followers(after)
    moved = [
        _change(name, old[name], new[name])
        for name in old
        if not name.startswith(tuple(may_move)) and not _same(old[name], new[name])
    ]
    if moved:
        raise TrainStepError(
            f"step {number} was to be skipped, but {_listed(moved)}; select it, or let loss_scaled carry it, so that "
            "it follows applied steps only"
        )


def _require_counted(number: int, before: PyTree, after: PyTree) -> None:
    for name, old in _scale_states(before).items():
        new = _scale_states(after)[name]
        if int(new.skipped_steps) != int(old.skipped_steps) + 1:
            raise TrainStepError(
                f"step {number} overflowed, but {name}.skipped_steps went from {int(old.skipped_steps)} to "
                f"{int(new.skipped_steps)}; scale the loss, and pass every step to the policy, so that the loss scale "
                "can follow"
            )


def _require_same_at_any_scale(number: int, step: Callable[..., Any], state: PyTree, batch: Any) -> PyTree:
    """Return the state after the step, having taken it at two loss scales."""
    small, large = (_result(step, _with_scale(state, scale), batch, state) for scale in _SCALES)
    old, a, b = _followers(state), _followers(small), _followers(large)
    differing = [f"{name} differs" for name in a if not _is_close(old[name], a[name], b[name])]
    if differing:
        raise TrainStepError(
            f"at step {number} a loss scale of {_SCALES[0]:g} and one of {_SCALES[1]:g} gave different results: "
            f"{_listed(differing)}; unscale before you clip or change gradients, and return the unscaled loss"
        )
    return small


def _is_scale_state(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "loss_scale") and hasattr(node, "skipped_steps")


def _scale_states(state: PyTree) -> dict[str, Any]:
    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_scale_state)
    return {name_of(path): node for path, node in nodes if _is_scale_state(node)}


def _followers(state: PyTree) -> dict[str, Any]:
    """Return the leaves outside of scale states by their paths."""
    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_scale_state)
    return {name_of(path): node for path, node in nodes if not _is_scale_state(node)}


def _with_scale(state: PyTree, scale: float) -> PyTree:
    def replaced(node: Any) -> Any:
        if not _is_scale_state(node):
            return node
        return node._replace(loss_scale=jnp.full_like(node.loss_scale, scale))

    return jax.tree.map(replaced, state, is_leaf=_is_scale_state)


def _values(leaf: Any) -> Array:
    is_key = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else jnp.asarray(leaf)


def _same(a: Any, b: Any) -> bool:
    a, b = _values(a), _values(b)
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())


def _is_close(old: Any, a: Any, b: Any) -> bool:
    """Return whether two results agree, within two percent of how far they moved."""
    old, a, b = _values(old), _values(a), _values(b)
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return bool((a == b).all())
    old, a, b = (each.astype(jnp.float32) for each in (old, a, b))
    moved = jnp.maximum(jnp.linalg.norm((a - old).ravel()), jnp.linalg.norm((b - old).ravel()))
    rounding = jnp.finfo(jnp.float32).eps * jnp.linalg.norm(a.ravel())
    return bool(jnp.linalg.norm((a - b).ravel()) <= _CLOSE * moved + rounding)


def _change(name: str, before: Any, after: Any) -> str:
    before, after = _values(before), _values(after)
    return f"{name} went from {before} to {after}" if before.shape == after.shape == () else f"{name} changed"


def _listed(parts: list[str]) -> str:
    shown = ", ".join(parts[:_FEW])
    return shown if len(parts) <= _FEW else f"{shown} and {len(parts) - _FEW} more"
