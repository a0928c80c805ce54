"""Scale, check, unscale and select: nested structures of tensors, `None` and `IndexedSlices` kept."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def scale(loss: Any, state: Any) -> Any:
    """Return `loss` times the loss scale: what to differentiate.

    `loss` is a tensor of any shape and dtype, or a nested structure of them. float16 and bfloat16 are lifted to float32
    first, since a scale of 2**16 is already infinite in float16. Does not synchronise.
    """
    return scale_by(loss, state.loss_scale)


def scale_by(loss: Any, loss_scale: Any) -> Any:
    """Return `loss` times the loss scale."""
    return _map(lambda leaf: times(tf.convert_to_tensor(leaf), loss_scale), loss)


def all_finite(grads: Any, *, across_replicas: bool = False) -> tf.Tensor:
    """Return whether every gradient element is finite, as a bool tensor of shape `()`.

    `grads` is a nested structure of tensors and `IndexedSlices` of any float or complex dtype; duplicate indices are
    summed first, `None` and integer leaves do not count, and nothing at all is finite. With `across_replicas` the flag
    is combined over the replicas of the current `tf.distribute` strategy, in whose replica context it must be called.
    Exact: large finite values are never flagged. In a graph nothing synchronises with the host; eagerly it decides
    whether a second look is needed.
    """
    finite = finite_when_unscaled(gradient_leaves(grads))
    return all_replicas(finite) if across_replicas else finite


def unscale(grads: Any, state: Any) -> Any:
    """Return `grads` divided by the loss scale, that is multiplied by its reciprocal, which is always a normal float32.

    float16 and bfloat16 leaves come back in float32, others in their own dtype; `IndexedSlices` stay sparse, `None` and
    integer leaves pass through. Does not synchronise.
    """
    return unscale_by(grads, state.loss_scale)


def unscale_by(grads: Any, loss_scale: Any) -> Any:
    """Return `grads` divided by the loss scale."""
    inverse = 1.0 / loss_scale
    return _map(lambda leaf: times(_as_tensor(leaf), inverse) if is_gradient(leaf) else leaf, grads)


def select(grads_finite: Any, new: Any, old: Any) -> Any:
    """Return `new` where `grads_finite`, else `old`: a step is applied as a whole or not at all.

    `new` and `old` are nested structures alike. `grads_finite` is a bool tensor of shape `()`, and nothing
    synchronises; or a Python bool, which picks the leaves of one side untouched. Raises `ValueError` where the
    structures or shapes differ.
    """

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


def mark_origin(unscaled: Any, grad: Any, loss_scale: Any) -> None:
    """Note in a graph what a gradient was before it was unscaled, for whoever applies it to unscale and clip at once.

    Then nobody uses the unscaled one, and TensorFlow leaves it out of the graph.
    """
    if not tf.executing_eagerly() and grad is not None and unscaled.dtype == grad.dtype and not _is_narrow(grad.dtype):
        unscaled._unscaled_from = (grad, loss_scale)


def origins(grads: list[Any]) -> tuple[list[Any], Any]:
    """Return gradients as they were before they were unscaled, and the one scale by which all of them were.

    If there is no such scale, they are returned as they are, with None.
    """
    found = [getattr(grad, "_unscaled_from", None) for grad in grads]
    scales = {id(origin[1]) for origin in found if origin is not None}
    if None in found or len(scales) != 1 or tf.executing_eagerly():
        return grads, None
    return [origin[0] for origin in found if origin is not None], next(origin[1] for origin in found if origin)


def times(tensor: Any, factor: Any) -> Any:
    """Return a tensor or `IndexedSlices` times a factor of shape `()`, halves in float32."""
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(times(tensor.values, factor), tensor.indices, tensor.dense_shape)
    wide = tf.cast(tensor, tf.float32) if _is_narrow(tensor.dtype) or not _is_inexact(tensor.dtype) else tensor
    return wide * tf.cast(factor, wide.dtype)


def fitted(grad: Any, variable: Any, factor: Any = None) -> Any:
    """Return a gradient, times `factor` if there is one, in its variable's dtype; `None` for none."""
    if grad is None:
        return None
    return _cast(grad if factor is None else times(grad, factor), tf.as_dtype(variable.dtype).base_dtype)


def _cast(grad: Any, dtype: Any) -> Any:
    if grad.dtype == dtype:
        return grad
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(tf.cast(grad.values, dtype), grad.indices, grad.dense_shape)
    return tf.cast(grad, dtype)


def is_gradient(leaf: Any) -> bool:
    """Return whether `leaf` holds floats, real or complex; raise `TypeError` for what is no tensor, number or None."""
    if isinstance(leaf, tf.Tensor | tf.Variable | tf.IndexedSlices):
        return _is_inexact(leaf.dtype)
    if leaf is None or isinstance(leaf, bool | int):
        return False
    if hasattr(leaf, "dtype") or isinstance(leaf, float | complex):
        return _is_inexact(tf.convert_to_tensor(leaf).dtype)
    raise TypeError(f"{leaf!r} is no tensor; pass tensors, IndexedSlices or None, in dicts, lists and tuples")


def gradient_leaves(grads: Any) -> list[Any]:
    """Return the leaves that hold floats, numbers and arrays as tensors."""
    return [_as_tensor(leaf) for leaf in tf.nest.flatten(grads) if is_gradient(leaf)]


def _as_tensor(leaf: Any) -> Any:
    return leaf if isinstance(leaf, tf.IndexedSlices) else tf.convert_to_tensor(leaf)


def all_replicas(flag: tf.Tensor) -> tf.Tensor:
    """Return whether `flag` is true on every replica."""
    context = tf.distribute.get_replica_context()
    if context is None:
        raise RuntimeError("flags are combined in a replica context; call this inside strategy.run")
    if context.num_replicas_in_sync == 1:
        return flag
    bad = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(~flag, tf.float32))
    return tf.equal(bad, 0.0)


def sum_of_squares(values: list[tf.Tensor]) -> tf.Tensor:
    """Return the sum of the squared magnitudes of real or complex tensors: float32, or float64 where one of them is."""
    parts = [part for each in values for part in _real_parts(each)]
    dtype = tf.float64 if any(part.dtype == tf.float64 for part in parts) else tf.float32
    halves = [tf.cast(tf.nn.l2_loss(lifted(part)), dtype) for part in parts]
    return 2.0 * tf.add_n(halves)


def finite_when_unscaled(leaves: list[Any], loss_scale: Any = None) -> tf.Tensor:
    """Return whether all leaves are finite, and stay so when unscaled in float32 or wider.

    float32 and wider are proven finite by their sum of squares, which is one read at memory speed and proves the sums
    of duplicates, too. Only where that is not finite itself, or the scale is below 1, is every element looked at;
    and under XLA, which makes that the faster read.
    """
    if not leaves:
        return tf.constant(True)
    halves = [leaf for leaf in leaves if _is_narrow(leaf.dtype)]
    others = [leaf for leaf in leaves if not _is_narrow(leaf.dtype)]
    finite = _each_element_finite(halves)
    proven = _proven_finite([_values(leaf) for leaf in others])
    if loss_scale is not None:
        proven &= loss_scale >= 1.0
        others = leaves
    if not others:
        return finite
    inverse = None if loss_scale is None else 1.0 / loss_scale
    return finite & tf.cond(proven, lambda: tf.constant(True), lambda: _each_element_finite(others, inverse))


def _proven_finite(values: list[tf.Tensor]) -> tf.Tensor:
    """Return whether the sum of squares proves `values` finite; under XLA, that nothing is proven."""

    def prove() -> tf.Tensor:
        return tf.math.is_finite(sum_of_squares(values))

    if not values:
        return tf.constant(True)
    if tf.executing_eagerly():
        return prove()
    return tf.cond(_is_compiled_by_xla(), lambda: tf.constant(False), prove)


def _is_compiled_by_xla() -> tf.Tensor:
    """Return whether XLA compiles this graph, which tracing cannot know yet; true on devices of other kinds, too."""
    kinds = ["CPU", "GPU"]
    return tf.equal(tf.raw_ops.DeviceIndex(device_names=kinds), len(kinds))


def _each_element_finite(leaves: list[Any], inverse: Any = None) -> tf.Tensor:
    """Look at every element, those of the smallest leaf first.

    What depends on a branch, XLA does not fuse with what follows; that is four times as quick to compile.
    """
    if not leaves:
        return tf.constant(True)
    first, *others = sorted(leaves, key=_static_size)
    is_first_finite = _elements_finite([first], inverse)
    if not others:
        return is_first_finite
    return tf.cond(is_first_finite, lambda: _elements_finite(others, inverse), lambda: tf.constant(False))


def _static_size(leaf: Any) -> float:
    return float(_values(leaf).shape.num_elements() or "inf")


def _elements_finite(leaves: list[Any], inverse: Any) -> tf.Tensor:
    summed = [summed_values(leaf) if inverse is None else summed_values(times(leaf, inverse)) for leaf in leaves]
    return tf.reduce_all(
        [tf.reduce_all(tf.math.is_finite(part)) for each in summed for part in _real_parts(_with_kernels(each))]
    )


def _values(leaf: Any) -> tf.Tensor:
    return leaf.values if isinstance(leaf, tf.IndexedSlices) else tf.convert_to_tensor(leaf)


def summed_values(leaf: Any) -> tf.Tensor:
    """Return the values of `leaf`, those of duplicate indices summed."""
    if not isinstance(leaf, tf.IndexedSlices):
        return tf.convert_to_tensor(leaf)
    unique, positions = tf.unique(leaf.indices)
    return tf.math.unsorted_segment_sum(leaf.values, positions, tf.size(unique))


def _with_kernels(tensor: tf.Tensor) -> tf.Tensor:
    """Return a float8 tensor, which TensorFlow has few operations for, in float32."""
    return lifted(tensor) if tensor.dtype.size == 1 else tensor


def _real_parts(tensor: tf.Tensor) -> tuple[tf.Tensor, ...]:
    return (tf.math.real(tensor), tf.math.imag(tensor)) if tensor.dtype.is_complex else (tensor,)


def lifted(tensor: Any) -> tf.Tensor:
    """Return a tensor as a loss is scaled: halves in float32."""
    tensor = tf.convert_to_tensor(tensor)
    return tf.cast(tensor, tf.float32) if _is_narrow(tensor.dtype) else tensor


def _is_narrow(dtype: Any) -> bool:
    """Return whether a dtype is a float of 16 or 8 bits."""
    return tf.as_dtype(dtype).is_floating and tf.as_dtype(dtype).size < tf.float32.size


def _is_inexact(dtype: Any) -> bool:
    return tf.as_dtype(dtype).is_floating or tf.as_dtype(dtype).is_complex


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    return tf.nest.map_structure(lambda leaf: None if leaf is None else function(leaf), tree)
