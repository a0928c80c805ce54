"""The five verbs, `value_and_grad` and `overflow_report`."""

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, NamedTuple, ParamSpec, Protocol, TypeVar, overload

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Sharding
from jax.typing import ArrayLike

from lossscale_core import PolicyLike, ScaleState, adapters, as_policy
from lossscale_core.adapters import OverflowReport, describe, require_flag
from lossscale_jax import _gradients
from lossscale_jax._gradients import PyTree, Tree, at_least_float32, divide, gradients_of, is_array, multiply, name_of

if TYPE_CHECKING:
    Device = Any  # type checkers do not find `jax.Device`
else:
    from jax import Device

P = ParamSpec("P")
Params = TypeVar("Params", bound=Any)  # with this bound, pyright accepts arithmetic on parameters in a lambda
Value = TypeVar("Value")
Aux = TypeVar("Aux")
Grads = TypeVar("Grads")


class HasLossScale(Protocol):
    """The part of a policy's state that scaling and unscaling need."""

    @property
    def loss_scale(self) -> Any:
        """float32, shape `()`."""


def loss_scale_of(state: HasLossScale, call: str) -> Array:
    """Return the loss scale of `state`; if `state` is not a state, raise a `TypeError` that names the `call`."""
    return jnp.asarray(adapters.loss_scale_of(state, call, "init_state or get_scale_state(opt_state)"))


def init_state(policy: PolicyLike, *, device: Device | Sharding | None = None) -> ScaleState[Array]:
    """Return the state before the first step under `policy`.

    The arrays have the dtypes that every later state has, so that a step is compiled once. Does not synchronise with
    the host.

    Args:
        policy: Anything that `lossscale_core.as_policy` accepts.
        device: The device or the sharding of the state; by default, JAX's default device.

    Returns:
        The policy's state: a NamedTuple of float32 and int32 arrays of shape `()`, which is a pytree.

    Raises:
        PolicyError: `policy` is not a policy.
    """

    def place(value: Any) -> Array:
        dtype = getattr(value, "dtype", jnp.float32 if isinstance(value, float) else jnp.int32)
        return jnp.asarray(value, dtype, device=device)

    return jax.tree.map(place, as_policy(policy).init_state())


@overload
def scale(loss: ArrayLike, state: HasLossScale) -> Array: ...
@overload
def scale(loss: Tree, state: HasLossScale) -> Tree: ...
def scale(loss: Any, state: HasLossScale) -> Any:
    """Multiply `loss` by the loss scale; differentiate the result.

    A narrower dtype is first converted to float32, because a scale of 2**16 is infinite in float16. Does not
    synchronise with the host.

    Args:
        loss: An array of any shape and float dtype, real or complex, a Python float, or a pytree of such values.
        state: The scale state; with `loss_scaled`, `get_scale_state(opt_state)`.

    Returns:
        The scaled loss, in float32 or wider, in the structure of `loss`.

    Raises:
        TypeError: A leaf of `loss` is not a float, or `state` is not a state.
    """
    loss_scale = loss_scale_of(state, "scale(loss, state)")

    def scale_leaf(leaf: Any) -> Array:
        if not (is_array(leaf) or hasattr(leaf, "__jax_array__")):
            raise TypeError(f"{describe(leaf)} is not a loss; call scale(loss, state)")
        array = jnp.asarray(leaf)
        if not jnp.issubdtype(array.dtype, jnp.inexact):  # its gradients would be zero, which is finite
            raise TypeError(
                f"a loss of dtype {array.dtype} has no gradient; pass a float, such as loss.astype('float32')"
            )
        return multiply(array, loss_scale)

    return jax.tree.map(scale_leaf, loss)


def all_finite(grads: PyTree, *, axis_name: Hashable = None) -> Array:
    """Return whether every gradient element is finite.

    The check is exact: large finite values are never flagged. Does not synchronise with the host.

    Args:
        grads: A pytree of arrays of any float or complex dtype. Integer leaves are ignored; a pytree without gradients
            is finite.
        axis_name: The axis of `shard_map`, `pmap` or `vmap`, or a tuple of axes, over which to combine the flag. Arrays
            that are sharded under `jit` need no name.

    Returns:
        A bool array of shape `()`.

    Raises:
        TypeError: A leaf is not an array.
    """
    return _gradients.all_true(_gradients.are_finite(grads, jnp.float32(1.0)), axis_name)


def unscale(grads: Tree, state: HasLossScale) -> Tree:
    """Divide `grads` by the loss scale.

    Multiplies by the reciprocal of the scale, which is a normal float32 for every scale. float64 gradients are divided
    instead, without the rounding of a reciprocal. Does not synchronise with the host.

    Args:
        grads: A pytree of arrays, as `jax.grad` of the scaled loss returns.
        state: The state that scaled the loss; after `policy.update` a state may have another loss scale.

    Returns:
        The gradients: float16 and bfloat16 leaves in float32, others in their own dtype, integer leaves unchanged.

    Raises:
        TypeError: A leaf is not an array, or `state` is not a state.
    """
    gradients_of(grads)  # raises an error if a leaf is not an array
    return divide(grads, loss_scale_of(state, "unscale(grads, state)"))


def select(grads_finite: ArrayLike, new: Tree, old: Tree) -> Tree:
    """Return `new` if `grads_finite`, else `old`, so that a step is applied completely or not at all.

    In one call, pass everything that a skipped step must not change: parameters, optimizer state, batch statistics,
    averages, step counters, PRNG keys. Does not synchronise with the host.

    Args:
        grads_finite: A bool array of shape `()`; or a Python bool, which returns the leaves of one side unchanged.
        new: The pytree after the step.
        old: The pytree before the step. Leaves that are not arrays, such as an activation function, must be equal.

    Returns:
        A pytree with the leaves of `new` or of `old`.

    Raises:
        TypeError: `grads_finite` is not a bool of shape `()`; for example, it is a float or a pytree.
        ValueError: Structures, shapes, dtypes or leaves that are not arrays differ.
    """
    require_flag(grads_finite, "select(grads_finite, new, old)")

    def select_leaf(path: Any, a: Any, b: Any) -> Any:
        # `result_type` is the dtype in JAX. Without x64, it is float32 for a NumPy array of float64.
        arrays, dtypes = is_array(a) + is_array(b), {jnp.result_type(x) for x in (a, b) if hasattr(x, "dtype")}
        if arrays == 2 and jnp.shape(a) == jnp.shape(b) and len(dtypes) < 2:
            return (a if grads_finite else b) if isinstance(grads_finite, bool) else jnp.where(grads_finite, a, b)
        if a is b or (arrays == 0 and a == b):
            return a
        kinds = [f"{jnp.asarray(leaf).dtype}{[*jnp.shape(leaf)]}" if is_array(leaf) else repr(leaf) for leaf in (a, b)]
        hint = "shapes and dtypes must be the same, and a leaf that is not an array must not change"
        raise ValueError(f"{name_of(path)} is {kinds[0]} in new and {kinds[1]} in old; {hint}: pass arrays alone")

    return jax.tree_util.tree_map_with_path(select_leaf, new, old)


class ScaledGradients(NamedTuple, Generic[Value, Aux, Grads]):
    """The unscaled results of a backward pass with a scaled loss."""

    value: Value
    """The loss as `fun` returned it."""
    aux: Aux
    """The auxiliary output of `fun`; None without `has_aux`."""
    grads: Grads
    """The gradients, unscaled, in float32 or wider; averaged over `axis_name`."""
    grads_finite: Array
    """bool, shape `()`: every gradient element is finite, on every device along `axis_name`."""


@overload
def value_and_grad(
    fun: Callable[Concatenate[Params, P], tuple[Value, Aux]],
    argnums: Literal[0] = 0,
    *,
    has_aux: Literal[True],
    axis_name: Hashable = None,
) -> Callable[Concatenate[HasLossScale, Params, P], ScaledGradients[Value, Aux, Params]]: ...
@overload
def value_and_grad(
    fun: Callable[Concatenate[Params, P], Value],
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    axis_name: Hashable = None,
) -> Callable[Concatenate[HasLossScale, Params, P], ScaledGradients[Value, None, Params]]: ...
@overload
def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int], has_aux: bool = False, axis_name: Hashable = None
) -> Callable[..., ScaledGradients[Any, Any, PyTree]]: ...
def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, axis_name: Hashable = None
) -> Callable[..., ScaledGradients[Any, Any, PyTree]]:
    """Create a function that differentiates `fun` with a scaled loss; the counterpart of `jax.value_and_grad`.

    The interface follows flax's `DynamicScale.value_and_grad`. Does not synchronise with the host.

    Args:
        fun: Returns the loss, a scalar; with `has_aux`, a pair of the loss and anything else.
        argnums: The positions of the arguments of `fun` to differentiate, counted without the state.
        has_aux: Whether `fun` returns such a pair.
        axis_name: The axis of `shard_map`, `pmap` or `vmap`, or a tuple of axes, over which the data are split. The
            gradients are then unscaled, averaged over this axis and checked, so that `grads_finite` is the same on
            every device; each device returns its own `value` and `aux`. Without `axis_name` the states of the devices
            would diverge: `shard_map` raises an error, and `pmap` cannot detect it.

    Returns:
        A function `(state, *args, **kwargs)` that calls `fun(*args, **kwargs)` and returns a NamedTuple: `value`, the
            loss as `fun` returned it; `aux`, or None; `grads`, unscaled, in float32 or wider; and `grads_finite`, a
            bool array of shape `()`.

    Raises:
        TypeError: `fun` is not a function. The returned function raises this error if `state` is not a state, or if the
            loss is not a float scalar.
        ValueError: The returned function raises this error under `shard_map` if devices share a state, but their
            gradients or losses differ.
    """
    if not callable(fun):
        raise TypeError(
            f"fun={describe(fun)} must be a function that returns a loss; call value_and_grad(fun)(state, *args)"
        )

    def scaled_value_and_grad(state: HasLossScale, /, *args: Any, **kwargs: Any) -> ScaledGradients[Any, Any, PyTree]:
        loss_scale_of(state, "value_and_grad(fun)(state, *args)")

        def scaled_loss(*args: Any) -> tuple[Any, tuple[Any, Any]]:
            result = fun(*args, **kwargs)
            is_pair = isinstance(result, tuple | list) and len(result) == 2
            value, aux = result if has_aux and is_pair else (result, None)
            if (has_aux and not is_pair) or not is_array(value) or jnp.shape(value) != ():
                hint = (
                    "return a scalar loss, such as jnp.mean(loss), or with has_aux=True a pair of it and anything else"
                )
                raise TypeError(f"fun returned {describe(result)}; {hint}")
            return scale(value, state), (value, aux)

        numbers = argnums if isinstance(argnums, Sequence) else [argnums]
        positions = {operator.index(n) % len(args) for n in numbers if args}  # JAX rejects numbers out of range
        if axis_name is not None:  # without this, shard_map would sum the gradients of replicated arguments
            args = tuple(_gradients.vary_over(arg, axis_name) if n in positions else arg for n, arg in enumerate(args))
        grads, (value, aux) = jax.grad(scaled_loss, argnums, has_aux=True)(*args)
        # Unscale first, because a sum of scaled float16 gradients over the devices may overflow.
        grads = unscale(grads, state)
        grads = grads if axis_name is None else lax.pmean(grads, axis_name)
        finite = all_finite(grads)
        _gradients.require_reduced(finite, state)
        _gradients.require_reduced(value, (state, [args[n] for n in positions]))
        return ScaledGradients(value, aux, grads, finite)

    return scaled_value_and_grad


def overflow_report(grads: PyTree, *, loss: Array | float | None = None) -> OverflowReport:
    """Report the leaves that contain NaN or infinity, and the cause.

    Call it with the gradients of a skipped step, outside of `jit`. Reads every gradient and synchronises with the host.

    Args:
        grads: A pytree of arrays.
        loss: The unscaled loss of the step. It shows the cause. Gradients alone cannot show it, because an overflow of
            the backward pass may leave NaN and no infinity.

    Returns:
        A list with a `GradientReport` for each such leaf, named by its path in the pytree; empty if nothing
            overflowed. The `verdict` of the list says whether a smaller loss scale helps.

    Raises:
        TypeError: A leaf is not an array.
        jax.errors.ConcretizationTypeError: The call is within a compiled function, where gradients have no values.
    """
    leaves = gradients_of(grads)
    bad = [
        (name_of(path), at_least_float32(leaf)) for path, leaf in leaves.items() if not bool(jnp.isfinite(leaf).all())
    ]
    return OverflowReport(bad, loss_finite=None if loss is None else bool(all_finite(loss)), checked=len(leaves))
