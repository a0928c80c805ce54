"""Updates that follow from an optimizer's new state: they need not be computed where that is.

A conditional has to store what it returns. Outside of it, XLA fuses the updates into what adds them to the parameters.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from lossscale_jax import _axes
from lossscale_jax._step import Skip, apply_or_skip, no_updates
from lossscale_jax._types import PyTree, Tree
from lossscale_jax._verbs import select

_ELEMENTWISE = {
    *("abs", "add", "broadcast_in_dim", "convert_element_type", "copy", "div", "integer_pow", "max", "min", "mul"),
    *("neg", "pow", "rsqrt", "select_n", "sign", "sqrt", "square", "sub", "eq", "ge", "gt", "le", "lt", "ne"),
}
"""Primitives that cost no more than reading their operands, so that XLA fuses them into what adds the updates."""


def update_or_skip(
    applies: Array,
    step: Callable[[PyTree, PyTree], tuple[Tree, PyTree]],
    grads: PyTree,
    inner_state: PyTree,
    like: Tree,
    by: Skip,
) -> tuple[Tree, PyTree]:
    """Return the updates and the state that `step` returns where `applies`, else no updates and the state as it was.

    `like` is a pytree of the updates' shapes, whose memory they may take.
    """
    is_traced = isinstance(applies, jax.core.Tracer)
    late = _LateUpdates.of(step, grads, inner_state) if is_traced and by == "cond" else None
    if late is None:
        applied = jax.eval_shape(step, grads, inner_state)[0] if is_traced else like

        def skip(_: PyTree, inner_state: PyTree) -> tuple[Tree, PyTree]:
            # XLA lets a conditional write where its operand lies only if one branch returns that operand as it is. So a
            # skip returns gradients, and the updates take their memory; what drops them is fused into what adds them.
            # What an optimizer reduces itself no longer varies over that axis; zeros will do, since they are dropped.
            return _axes.zeros_where_reduced(like, applied), inner_state

        updates, after = apply_or_skip(applies, step, skip, grads, inner_state, by=by)
    else:
        after = apply_or_skip(applies, lambda *given: step(*given)[1], lambda _, state: state, grads, inner_state)
        updates = late(*_ones_unless(applies, (grads, inner_state, after)))
    return select(applies, updates, no_updates(updates)), after


def _ones_unless(applies: Array, tree: Tree) -> Tree:
    """Return a pytree with ones for its numbers where a step is skipped.

    What would follow from an overflow, or from a count of zero steps, is dropped. But a derivative of it is NaN, and
    `checkify` would report it.
    """

    def chosen(leaf: Any) -> Any:
        is_number = jnp.issubdtype(jnp.result_type(leaf), jnp.number)  # and not the key of a random generator
        return jnp.where(applies, leaf, jnp.ones_like(leaf)) if is_number else leaf

    return jax.tree.map(chosen, tree)


class _LateUpdates(NamedTuple):
    """The equations from the gradients and an optimizer's new state to its updates."""

    closed: ClosedJaxpr
    equations: list[JaxprEqn]
    structure: Any
    """That of the updates, the first outputs; the others are the new state."""

    @classmethod
    def of(
        cls, step: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]], grads: PyTree, inner_state: PyTree
    ) -> "_LateUpdates | None":
        """Return those of `step`, which returns updates and new state.

        None where the updates need an array of the old state, too, or operations that cost more than reading.
        """
        closed, (updates, _) = jax.make_jaxpr(step, return_shape=True)(grads, inner_state)
        jaxpr, structure = closed.jaxpr, jax.tree.structure(updates)
        count = len(jax.tree.leaves(updates))
        after = set(_variables(jaxpr.outvars[count:]))
        needed = set(_variables(jaxpr.outvars[:count])) - after
        equations = []
        for eqn in reversed(jaxpr.eqns):
            if not needed.isdisjoint(eqn.outvars):
                if not _is_elementwise(eqn):
                    return None
                needed.update(set(_variables(eqn.invars)) - after)
                equations.append(eqn)
        # To keep an array of the old state until then would make XLA copy it: the new one is written in its place.
        old = jaxpr.invars[len(jax.tree.leaves(grads)) :]
        if any(each in needed and _shape(each) for each in old):
            return None
        return cls(closed, equations[::-1], structure)

    def __call__(self, grads: PyTree, before: PyTree, after: PyTree) -> PyTree:
        """Return the updates, given the gradients and the state before the step and after it."""
        jaxpr = self.closed.jaxpr
        values = dict(zip(jaxpr.constvars, self.closed.consts, strict=True))
        values.update(zip(jaxpr.invars, jax.tree.leaves((grads, before)), strict=True))
        outputs, count = jaxpr.outvars, self.structure.num_leaves
        new = zip(outputs[count:], jax.tree.leaves(after), strict=True)
        values.update((var, value) for var, value in new if isinstance(var, Var))
        alone = jaxpr.replace(constvars=[], invars=[*values], outvars=outputs[:count], eqns=self.equations)
        return jax.tree.unflatten(self.structure, jax.core.eval_jaxpr(alone, (), *values.values()))


def _variables(atoms: Any) -> list[Var]:
    return [each for each in atoms if isinstance(each, Var)]


def _is_elementwise(eqn: JaxprEqn) -> bool:
    """Return whether an equation costs no more than reading its operands, or computes with scalars alone."""
    if eqn.effects:
        return False
    if eqn.primitive.name in ("jit", "pjit"):  # such as `jnp.where`, by its names in new and old JAX
        return all(map(_is_elementwise, eqn.params["jaxpr"].eqns))
    return eqn.primitive.name in _ELEMENTWISE or not any(_shape(each) for each in (*eqn.invars, *eqn.outvars))


def _shape(atom: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = atom.aval.shape
    return shape
