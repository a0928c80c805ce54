"""A check for train steps: a skipped step must change nothing except the scale state."""

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lossscale_core.adapters import format_number, join_names
from lossscale_core.testing.loops import BAD_STEPS, CLOSE, SCALES, change, not_skipped, same
from lossscale_jax._gradients import PyTree, as_arrays, is_float, name_of

__all__ = ["check_train_step"]

_SELECT_HINT = "select it, or put it into the state of loss_scaled, so that only applied steps change it"
_UNSCALE_HINT = (
    "unscale before you clip or change gradients, and return the unscaled loss; in float16, where small gradients "
    "flush to zero at a scale of 1, check the step with float32 instead"
)
_SCALE_HINT = (
    "the gradients do not grow with the loss scale: differentiate scale(loss, state), and clip or replace nothing "
    "before the gradients are unscaled"
)
_POLICY_HINT = (
    "pass every step to the policy; with accumulation_steps, check a function that takes all micro-batches of a window"
)
_HIDDEN_HINT = (
    "a function such as nan_to_num or zero_nans makes the overflow finite before it is checked: leave it out, or put "
    "it inside loss_scaled"
)
_SCALE, _COUNT, _FIELD = (re.compile(rf"(\.{f}|\['{f}'\])$") for f in ("loss_scale", "skipped_steps", r"\w+"))
_structure: Any = jax.tree.structure
_TINY_SCALE = 2.0**-20
"""A loss scale at which a term that is not scaled, such as weight decay, is larger than the scaled gradients."""
_TINY_SCALE_LIMIT = 1.2
"""The largest difference of a step at `_TINY_SCALE` from a step at a scale of 1, as a fraction of the second step.

The limit is above 1, because in float16 all gradients may flush to zero at `_TINY_SCALE`, which leaves the parameters
unchanged.
"""


def check_train_step(
    step: Callable[..., Any], state: PyTree, batches: Iterable[Any], *, may_move: Sequence[str] = ()
) -> None:
    """Require that a train step skips completely, counts skipped steps, and gives the same result at any loss scale.

    The check makes the loss scale infinite for steps 0, 3 and 4, so that every gradient overflows. Such a step must
    leave everything except the scale state unchanged, bit for bit, and the scale state must count an overflow.
    The check also requires that steps with a loss scale of 1 and of 1024 have the same result. It compares with a scale
    of 2**-20 as well, which detects weight decay that is added to scaled gradients. Compute in float32 for the check:
    in float16 small gradients flush to zero at a scale of 1, and the results differ. With `accumulation_steps`, pass a
    function that takes all micro-batches of a window.

    ```python
    def checked_step(state, batch):
        params, opt_state = step(*state, batch)
        return params, opt_state  # the same structure as `state`
    check_train_step(checked_step, (params, opt_state), [batch] * 6)
    ```

    The state may contain modules of flax nnx, which the step changes in place, or the results of `nnx.split`,
    `nnx.state` and `nnx.to_pure_dict`. An `nnx.Optimizer` counts every call in its `step`, so skipped steps change it:

    ```python
    def pair_step(pair, batch):
        step(*pair, batch)
    check_train_step(pair_step, (network, optimizer), [batch] * 6, may_move=["[1].step"])
    ```

    Args:
        step: `step(state, batch)` returns the state after the step, alone or first in a tuple; if the state contains
            modules, it may return anything. Compile it as in training, but without donation.
        state: Everything that the step passes on to the next step: a pytree that contains the state of `loss_scaled`,
            or the scale state itself. Modules are copied, and stay unchanged.
        batches: Five or more batches, one for each step, so that all planned overflows happen.
        may_move: Paths that a skipped step may change, as in the message of the error: random keys, a count of batches.

    Raises:
        AssertionError: The step fails; the message names the step, and the leaves that it changed.
        ValueError: There are fewer than five batches, or `state` contains no scale state.
    """
    batches = list(batches)
    if len(batches) <= max(BAD_STEPS):
        raise ValueError(f"{len(batches)} batches are too few; pass at least {max(BAD_STEPS) + 1}")
    step, state = _without_modules(step, as_arrays(state))
    if not _flat(state)[1]:
        raise ValueError("the state holds no scale state; pass everything that a step returns for the next step")

    def step_at(loss_scale: float, batch: Any) -> PyTree:
        """Return the state after a step from `state` with another loss scale."""
        names = {name for name in scales if _SCALE.search(name)}
        replace = lambda path, leaf: jnp.full_like(leaf, loss_scale) if _name(path) in names else leaf  # noqa: E731
        result = step(jax.tree_util.tree_map_with_path(replace, state), batch)
        for returned in (result, *(result[:1] if isinstance(result, tuple) else ())):
            if _structure(returned) == _structure(state):
                return returned
        raise ValueError("step(state, batch) returned another structure; return the state, alone or first in a tuple")

    for number, batch in enumerate(batches):
        old, scales = _flat(state)
        if number in BAD_STEPS:
            new, new_scales = _flat(step_at(jnp.inf, batch))
            for name in (name for name in filter(_COUNT.search, scales) if new_scales[name] <= scales[name]):
                reached_policy = any(not same(scales[n], new_scales[n]) for n in scales if not _SCALE.search(n))
                (a, _), (b, _) = (_flat(step_at(loss_scale, batch)) for loss_scale in SCALES)
                is_scaled = all(_is_close(old[n], a[n], b[n], CLOSE) for n in a)
                hint = (_HIDDEN_HINT if is_scaled else _SCALE_HINT) if reached_policy else _POLICY_HINT
                counts = f"{name} is {new_scales[name]} after it and was {scales[name]} before"
                raise AssertionError(f"step {number} had an infinite loss scale, but {counts}; {hint}")
            names = [name for name in old if not name.startswith(tuple(may_move)) and not same(old[name], new[name])]
            if names:
                hint = _SELECT_HINT
                if not any(is_float(old[name]) for name in names):
                    hint += f"; for random keys and counts of batches pass may_move={names}"
                raise AssertionError(not_skipped(number, [change(n, old[n], new[n]) for n in names], hint))
        else:
            small = step_at(SCALES[0], batch)
            for loss_scale, limit in ((SCALES[1], CLOSE), (_TINY_SCALE, _TINY_SCALE_LIMIT)):
                (a, _), (b, _) = _flat(small), _flat(step_at(loss_scale, batch))
                differences = [f"{name} differs" for name in a if not _is_close(old[name], a[name], b[name], limit)]
                if differences:
                    scale_pair = f"loss scales of {SCALES[0]:g} and {format_number(loss_scale)}"
                    problem = f"at step {number} {scale_pair} gave different results: {join_names(differences)}"
                    raise AssertionError(f"{problem}; {_UNSCALE_HINT}")
            state = small


def _flat(state: PyTree) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the leaves outside of scale states, and the leaves of scale states, by name."""
    leaves = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    # A scale state has both fields; `sub` removes the field from a name, which leaves the name of the state.
    roots = {_SCALE.sub("", name) for name in leaves if _SCALE.search(name)}
    roots &= {_COUNT.sub("", name) for name in leaves if _COUNT.search(name)}
    scales = {name: leaf for name, leaf in leaves.items() if _FIELD.sub("", name) in roots}
    # A skipped step may also change two other parts of a state of `loss_scaled`.
    parts = [(root.rpartition("scale_state"), part) for root in roots for part in ("last_step", "window")]
    wrapper = tuple(f"{before}{part}{after}" for (before, scale_state, after), part in parts if scale_state)
    return {name: leaf for name, leaf in leaves.items() if name not in scales and not name.startswith(wrapper)}, scales


def _name(path: Any) -> str:
    """Return the name of a leaf; a variable of flax nnx has the same name as in its module."""
    name, is_variable, within = jax.tree_util.keystr(path).partition(".value")
    in_module = re.sub(r"\['(\w+)'\]", r".\1", name).removeprefix(".") + within
    return in_module if is_variable else name_of(path)


def _is_close(old: Any, a: Any, b: Any, limit: float) -> bool:
    """Return whether two results agree within `limit`, a fraction of the larger distance from the old values.

    A limit above 1 is a fraction of the distance of `a` alone, since otherwise any distant `b` would pass.
    """
    if not is_float(a):
        return same(a, b)
    old, a, b = (jnp.asarray(values, jnp.float32).ravel() for values in (old, a, b))
    distance = jnp.maximum(jnp.linalg.norm(a - old), jnp.linalg.norm(b - old) * (limit <= 1.0))
    return bool(jnp.linalg.norm(a - b) <= limit * distance + jnp.finfo(jnp.float32).eps * jnp.linalg.norm(a))


def _without_modules(step: Callable[..., Any], state: PyTree) -> tuple[Callable[..., Any], PyTree]:
    """Return a step and a state in which the variables of flax nnx modules replace the modules."""
    nnx: Any = sys.modules.get("flax.nnx")  # imported if the state has a module
    is_module = lambda node: nnx is not None and isinstance(node, nnx.Module | nnx.Optimizer)  # noqa: E731
    holds_modules = lambda tree: any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module)))  # noqa: E731
    if not holds_modules(state):
        return step, state
    graph, all_variables = nnx.split(state)

    def step_of_variables(variables: PyTree, batch: Any) -> PyTree:
        modules = nnx.merge(graph, variables)
        result = step(modules, batch)
        for returned in (result, *(result[:1] if isinstance(result, tuple) else ())):
            if holds_modules(returned) and _structure(nnx.state(returned)) == _structure(variables):
                return nnx.state(returned)
        return nnx.state(modules)

    return step_of_variables, all_variables
