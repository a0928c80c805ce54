"""The five verbs: pure functions of trees of arrays. They evaluate nothing."""

from typing import Any, TypeVar

import mlx.core as mx
from mlx.utils import tree_flatten

from lossscale_core import PolicyLike, ScaleState, as_policy
from lossscale_core.adapters import not_a_flag, not_a_state, shown, tree

Tree = TypeVar("Tree")


def init_state(policy: PolicyLike) -> ScaleState[mx.array]:
    """Return the state before the first step under `policy`.

    Does not synchronise with the host. MLX arrays belong to no device, so that there is nothing to place.

    Args:
        policy: Anything that `lossscale_core.as_policy` accepts.

    Returns:
        The policy's state, a NamedTuple of float32 and int32 arrays of shape `()`: a `ScaleState`, or the type of state
        that the policy has in its place.

    Raises:
        PolicyError: `policy` is not a policy.
    """
    return as_arrays(as_policy(policy).init_state())


def scale(loss: Any, state: Any) -> Any:
    """Multiply `loss` by the loss scale: differentiate the result.

    Everything below float32 is converted to it first, because a scale of 2**16 is infinite in float16. Does not
    synchronise with the host.

    Args:
        loss: An array of any shape and numeric dtype, a Python number, or a tree of them; `None` passes through.
        state: The state before the step.

    Returns:
        The scaled loss, in float32 or wider, in the structure of `loss`.

    Raises:
        TypeError: `state` is not a state.
    """
    loss_scale = _loss_scale_of(state, "scale(loss, state)")

    def scale_leaf(leaf: Any) -> mx.array:
        array = mx.array(leaf)
        return lift(array if is_gradient(array) else array.astype(mx.float32)) * loss_scale

    return tree.map_leaves(lambda leaf: None if leaf is None else scale_leaf(leaf), loss)


def all_finite(grads: Any) -> mx.array:
    """Return whether every gradient element is finite.

    The check is exact: large finite values are never flagged. Does not synchronise with the host.

    Args:
        grads: A tree of arrays of any float or complex dtype. `None` and integer leaves do not count; a tree without
            gradients is finite.

    Returns:
        A bool array of shape `()`.

    Raises:
        TypeError: A leaf is not an array of MLX; the message names it.
    """
    finite = [mx.all(mx.isfinite(part)) for _, leaf in gradients_of(grads) for part in real_parts(leaf)]
    return mx.all(mx.stack(finite)) if finite else mx.array(True)


def unscale(grads: Tree, state: Any) -> Tree:
    """Divide `grads` by the loss scale.

    Does not synchronise with the host.

    Args:
        grads: A tree of arrays, such as `mx.grad` of the scaled loss returns; `None` passes through.
        state: The state that scaled the loss, not the one after `policy.update`.

    Returns:
        The gradients: float16 and bfloat16 leaves in float32, others in their own dtype, integer leaves as they are.

    Raises:
        TypeError: `state` is not a state, or a leaf is not an array of MLX.
    """
    loss_scale = _loss_scale_of(state, "unscale(grads, state)")
    gradients_of(grads)  # checks the leaves
    return tree.map_leaves(lambda leaf: lift(leaf) / loss_scale if is_gradient(leaf) else leaf, grads)


def select(grads_finite: Any, new: Tree, old: Tree) -> Tree:
    """Return `new` if `grads_finite`, else `old`: a step is applied completely or not at all.

    Pass everything that a skipped step must not change: parameters, running averages, counters. Does not synchronise
    with the host.

    Args:
        grads_finite: A bool array of shape `()`, or a Python bool.
        new: The tree after the step.
        old: The tree before the step, with the same containers, keys, shapes and dtypes.

    Returns:
        One of the two trees, leaf by leaf.

    Raises:
        TypeError: `grads_finite` is not a flag, but for example a tree.
        ValueError: The structures or the shapes differ; the message names the first place.
    """
    if not isinstance(grads_finite, bool) and getattr(grads_finite, "shape", None) != ():
        raise not_a_flag(grads_finite, "select(grads_finite, new, old)")
    return tree.map_leaves(lambda a, b: None if a is None else mx.where(grads_finite, a, b), new, old)


def as_arrays(state: Any) -> Any:
    """Return a state of host scalars as arrays of shape `()` with the same dtypes."""
    return state._make(map(mx.array, state))


def gradients_of(grads: Any) -> list[tuple[str, mx.array]]:
    """Return each array of floats in a tree with its path; raise `TypeError` for what is not an array."""
    leaves: Any = tree_flatten(grads)
    for name, leaf in leaves:
        if leaf is not None and not isinstance(leaf, mx.array):
            raise TypeError(f"{name or 'grads'}={shown(leaf)} is not an array of MLX; pass mx.array(...) or None")
    return [(name, leaf) for name, leaf in leaves if is_gradient(leaf)]


def is_gradient(leaf: mx.array | None) -> bool:
    """Return whether a leaf is an array of floats, real or complex."""
    return leaf is not None and mx.issubdtype(leaf.dtype, mx.inexact)


def real_parts(leaf: mx.array) -> list[mx.array]:
    """Return the real and the imaginary part of a complex array, or a list of the array itself."""
    # `isfinite` of MLX before 0.32.4 ignores the imaginary part.
    return [mx.real(leaf), mx.imag(leaf)] if mx.issubdtype(leaf.dtype, mx.complexfloating) else [leaf]


def lift(leaf: mx.array) -> mx.array:
    """Return float16 and bfloat16 in float32, and any other dtype as it is."""
    return leaf.astype(mx.float32) if leaf.dtype in (mx.float16, mx.bfloat16) else leaf


def _loss_scale_of(state: Any, call: str) -> Any:
    if not hasattr(state, "loss_scale"):
        raise not_a_state(state, call)
    return state.loss_scale
