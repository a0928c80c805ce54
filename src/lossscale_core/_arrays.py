"""The thin array layer: which namespace an array belongs to, and the verbs on NumPy and any array-API namespace.

NumPy is the reference: what these functions do on it, every adapter does on its own framework.
"""

from typing import Any

import numpy as np

from lossscale_core import tree
from lossscale_core._finite import all_finite_in
from lossscale_core._state import AnyScaleState, Array

Namespace = Any
_HOST_SCALARS = (np.generic, bool, int, float, complex)
_ON_HOST = (*_HOST_SCALARS, np.ndarray)


class HOST:
    """The namespace of host scalars, where a choice is made at once."""

    @staticmethod
    def where(condition: Any, x: Any, y: Any) -> Any:
        """Return `x` or `y` in the NumPy type of either: a plain number is as weak as in `np.where`."""
        chosen = x if condition else y
        if isinstance(chosen, np.generic):
            return chosen
        other = y if condition else x
        return type(other)(chosen) if isinstance(other, np.generic) else chosen


def namespace(array: Array) -> Namespace:
    """Return the array-API namespace that `array` belongs to, or the private one of host scalars.

    Raises `TypeError` where there is none; TensorFlow's tensors have none, so its adapter passes `xp=` itself.
    """
    if isinstance(array, _HOST_SCALARS):
        return HOST
    if isinstance(array, np.ndarray):
        return np
    import array_api_compat  # here, since who stays on NumPy never needs it

    try:
        return array_api_compat.array_namespace(array)
    except TypeError as error:
        raise TypeError(
            f"{type(array).__module__}.{type(array).__qualname__} is neither an array with an array-API namespace "
            "nor a dict, list or tuple of them; pass such a structure, or the array's namespace as xp="
        ) from error


def host_flag(grads_finite: Any) -> bool:
    """Return `grads_finite` as a Python bool; a flag that lives on a device is waited for. Raises `TypeError`."""
    if grads_finite is True or grads_finite is False:
        return grads_finite
    if getattr(grads_finite, "shape", None) != ():
        raise TypeError(f"grads_finite={grads_finite!r} must be a bool of shape (); pass what all_finite returned")
    return bool(grads_finite)


@np.errstate(all="ignore")
def scale(loss: Any, state: AnyScaleState, *, xp: Namespace | None = None) -> Any:
    """Return `loss` times the loss scale: what to differentiate.

    `loss` is an array of any shape and real dtype, or a nested structure of them. It is lifted to float32 first
    (float64 stays), since a scale of 2**16 is already infinite in float16. `None` passes through. Does not
    synchronise with the host. Raises `TypeError` for a leaf that is no array.
    """

    def scale_leaf(leaf: Any) -> Any:
        if leaf is None:
            return None
        array, leaf_xp = _with_namespace(leaf, xp)
        return _lifted(array, leaf_xp) * _beside(state.loss_scale, array, leaf_xp)

    return tree.map_leaves(scale_leaf, loss)


@np.errstate(all="ignore")
def all_finite(grads: Any, *, xp: Namespace | None = None) -> Array:
    """Return whether every gradient element is finite, as a bool of shape `()`.

    `grads` is a nested structure of arrays. NaN and both infinities are found in any position; a finite value is never
    flagged, however large. `None` and integer leaves do not count, and nothing at all is finite. On NumPy the answer
    is an `np.bool_`, found while allocating at most 1 MiB; elsewhere it is an array of that namespace, and nothing
    synchronises. Combine the flags of several devices with *all*. Raises `TypeError` for a leaf that is no array.
    """
    on_host, on_device = True, None
    for leaf in tree.leaves(grads):
        if leaf is None:
            continue
        array, leaf_xp = _with_namespace(leaf, xp)
        if leaf_xp is np:
            on_host = on_host and _all_finite_on_host(array)
        else:
            if _is_gradient(array, leaf_xp):
                finite = leaf_xp.all(leaf_xp.isfinite(array))
            else:
                finite = leaf_xp.asarray(True, device=_device(array))
            on_device = finite if on_device is None else on_device & finite
    return np.bool_(on_host) if on_device is None else on_device & on_host


@np.errstate(all="ignore")
def unscale(grads: Any, state: AnyScaleState, *, xp: Namespace | None = None) -> Any:
    """Return `grads` divided by the loss scale.

    `grads` is a nested structure of arrays. float16 and bfloat16 leaves come back in float32, where small gradients
    survive; float32, float64 and complex leaves keep their dtype; `None` and integer leaves pass through. Pass the
    state that scaled the loss, not the one after `update`. Does not synchronise with the host. Raises `TypeError` for a
    leaf that is no array.
    """

    def unscale_leaf(leaf: Any) -> Any:
        if leaf is None:
            return None
        array, leaf_xp = _with_namespace(leaf, xp)
        return (
            _lifted(array, leaf_xp) / _beside(state.loss_scale, array, leaf_xp)
            if _is_gradient(array, leaf_xp)
            else leaf
        )

    return tree.map_leaves(unscale_leaf, grads)


def select(grads_finite: Array, new: Any, old: Any, *, xp: Namespace | None = None) -> Any:
    """Return `new` where `grads_finite`, else `old`: a step is applied as a whole or not at all.

    `new` and `old` are nested structures of the same containers, keys and shapes: parameters, optimizer state,
    counters, averages. A host bool picks the leaves of one side, untouched; an array bool of shape `()` selects where
    the arrays live, without synchronising. Raises `ValueError` at the first place where the structures differ.
    """
    if isinstance(grads_finite, _ON_HOST):
        take_new = host_flag(grads_finite)
        return tree.map_leaves(lambda a, b: a if take_new else b, new, old)
    flag_xp = namespace(grads_finite) if xp is None else xp

    def select_leaf(a: Any, b: Any) -> Any:
        if a is None:
            return None
        a, b = (
            leaf if hasattr(leaf, "shape") else flag_xp.asarray(leaf, device=_device(grads_finite)) for leaf in (a, b)
        )
        return flag_xp.where(grads_finite, a, b)

    return tree.map_leaves(select_leaf, new, old)


def _with_namespace(leaf: Any, xp: Namespace | None) -> tuple[Array, Namespace]:
    """Return `leaf` as an array with its namespace; what lives on the host belongs to NumPy, whatever `xp` says."""
    if type(leaf) is np.ndarray:
        return leaf, np
    if isinstance(leaf, _ON_HOST):
        return np.asarray(leaf), np
    return leaf, namespace(leaf) if xp is None else xp


def _all_finite_on_host(array: Array) -> bool:
    """Return whether a NumPy array is finite; a record array is where each of its fields is."""
    if array.dtype.type is np.record:
        return all(_all_finite_on_host(array[name].view(np.ndarray)) for name in array.dtype.names)
    return not _is_gradient(array, np) or all_finite_in(array)


def _is_gradient(array: Array, xp: Namespace) -> bool:
    """Return whether `array` holds floats, real or complex, rather than integers or bools."""
    if xp is not np:
        return not xp.isdtype(array.dtype, ("integral", "bool"))
    kind = array.dtype.kind
    if kind in "fcbiu":
        return kind in "fc"
    if kind == "V" and not issubclass(array.dtype.type, np.void):  # ml_dtypes: bfloat16, float8 and int4
        return not np.can_cast(array.dtype, np.int64)
    fields = "each field of it, " if array.dtype.names else ""
    raise TypeError(f"a leaf of dtype {array.dtype} is no gradient; pass {fields}float arrays, integers or None")


def _lifted(array: Array, xp: Namespace) -> Array:
    """Return `array` in float32, or in its own dtype where that is wider."""
    dtype = xp.result_type(array.dtype, xp.float32) if _is_gradient(array, xp) else xp.float32
    return xp.astype(array, dtype, copy=False)


def _beside(loss_scale: Any, array: Array, xp: Namespace) -> Array:
    """Return `loss_scale` so that it can stand in an expression beside `array` of `xp`."""
    if xp is np or not isinstance(loss_scale, _ON_HOST):
        return loss_scale
    return xp.asarray(loss_scale, dtype=xp.float32, device=_device(array))


def _device(array: Array) -> Any:
    return getattr(array, "device", None)
