"""The five verbs, on nested structures of tensors, `IndexedSlices` and None."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import tensorflow as tf

from lossscale_core import ScaleState, as_policy
from lossscale_core.adapters import loss_scale_of, require_flag
from lossscale_keras.tensorflow import all_replicas, sum_of_squares

Tree = TypeVar("Tree")
"""A tensor, or a nested structure of tensors."""
Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices
WIDE = frozenset({tf.float32, tf.float64, tf.complex64, tf.complex128})
"""The dtypes that can hold a loss scale."""


def init_state(policy: Any, *, device: str | None = None) -> ScaleState:
    """Make the state before the first step. Does not synchronise with the host.

    Args:
        policy: Anything that `as_policy` accepts.
        device: The name of the device of the state. If left out, TensorFlow chooses it.

    Returns:
        The policy's NamedTuple of tensors of shape `()`, in float32 and int32.

    Raises:
        PolicyError: `policy` is not a policy.
    """
    start = as_policy(policy).init_state()
    with tf.device(device):
        return start._make(map(tf.constant, start))


def scale(loss: Tree, state: ScaleState) -> Tree:
    """Multiply a loss by the loss scale. Does not synchronise with the host.

    float16 and bfloat16 are converted to float32 first, because a scale of 2**16 is infinite in float16.

    Args:
        loss: A tensor of any shape and dtype, or a nested structure of them.
        state: The policy's state; its `loss_scale` is float32 of shape `()`.

    Returns:
        The scaled loss, in the structure of `loss` and in float32 or wider. Differentiate this loss.

    Raises:
        TypeError: `state` is not a state.
    """
    return scale_by(loss, loss_scale_of(state, "scale(loss, state)"))


def scale_by(loss: Tree, loss_scale: tf.Tensor) -> Tree:
    """Multiply a loss by `loss_scale`."""
    return tf.nest.map_structure(lambda leaf: None if leaf is None else times(leaf, loss_scale), loss)


def all_finite(grads: Any, *, across_replicas: bool = False) -> tf.Tensor:
    """Check whether every gradient element is finite. Exact: large finite values are never flagged.

    In a graph nothing synchronises with the host. Eagerly the host reads one bool, to decide whether a second check
    is necessary.

    Args:
        grads: A nested structure of tensors and `IndexedSlices` of any float or complex dtype. Duplicate indices are
            summed first. None and integer leaves do not count, and an empty structure is finite.
        across_replicas: Whether to combine the flag over the replicas of the current `tf.distribute` strategy. The
            caller must then be in a replica context.

    Returns:
        A bool tensor of shape `()`.

    Raises:
        TypeError: A leaf is neither a tensor nor a number nor None.
        RuntimeError: `across_replicas` is set, and the caller is not in a replica context.
    """
    leaves = [leaf for leaf in tf.nest.flatten(grads) if is_gradient(leaf)]
    finite = finite_when_unscaled([x if isinstance(x, tf.IndexedSlices) else tf.convert_to_tensor(x) for x in leaves])
    return all_replicas(finite) if across_replicas else finite


def unscale(grads: Tree, state: ScaleState) -> Tree:
    """Divide gradients by the loss scale. Does not synchronise with the host.

    Args:
        grads: A nested structure of tensors, `IndexedSlices` and None.
        state: The policy's state; its `loss_scale` is float32 of shape `()`.

    Returns:
        The gradients in the same structure. float16 and bfloat16 leaves become float32, others keep their own
        dtype. `IndexedSlices` stay sparse. None and integer leaves are returned unchanged.

    Raises:
        TypeError: `state` is not a state, or a leaf is neither a tensor nor a number nor None.
    """
    return unscale_by(grads, loss_scale_of(state, "unscale(grads, state)"))


def unscale_by(grads: Tree, loss_scale: tf.Tensor) -> Tree:
    """Divide gradients by `loss_scale`."""
    inverse = inverse_of(loss_scale)
    return tf.nest.map_structure(lambda leaf: times(leaf, inverse) if is_gradient(leaf) else leaf, grads)


def inverse_of(loss_scale: tf.Tensor) -> tf.Tensor:
    """Return the factor that unscales gradients. It is a normal float32 for each valid scale."""
    return tf.raw_ops.RealDiv(
        x=1.0, y=loss_scale
    )  # takes a quarter of the time of an eager `/`, which converts the 1.0


def select(grads_finite: tf.Tensor | bool, new: Tree, old: Tree) -> Tree:
    """Return `new` if `grads_finite`, else `old`: a step is applied completely or not at all.

    Args:
        grads_finite: A bool tensor of shape `()`, or a Python bool. With a Python bool the leaves of `new` or `old` are
            returned unchanged. Does not synchronise.
        new: A nested structure of tensors and None.
        old: The same structure, with the same shapes.

    Returns:
        The leaves of `new` or the leaves of `old`.

    Raises:
        ValueError: The structures or shapes differ.
        TypeError: `grads_finite` is not a bool of shape `()`.
    """
    require_flag(grads_finite, "select(grads_finite, new, old)")

    def select_leaf(a: Any, b: Any) -> Any:
        if (a is None) != (b is None):
            raise ValueError(f"a leaf is {a!r} in new and {b!r} in old; pass two structures alike")
        if isinstance(grads_finite, bool) or a is None:
            return a if grads_finite is not False else b
        a, b = tf.convert_to_tensor(a), tf.convert_to_tensor(b)
        if not a.shape.is_compatible_with(b.shape):
            raise ValueError(f"a leaf has shape {a.shape} in new and {b.shape} in old; pass two structures alike")
        return tf.where(grads_finite, a, b)

    return tf.nest.map_structure(select_leaf, new, old)


def times(tensor: Any, factor: Any) -> Gradient:
    """Multiply a tensor or `IndexedSlices` by a factor of shape `()`, in float32 or wider."""
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(times(tensor.values, factor), tensor.indices, tensor.dense_shape)
    wide = at_least_float32(tensor)
    return wide * tf.cast(factor, wide.dtype)


def cast_for(variable: Any, grad: Gradient, factor: tf.Tensor | None = None) -> Gradient:
    """Multiply a gradient by `factor`, unless that is None, and cast it to the dtype of its variable."""
    grad, dtype = grad if factor is None else times(grad, factor), tf.as_dtype(variable.dtype).base_dtype
    if grad.dtype == dtype:
        return grad
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(tf.cast(grad.values, dtype), grad.indices, grad.dense_shape)
    return tf.cast(grad, dtype)


def is_gradient(leaf: Any) -> bool:
    """Return whether `leaf` holds real or complex floats; raise `TypeError` unless it is a tensor, a number or None."""
    if isinstance(leaf, tf.Tensor | tf.Variable | tf.IndexedSlices):
        dtype = leaf.dtype
    elif leaf is None or isinstance(leaf, bool | int):
        return False
    elif hasattr(leaf, "dtype") or isinstance(leaf, float | complex):
        dtype = tf.convert_to_tensor(leaf).dtype
    else:
        raise TypeError(f"{leaf!r} is not a tensor; pass tensors, IndexedSlices or None, in dicts, lists and tuples")
    return bool(dtype.is_floating or dtype.is_complex)


def finite_when_unscaled(leaves: list[Gradient], loss_scale: tf.Tensor | None = None) -> tf.Tensor:
    """Return whether all leaves are finite before and after unscaling in float32 or wider.

    For float32 and wider, a finite sum of squares proves that all elements and all sums of duplicate indices are
    finite. It takes one read at memory speed. Each element is tested only if that sum is not finite, or if the scale
    is below 1.
    """
    halves = [leaf for leaf in leaves if leaf.dtype not in WIDE]
    wide = [leaf for leaf in leaves if leaf.dtype in WIDE]
    finite = _elements_finite(halves)
    values = [leaf.values if isinstance(leaf, tf.IndexedSlices) else leaf for leaf in wide]
    squares = sum_of_squares(part for tensor in values for part in _real_parts(tensor))
    proof = finite & tf.math.is_finite(squares) if wide else finite
    if loss_scale is None:
        return _unless(proof, lambda: finite & _elements_finite(wide)) if wide else finite
    # With a scale below 1, unscaling may make gradients infinite.
    inverse = inverse_of(loss_scale)
    return _unless(proof & (loss_scale >= 1.0), lambda: _elements_finite([times(leaf, inverse) for leaf in leaves]))


def _unless(proof: tf.Tensor, test: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Return `proof` if it is true, else the result of the test. Eagerly the host reads the proof."""
    if tf.executing_eagerly():
        return proof if bool(proof) else test()
    return tf.cond(proof, lambda: proof, test)


def _elements_finite(leaves: list[Gradient]) -> tf.Tensor:
    values = [summed_values(leaf) for leaf in leaves]
    # float8 becomes float32, because TensorFlow has few operations for float8.
    values = [at_least_float32(tensor) if tensor.dtype.size == 1 else tensor for tensor in values]
    parts = [part for tensor in values for part in _real_parts(tensor)]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(part)) for part in parts]) if parts else tf.constant(True)


def summed_values(leaf: Gradient) -> tf.Tensor:
    """Return the values of `leaf`. The values of duplicate indices are summed."""
    if not isinstance(leaf, tf.IndexedSlices):
        return tf.convert_to_tensor(leaf)
    # A dense tensor would be as large as the whole embedding.
    unique, positions = tf.unique(leaf.indices)
    return tf.math.unsorted_segment_sum(leaf.values, positions, tf.size(unique))


def _real_parts(tensor: tf.Tensor) -> tuple[tf.Tensor, ...]:
    return (tf.math.real(tensor), tf.math.imag(tensor)) if tensor.dtype.is_complex else (tensor,)


def at_least_float32(tensor: Any) -> tf.Tensor:
    """Return a tensor in float32, or unchanged if it is wider. Whole numbers become float32, too."""
    tensor = tf.convert_to_tensor(tensor)
    return tensor if tensor.dtype in WIDE else tf.cast(tensor, tf.float32)
