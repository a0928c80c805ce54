"""The namespace of an array, and four of the five verbs on NumPy and on any array-API namespace.

The results on NumPy are the reference for the adapters.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

import numpy as np

from lossscale_core import _tree as tree
from lossscale_core._messages import require_flag
from lossscale_core._state import Array, Namespace, ScaleState, loss_scale_of

TreeT = TypeVar("TreeT")
"""A nested structure of arrays; a result of this type has the same containers."""

if TYPE_CHECKING:
    from numpy.typing import NDArray

    HostTree: TypeAlias = complex | np.generic | NDArray[Any] | Mapping[Any, "HostTree"] | Sequence["HostTree"] | None
    """A nested structure of NumPy arrays and scalars."""

_HOST_SCALARS = (np.generic, bool, int, float, complex)
_ON_HOST = (np.ndarray, *_HOST_SCALARS)
# np.isfinite allocates one byte per element; chunks keep this small compared with the gradients.
_CHUNK = 2**14
_SELECT = "select(grads_finite, new, old)"


class HOST:
    """The array namespace of host scalars."""

    @staticmethod
    def where(condition: Any, x: Any, y: Any) -> Any:
        """Return `x` or `y`. As in `np.where`, a plain number takes the NumPy type of the other argument."""
        result, other = (x, y) if condition else (y, x)
        if isinstance(result, np.generic) or not isinstance(other, np.generic):
            return result
        return type(other)(result)


def namespace(array: Array) -> Namespace:
    """Return the array-API namespace of `array`, or `HOST` for a host scalar.

    Raises `TypeError` if the array has no namespace. TensorFlow's tensors do not have one, so its adapter passes `xp=`.
    """
    if isinstance(array, _HOST_SCALARS):
        return HOST
    if isinstance(array, np.ndarray):
        return np
    import array_api_compat  # imported late: code that uses NumPy only does not need it

    try:
        return array_api_compat.array_namespace(array)
    except TypeError as error:
        raise TypeError(
            f"{type(array).__module__}.{type(array).__qualname__} is neither an array with an array-API namespace "
            "nor a dict, list or tuple of them; pass such a structure, or the array's namespace as xp="
        ) from error


def host_flag(grads_finite: Any, call: str) -> bool:
    """Return `grads_finite` as a Python bool. Synchronises with the host.

    Raises `TypeError`, with the right `call`, if the value is not a bool of shape `()` or is traced.
    """
    if grads_finite is True or grads_finite is False:
        return grads_finite
    require_flag(grads_finite, call)
    try:
        return bool(grads_finite)
    except TypeError as error:
        raise TypeError(
            "grads_finite is traced and has no value while a function is compiled, but the state is on the host; pass "
            "a state of the framework's arrays, such as the adapter's init_state(policy) returns"
        ) from error


@overload
def scale(
    loss: float | np.floating[Any] | np.integer[Any], state: ScaleState, *, xp: Namespace | None = None
) -> np.floating[Any]: ...
@overload
def scale(loss: TreeT, state: ScaleState, *, xp: Namespace | None = None) -> TreeT: ...
@np.errstate(all="ignore")  # overflows are expected, and the policy skips these steps
def scale(loss: Any, state: ScaleState, *, xp: Namespace | None = None) -> Any:
    """Multiply `loss` by the loss scale; differentiate the result.

    A narrower dtype is first converted to float32, because a scale of 2**16 is infinite in float16. Does not
    synchronise with the host.

    Args:
        loss: An array of any shape and real dtype, or a nested structure of them; `None` passes through.
        state: The state before the step.
        xp: The array namespace of the loss, inferred if left out. NumPy arrays stay in NumPy.

    Returns:
        The scaled loss in the structure of `loss`, in float32, or in float64 if `loss` is.

    Raises:
        TypeError: A leaf of `loss` is not an array, or `state` is not a state.
    """
    loss_scale = loss_scale_of(state, "scale(loss, state)")

    def scale_leaf(_: Any, array: Array, leaf_xp: Namespace) -> Any:
        return _at_least_float32(array, leaf_xp) * _scale_for(array, loss_scale, leaf_xp)

    return _map_arrays(scale_leaf, loss, xp)


@overload
def all_finite(grads: "HostTree", *, xp: Namespace | None = None) -> np.bool_: ...
@overload
def all_finite(grads: Any, *, xp: Namespace | None = None) -> Array: ...
@np.errstate(all="ignore")
def all_finite(grads: Any, *, xp: Namespace | None = None) -> Array:
    """Return whether every gradient element is finite.

    The check is exact: it finds NaN and both infinities in any position, and accepts every finite value. On NumPy it
    allocates at most 1 MiB. In other namespaces it does not synchronise with the host.

    Args:
        grads: A nested structure of arrays of any float or complex dtype. `None` and integer leaves are ignored, and
            a structure without gradients is finite.
        xp: The array namespace of the gradients, inferred if left out. NumPy arrays stay in NumPy.

    Returns:
        A bool of shape `()`: an `np.bool_` for NumPy arrays, otherwise an array of their namespace. Combine the flags
        of several devices by *all*.

    Raises:
        TypeError: A leaf of `grads` is not an array.
    """
    finite: Any = True
    for leaf in tree.leaves(grads):
        if leaf is None:
            continue
        array, leaf_xp = _with_namespace(leaf, xp)
        is_gradient = _is_gradient(array, leaf_xp)
        if leaf_xp is np:
            flag = finite is not False and (not is_gradient or _all_finite_by_chunks(array))
        elif is_gradient:
            flag = leaf_xp.all(leaf_xp.isfinite(array))
        else:
            flag = leaf_xp.asarray(True, device=_device(array))
        finite = flag & finite  # an operator combines a Python bool with an array on any device, without a transfer
    return np.bool_(finite) if isinstance(finite, bool) else finite


@np.errstate(all="ignore")
def unscale(grads: TreeT, state: ScaleState, *, xp: Namespace | None = None) -> TreeT:
    """Divide `grads` by the loss scale.

    Does not synchronise with the host.

    Args:
        grads: A nested structure of arrays; `None` and integer leaves pass through.
        state: The state that scaled the loss, before `update`.
        xp: The array namespace of the gradients, inferred if left out. NumPy arrays stay in NumPy.

    Returns:
        The gradients in the structure of `grads`. float16 and bfloat16 leaves become float32, where small gradients
        survive; float32, float64 and complex leaves keep their dtype.

    Raises:
        TypeError: A leaf of `grads` is not an array, or `state` is not a state.
    """
    loss_scale = loss_scale_of(state, "unscale(grads, state)")

    def unscale_leaf(leaf: Any, array: Array, leaf_xp: Namespace) -> Any:
        if not _is_gradient(array, leaf_xp):
            return leaf
        # The quotient rounds once; a product with the reciprocal of a scale that is not a power of two rounds twice.
        return _at_least_float32(array, leaf_xp) / _scale_for(array, loss_scale, leaf_xp)

    unscaled: TreeT = _map_arrays(unscale_leaf, grads, xp)
    return unscaled


def select(grads_finite: Array, new: TreeT, old: TreeT, *, xp: Namespace | None = None) -> TreeT:
    """Return `new` if `grads_finite`, else `old`, so that a step is applied completely or not at all.

    Pass everything that a skipped step must not change: parameters, optimizer state, counters, averages. With a bool on
    the host, the leaves of one structure are returned unchanged. With an array, the selection runs on the device and
    does not synchronise with the host.

    Args:
        grads_finite: A bool of shape `()`: True if the step is applied.
        new: The nested structure of arrays after the step.
        old: The nested structure before the step, with the same containers, keys and shapes.
        xp: The array namespace of the flag, inferred if left out.

    Returns:
        The selected arrays in the structure of `new`.

    Raises:
        ValueError: The structures differ; the message names the first place.
        TypeError: `grads_finite` is not a bool of shape `()`.
    """
    selected: TreeT
    if isinstance(grads_finite, _ON_HOST):
        take_new = host_flag(grads_finite, _SELECT)
        selected = tree.map_leaves(lambda a, b: a if take_new else b, new, old)
        return selected
    require_flag(grads_finite, _SELECT)
    flag_xp = namespace(grads_finite) if xp is None else xp

    def select_leaf(a: Any, b: Any) -> Any:
        if a is None:
            return None
        a, b = (
            leaf if hasattr(leaf, "shape") else flag_xp.asarray(leaf, device=_device(grads_finite)) for leaf in (a, b)
        )
        return flag_xp.where(grads_finite, a, b)

    selected = tree.map_leaves(select_leaf, new, old)
    return selected


def _map_arrays(function: Callable[..., Any], structure: Any, xp: Namespace | None) -> Any:
    """Return a nested structure with each leaf replaced by `function(leaf, array, namespace)`; None stays None."""
    return tree.map_leaves(lambda leaf: None if leaf is None else function(leaf, *_with_namespace(leaf, xp)), structure)


def _with_namespace(leaf: Any, xp: Namespace | None) -> tuple[Array, Namespace]:
    """Return `leaf` as an array with its namespace; NumPy arrays and scalars stay in NumPy for any `xp`."""
    if isinstance(leaf, _ON_HOST):
        return np.asarray(leaf), np
    return leaf, namespace(leaf) if xp is None else xp


def _all_finite_by_chunks(array: np.ndarray[Any, Any]) -> bool:
    """Return whether every element of a NumPy array of floats of any dtype, shape and strides is finite."""
    pieces = np.nditer(array, flags=["external_loop", "buffered", "zerosize_ok"], order="K", buffersize=_CHUNK)
    return all(np.isfinite(piece).all() for piece in pieces)


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
    raise TypeError(f"a leaf of dtype {array.dtype} is not a gradient; pass {fields}float arrays, integers or None")


def _at_least_float32(array: Array, xp: Namespace) -> Array:
    """Return `array` in float32, or in its own dtype if its dtype is wider."""
    dtype = xp.result_type(array.dtype, xp.float32) if _is_gradient(array, xp) else xp.float32
    return xp.astype(array, dtype, copy=False)


def _scale_for(array: Array, loss_scale: Any, xp: Namespace) -> Array:
    """Return `loss_scale` on the device of `array`, or unchanged if the two can be multiplied already."""
    if xp is np or not isinstance(loss_scale, _ON_HOST):
        return loss_scale
    return xp.asarray(loss_scale, dtype=xp.float32, device=_device(array))


def _device(array: Array) -> Any:
    return getattr(array, "device", None)
