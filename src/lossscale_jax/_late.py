"""Computation of an optimizer's updates outside of the conditional, if its new state determines them.

A conditional stores the values that it returns. Outside of it, XLA fuses the updates into their addition to the
parameters. On a CPU, whole train steps with `update` take 4 to 21 % less time.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import JaxprEqn, Var

from lossscale_jax._decide import Skip, decide
from lossscale_jax._types import PyTree

_ELEMENTWISE = {
    *("abs", "add", "broadcast_in_dim", "convert_element_type", "copy", "div", "integer_pow", "max", "min", "mul"),
    *("neg", "pow", "rsqrt", "select_n", "sign", "sqrt", "square", "sub", "eq", "ge", "gt", "le", "lt", "ne"),
}
"""Primitives that cost no more than reading their operands, so that XLA fuses them into the addition of updates."""

_Step: TypeAlias = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
"""Returns updates and the new state, given the source of the gradients and the old state."""


def update_or_skip(
    applies: Array, step: _Step, skip: Callable[..., tuple[PyTree, PyTree]], source: PyTree, before: PyTree, by: Skip
) -> tuple[PyTree, PyTree]:
    """Decide as `decide` does; if `by` is a conditional, compute updates outside of it where possible."""
    is_conditional = by == "cond" and isinstance(applies, jax.core.Tracer)
    step = jax.jit(step, inline=True) if is_conditional else step  # traced once
    late = _late_updates(step, source, before) if is_conditional else None
    if late is None:
        return decide(applies, step, skip, source, before, by=by)
    after = decide(applies, lambda *operands: step(*operands)[1], lambda _, __, state: state, source, before, by=by)
    return late(applies, after), after


def _late_updates(step: _Step, source: PyTree, before: PyTree) -> Callable[[Array, PyTree], PyTree] | None:
    """Return a function that computes the updates of `step` from its flag and the state after it.

    Return None if the updates also need an array of the old state, or operations that cost more than reading.
    """
    closed, (updates, _) = jax.make_jaxpr(step, return_shape=True)(source, before)
    jaxpr: Any = closed.jaxpr
    outputs, count = jaxpr.outvars, len(jax.tree.leaves(updates))
    known = {var for var in outputs[count:] if isinstance(var, Var)}
    read = {var for var in outputs[:count] if isinstance(var, Var)}
    needed: set[Any] = read - known
    equations: list[JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            if not _is_elementwise(eqn):
                return None
            inputs = {var for var in eqn.invars if isinstance(var, Var)}
            read |= inputs
            needed |= inputs - known
            equations.append(eqn)
    # Needing an array of the old state until then would make XLA copy it, since the new one overwrites its memory.
    old = jaxpr.invars[len(jax.tree.leaves(source)) :]
    if any(var.aval.shape for var in needed.intersection(old)):
        return None

    def updates_after(applies: Array, after: PyTree) -> PyTree:
        given = zip((*jaxpr.invars, *outputs[count:]), jax.tree.leaves((source, before, after)), strict=True)
        used = {var: value for var, value in given if isinstance(var, Var) and var in read}
        # On a skipped step use ones: the derivative of updates from an overflow, or from a count of zero steps, is NaN,
        # and `checkify` would report it.
        numbers = {var: value for var, value in used.items() if jnp.issubdtype(value.dtype, jnp.number)}  # and no keys
        values = used | {var: jnp.where(applies, value, jnp.ones_like(value)) for var, value in numbers.items()}
        values.update(zip(jaxpr.constvars, closed.consts, strict=True))
        alone = jaxpr.replace(constvars=[], invars=[*values], outvars=outputs[:count], eqns=equations[::-1])
        return jax.tree.unflatten(jax.tree.structure(updates), jax.core.eval_jaxpr(alone, (), *values.values()))

    return updates_after


def _is_elementwise(eqn: JaxprEqn) -> bool:
    """Return whether an equation costs no more than reading its operands, or computes with scalars only."""
    if eqn.effects:
        return False
    if eqn.primitive.name in ("jit", "pjit"):  # such as `jnp.where`; the name depends on JAX's version
        return all(map(_is_elementwise, eqn.params["jaxpr"].eqns))
    operands: Any = (*eqn.invars, *eqn.outvars)
    return eqn.primitive.name in _ELEMENTWISE or not any(each.aval.shape for each in operands)
