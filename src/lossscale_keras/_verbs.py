"""The five verbs on nested structures of arrays, computed by `keras.ops` on the backend of this process."""

import contextlib
from typing import Any, TypeVar

import keras
from keras import ops

from lossscale_core import ScaleState, as_policy
from lossscale_core.adapters import loss_scale_of, require_flag, tree
from lossscale_keras._backend import IndexedSlices, xp

Tree = TypeVar("Tree")
"""An array, or a nested structure of arrays."""
_WIDE = ("float32", "float64", "complex64", "complex128")
"""The dtypes that can hold a loss scale."""


def init_state(policy: Any, *, device: str | None = None) -> ScaleState:
    """Make the state before the first step. Does not synchronise with the host.

    Args:
        policy: Anything that `as_policy` accepts.
        device: The device of the state, as for `keras.device`. If left out, the backend chooses it.

    Returns:
        The policy's NamedTuple of arrays of shape `()`, in float32 and int32.

    Raises:
        PolicyError: `policy` is not a policy.
    """
    start = as_policy(policy).init_state()
    with keras.device(device) if device is not None else contextlib.nullcontext():
        return start._make(ops.convert_to_tensor(value, dtype=value.dtype.name) for value in start)


def scale(loss: Tree, state: ScaleState) -> Tree:
    """Multiply a loss by the loss scale. Does not synchronise with the host.

    float16 and bfloat16 are converted to float32 first, because a scale of 2**16 is infinite in float16.

    Args:
        loss: An array of any shape and dtype, or a nested structure of them; None stays None.
        state: The policy's state, with a `loss_scale` in float32 of shape `()`.

    Returns:
        The scaled loss, in the structure of `loss` and in float32 or wider. Differentiate this loss.

    Raises:
        TypeError: `state` is not a state.
    """
    factor = loss_scale_of(state, "scale(loss, state)")
    return tree.map_leaves(lambda leaf: None if leaf is None else ops.multiply(at_least_float32(leaf), factor), loss)


def all_finite(grads: Any) -> Any:
    """Return whether every gradient element is finite. Exact: large finite values are never flagged.

    Does not synchronise with the host.

    Args:
        grads: A nested structure of arrays of any float dtype. Duplicate indices of TensorFlow's `IndexedSlices` are
            summed first. None and integer leaves do not count, and an empty structure is finite.

    Returns:
        A bool array of shape `()`.

    Raises:
        TypeError: A leaf is neither an array nor a number nor None.
    """
    flags = [ops.all(ops.isfinite(part)) for leaf in tree.leaves(grads) if is_gradient(leaf) for part in parts(leaf)]
    if len(flags) > 1:
        return ops.all(ops.stack(flags))
    return flags[0] if flags else ops.convert_to_tensor(True)


def unscale(grads: Tree, state: ScaleState) -> Tree:
    """Divide gradients by the loss scale. Does not synchronise with the host.

    Args:
        grads: A nested structure of arrays, TensorFlow's `IndexedSlices`, and None.
        state: The policy's state, with a `loss_scale` in float32 of shape `()`.

    Returns:
        The gradients in the same structure. float16 and bfloat16 leaves become float32, others keep their own dtype.
        `IndexedSlices` stay sparse. None and integer leaves are returned unchanged.

    Raises:
        TypeError: `state` is not a state, or a leaf is neither an array nor a number nor None.
    """
    divisor = loss_scale_of(state, "unscale(grads, state)")
    return tree.map_leaves(
        lambda leaf: ops.divide(at_least_float32(leaf), divisor) if is_gradient(leaf) else leaf, grads
    )


def select(grads_finite: Any, new: Tree, old: Tree) -> Tree:
    """Return `new` if `grads_finite`, else `old`: a step is applied completely or not at all.

    Args:
        grads_finite: A bool array of shape `()`, or a Python bool. With a Python bool the leaves of `new` or `old` are
            returned unchanged. Does not synchronise.
        new: A nested structure of arrays and None.
        old: The same structure, with the same shapes.

    Returns:
        The leaves of `new` or the leaves of `old`.

    Raises:
        ValueError: The structures or shapes differ.
        TypeError: `grads_finite` is not a bool of shape `()`.
    """
    require_flag(grads_finite, "select(grads_finite, new, old)")

    def select_leaf(a: Any, b: Any) -> Any:
        if isinstance(grads_finite, bool) or a is None:
            return a if grads_finite is not False else b
        return ops.where(grads_finite, a, b)

    return tree.map_leaves(select_leaf, new, old)


def is_gradient(leaf: Any) -> bool:
    """Return whether `leaf` holds floats; raise `TypeError` unless it is an array, a number or None."""
    if leaf is None or isinstance(leaf, (int, float)):
        return isinstance(leaf, float)
    if not hasattr(leaf, "dtype"):
        raise TypeError(f"{leaf!r} is not an array; pass arrays or None, in dicts, lists and tuples")
    return keras.backend.standardize_dtype(leaf.dtype).startswith(("float", "bfloat", "complex"))


def is_overwritten(variable: Any) -> bool:
    """Return whether the gradient of a variable is its new value, which is never scaled, as for float8 scales.

    Keras marks such variables: https://github.com/keras-team/keras/blob/v3.15.1/keras/src/backend/common/variables.py
    """
    return bool(getattr(variable, "overwrite_with_gradient", False))


def at_least_float32(leaf: Any) -> Any:
    """Return an array in float32, or unchanged if it is wider. Whole numbers become float32, too."""
    leaf = leaf if hasattr(leaf, "dtype") else ops.convert_to_tensor(leaf)
    return leaf if keras.backend.standardize_dtype(leaf.dtype) in _WIDE else ops.cast(leaf, "float32")


def dense(leaf: Any) -> Any:
    """Return a dense array: `IndexedSlices` with their duplicates summed, float8 in float32, other arrays unchanged."""
    array = xp.convert_to_tensor(leaf) if isinstance(leaf, IndexedSlices) else ops.convert_to_tensor(leaf)
    return at_least_float32(array) if "float8" in str(array.dtype) else array


def parts(leaf: Any) -> tuple[Any, ...]:
    """Return a tuple of one dense real array, or of the real and the imaginary part of a complex array."""
    array = dense(leaf)
    return (ops.real(array), ops.imag(array)) if "complex" in str(array.dtype) else (array,)
