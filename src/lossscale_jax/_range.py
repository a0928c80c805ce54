"""The range report: magnitudes that the forward and the backward pass of a function compute."""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.sharding import AxisType

from lossscale_core.adapters import (
    GRADIENT,
    NonfiniteInput,
    OperationRange,
    RangeReport,
    UnscaledGradient,
    name_of,
    unscaled_gradients,
)
from lossscale_jax._arguments import loss_and_aux, require_function
from lossscale_jax._attach import attaches
from lossscale_jax._debug import unchecked
from lossscale_jax._leaves import is_array, named_gradients
from lossscale_jax._range_interpreter import Interpreter, Tracked, is_finite, live_equations, measure
from lossscale_jax._verbs import scale


@unchecked
def range_report(
    fun: Callable[..., Any], *args: Any, argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> RangeReport:
    """Report which operations overflow, forward or backward, how much flushes to zero, and which loss scale fits.

    `fun` is traced once, as by `jax.jit`. Then its equations run one by one: the forward pass once, and the
    backward pass (usually up to four times) at the loss scales that it searches. It measures every computed float16,
    bfloat16 and float8 array, also within `jit`, `checkpoint`, `custom_jvp`, `custom_vjp`, `scan`, `while_loop` and
    `cond`; their iterations and branches run one at a time. Operations that neither the loss nor a gradient needs are
    left out. The arguments are not changed. Each measured array is copied to the host, so that every operation
    synchronises with it.

    If a scale fits, three more backward passes, at this scale, at half of it and at zero, find the gradients that do
    not follow the loss scale. `attach` uses the scale of each pass and not that of its state.

    Args:
        fun: Returns the loss, unscaled, a scalar of any float dtype; with `has_aux`, a pair of the loss and anything
            else. It is traced with the arrays in `args` as inputs, and with anything else in `args` as it is.
        *args: The arguments of `fun`.
        argnums: Which arguments to differentiate, such as the parameters; gradients are named by their paths.
        has_aux: Whether `fun` returns such a pair.

    Returns:
        The report. `print` it, `plot` it, or pass its `init_scale` on to `DynamicScaling`. An operation is named by its
        primitive, and by the `jax.named_scope`s or flax modules around it, else by the line of its source.

    Raises:
        TypeError: `fun` is not a function, the loss is not a scalar, or an argument to differentiate holds other
            values than floats.
    """
    require_function(fun, "range_report(fun, *args)")
    passes = _Passes(fun, args, argnums, has_aux)
    with _mesh_of(args):
        return RangeReport.measure(
            passes.forward,
            passes.backward,
            nonfinite_inputs=lambda: passes.nonfinite_inputs,
            unscaled_gradients=passes.unscaled_gradients,
        )


def _mesh_of(args: Any) -> contextlib.AbstractContextManager[Any]:
    """Set the mesh of arrays with explicit axes, since an equation that runs alone may have no input with a mesh."""
    shardings = [leaf.sharding for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array)]
    meshes: set[Any] = {each.mesh for each in shardings if isinstance(each, jax.NamedSharding)}
    explicit = [mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types]
    return jax.set_mesh(explicit[0]) if len(explicit) == 1 else contextlib.nullcontext()


class _Seed(NamedTuple):
    """A state for `scale`, which reads `loss_scale` only."""

    loss_scale: Any


class _Passes:
    """The equations of a gradient: first those of the forward pass, then those that depend on the loss scale."""

    def __init__(self, fun: Callable[..., Any], args: Any, argnums: int | Sequence[int], has_aux: bool) -> None:
        self._fun, self._args, self._argnums, self._has_aux = fun, args, argnums, has_aux
        self._interpreter = Interpreter()
        self._structure: Any = None
        self._late: Jaxpr
        self._given: list[Tracked] = []
        self.nonfinite_inputs: list[NonfiniteInput] = []

    def forward(self) -> tuple[float, Iterable[OperationRange]]:
        leaves, structure = jax.tree.flatten(self._args)
        arrays = {n: leaf for n, leaf in enumerate(leaves) if is_array(leaf) and hasattr(leaf, "dtype")}

        def gradients(loss_scale: Any, arrays: dict[int, Any]) -> Any:
            args = jax.tree.unflatten(structure, [arrays.get(n, leaf) for n, leaf in enumerate(leaves)])
            scaled_loss = functools.partial(self._scaled_loss, loss_scale)
            return jax.grad(scaled_loss, self._argnums, has_aux=True)(*args)

        closed, (shapes, _) = jax.make_jaxpr(gradients, return_shape=True)(jnp.float32(1.0), arrays)
        self._structure = jax.tree.structure(shapes)
        self.nonfinite_inputs = list(self._find_nonfinite(closed, arrays))
        early, self._late = _split(closed.jaxpr)
        inputs = [Tracked(each, False) for each in (*closed.consts, *jax.tree.leaves(arrays))]
        (*self._given, loss), records = self._interpreter.run(early, inputs)
        return float(loss.array), records

    def _find_nonfinite(self, closed: ClosedJaxpr, arrays: dict[int, Any]) -> Iterator[NonfiniteInput]:
        """Yield the non-finite constants and arguments that an equation needs."""
        names = _argument_names(self._fun, self._args)
        needed = {each for eqn in live_equations(closed.jaxpr) for each in eqn.invars if isinstance(each, Var)}
        constants = zip(closed.jaxpr.constvars, closed.consts, strict=True)
        arguments = zip(closed.jaxpr.invars[1:], arrays.items(), strict=True)
        found: list[tuple[str | None, Any]] = [(None, array) for variable, array in constants if variable in needed]
        found += [(names[n], array) for variable, (n, array) in arguments if variable in needed]
        for name, array in found:
            if not is_finite(array) and (name or jnp.ndim(array)):
                yield from self._described(name, jax.device_get(array))

    def _described(self, name: str | None, array: Any) -> Iterator[NonfiniteInput]:
        inner = name_of(array, self._fun) if name is None else None
        constant = f"{inner} of fun" if inner else f"a constant of shape {array.shape}"
        if described := NonfiniteInput.of(array, name or constant):
            yield described

    def _scaled_loss(self, loss_scale: Any, *args: Any) -> tuple[Any, Any]:
        # flax's nnx refuses to change variables that were not made within the innermost trace, which this makes again.
        result = self._fun(*jax.tree.map(lambda leaf: leaf, args))
        loss, _ = loss_and_aux(result, self._has_aux)
        return scale(loss, _Seed(loss_scale)), loss

    def backward(self, loss_scale: float) -> Iterable[OperationRange]:
        seed = Tracked(jnp.float32(loss_scale), True)
        results, records = self._interpreter.run(self._late, [seed, *self._given], loss_scale)
        gradients = (measure(leaf, GRADIENT, name)._replace(scaled=True) for name, leaf in self._named(results))
        return [*records, *gradients]

    def unscaled_gradients(self, loss_scale: float) -> list[UnscaledGradient]:
        """Return the gradients that do not follow the loss scale; at this scale, all of them are finite."""
        return unscaled_gradients(self._norms_at, loss_scale)

    def _norms_at(self, loss_scale: float) -> dict[str, float]:
        return {name: _norm(leaf) for name, leaf in self._gradients_at(loss_scale)}

    def _gradients_at(self, loss_scale: float) -> list[tuple[str, Any]]:
        seed = Tracked(jnp.float32(loss_scale), True)
        return self._named(self._interpreter.compute(self._late, [seed, *self._given], loss_scale))

    def _named(self, results: Iterable[Tracked]) -> list[tuple[str, Any]]:
        return named_gradients(jax.tree.unflatten(self._structure, [each.array for each in results]))


def _norm(array: Any) -> float:
    """Return the 2-norm of an array; it may be larger than float32 can hold. Synchronises with the host."""
    values = abs(jax.device_get(array)).astype("float64")
    return math.sqrt((values * values).sum())


def _argument_names(fun: Callable[..., Any], args: Any) -> list[str]:
    """Return the name of each leaf of the arguments: that of the argument, and its path within it."""
    try:
        arguments = inspect.signature(fun).bind(*args).arguments
    except (TypeError, ValueError):
        arguments = {"args": args}
    # One argument after the other, since JAX would sort a dict of all of them.
    named = ((name, jax.tree_util.tree_leaves_with_path(value)) for name, value in arguments.items())
    return [f"{name}{jax.tree_util.keystr(path)}" for name, leaves in named for path, _ in leaves]


def _split(jaxpr: Jaxpr) -> tuple[Jaxpr, Jaxpr]:
    """Return the equations of a gradient that do not depend on the loss scale, its first input, and those that do.

    The first equations compute the loss and the inputs of the second. JAX's own partial evaluation is private. An
    attached loss depends on the loss scale, unless the loss needs it, as in the penalty of a gradient.
    """
    (seed, *inputs), (*gradients, loss) = jaxpr.invars, jaxpr.outvars
    depending: set[Any] = {seed}
    early: list[JaxprEqn] = []
    late: list[JaxprEqn] = []
    forward = {id(eqn) for eqn in live_equations(jaxpr.replace(outvars=[loss]))}
    for eqn in live_equations(jaxpr):
        is_late = any(isinstance(each, Var) and each in depending for each in eqn.invars)
        is_late |= id(eqn) not in forward and attaches(eqn)
        (late if is_late else early).append(eqn)
        depending.update(eqn.outvars if is_late else ())
    used = (each for group in (*(eqn.invars for eqn in late), gradients) for each in group)
    needed = list(dict.fromkeys(each for each in used if isinstance(each, Var) and each not in depending))
    return (
        jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *inputs], outvars=[*needed, loss], eqns=early),
        jaxpr.replace(constvars=[], invars=[seed, *needed], outvars=gradients, eqns=late),
    )
