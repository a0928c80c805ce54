"""A check for train steps: a step that is skipped must return everything but the scale state as it was."""

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lossscale_core.testing.loops import (
    BAD_STEPS,
    CLOSE,
    SCALES,
    change,
    listed,
    not_skipped,
    same,
    scales_differ,
)
from lossscale_jax._gradients import PyTree, is_array, name_of

__all__ = ["TrainStepError", "check_train_step"]


class TrainStepError(AssertionError):
    """A train step does not follow the decisions of loss scaling; the message names the step and the difference."""


def check_train_step(
    step: Callable[..., Any], state: PyTree, batches: Iterable[Any], *, may_move: Sequence[str] = ()
) -> None:
    """Require that a train step skips as a whole, counts what it skips, and gives the same result at any loss scale.

    The check makes the loss scale infinite for steps 0, 3 and 4, so that every gradient overflows. After such a step
    everything but the scale state must be as before, bit for bit, and the scale state must have counted an overflow.
    It also requires that steps with a loss scale of 1 and of 1024 have the same result.

    ```python
    check_train_step(step, (params, opt_state, average), [batch] * 6)
    ```

    The state may hold modules of flax nnx, which the step changes in place, or what `nnx.split`, `nnx.state` and
    `nnx.to_pure_dict` return. An `nnx.Optimizer` counts every call in its `step`, which moves on skipped steps, too:

    ```python
    def pair_step(pair, batch):
        step(*pair, batch)
    check_train_step(pair_step, (network, optimizer), [batch] * 6, may_move=["[1].step"])
    ```

    Args:
        step: `step(state, batch)` returns the state after the step, or a tuple of it and anything else; where the state
            holds modules it may return anything. `jax.jit` it as in training, without donation.
        state: All that the step carries on, a pytree that holds the state of `loss_scaled`, or the scale state itself.
            Modules are copied, and stay as they are.
        batches: A batch for each step: five or more, so that all planned overflows happen.
        may_move: Paths that a skipped step may change, as in the message of the error: random keys, a count of batches.

    Raises:
        TrainStepError: The step fails; the message names the step, and what has changed.
        ValueError: There are fewer than five batches, or `state` holds no scale state.
    """
    batches = list(batches)
    if len(batches) <= max(BAD_STEPS):
        raise ValueError(f"{len(batches)} batches are too few; pass at least {max(BAD_STEPS) + 1}")
    step, state = _without_modules(step, state)
    if not _scale_states(state):
        raise ValueError("the state holds no scale state; pass all that the step carries on, the optimizer state too")
    for number, batch in enumerate(batches):
        if number in BAD_STEPS:
            after = _result(step, _with_scale(state, jnp.inf), batch, state)
            _require_skipped(number, state, after, may_move)
            _require_counted(number, state, after)
        else:
            state = _require_same_at_any_scale(number, step, state, batch)


def _without_modules(step: Callable[..., Any], state: PyTree) -> tuple[Callable[..., Any], PyTree]:
    """Return a step and its state, with the variables of flax nnx modules in place of modules that the step changes."""
    nnx: Any = sys.modules.get("flax.nnx")  # imported if a module was made

    def holds_modules(tree: PyTree) -> bool:
        return any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module)))

    def is_module(node: Any) -> bool:
        return isinstance(node, nnx.Module | nnx.Optimizer)

    if nnx is None or not holds_modules(state):
        return step, state
    graph, variables = nnx.split(state)
    structure: Any = jax.tree.structure(variables)

    def step_of_variables(variables: PyTree, batch: Any) -> PyTree:
        modules = nnx.merge(graph, variables)
        result = step(modules, batch)
        for returned in (result, *(result[:1] if isinstance(result, tuple) else ())):
            if holds_modules(returned) and jax.tree.structure(nnx.state(returned)) == structure:
                return nnx.state(returned)
        return nnx.state(modules)

    return step_of_variables, variables


def _result(step: Callable[..., Any], state: PyTree, batch: Any, like: PyTree) -> PyTree:
    """Return the state after a step, with or without the step's other results."""
    result = step(state, batch)
    expected: Any = jax.tree.structure(like)
    if jax.tree.structure(result) == expected:
        return result
    if isinstance(result, tuple) and result and jax.tree.structure(result[0]) == expected:
        return result[0]
    raise ValueError(
        "step(state, batch) returned another structure than that of state; return the state after the step, alone or "
        f"first in a tuple: {jax.tree.structure(result)} against {expected}"
    )


def _require_skipped(number: int, before: PyTree, after: PyTree, may_move: Sequence[str]) -> None:
    old, new = _followers(before), _followers(after)
    moved = [
        change(name, old[name], new[name])
        for name in old
        if not name.startswith(tuple(may_move)) and not same(old[name], new[name])
    ]
    if moved:
        hint = "select it, or let loss_scaled carry it, so that it follows applied steps only"
        raise TrainStepError(not_skipped(number, moved, hint))


def _require_counted(number: int, before: PyTree, after: PyTree) -> None:
    counts = _scale_states(after)
    for name, old in _scale_states(before).items():
        new = counts[name]
        if int(new) != int(old) + 1:
            raise TrainStepError(
                f"step {number} overflowed, but {name}.skipped_steps went from {int(old)} to {int(new)}; scale "
                "the loss, and pass every step to the policy, so that the loss scale can follow"
            )


def _require_same_at_any_scale(number: int, step: Callable[..., Any], state: PyTree, batch: Any) -> PyTree:
    """Return the state after the step, having taken it at two loss scales."""
    small, large = (_result(step, _with_scale(state, scale), batch, state) for scale in SCALES)
    old, a, b = _followers(state), _followers(small), _followers(large)
    differing = [f"{name} differs" for name in a if not _is_close(old[name], a[name], b[name])]
    if differing:
        hint = "unscale before you clip or change gradients, and return the unscaled loss"
        raise TrainStepError(scales_differ(number, f"different results: {listed(differing)}", hint))
    return small


def _is_scale_state(node: Any) -> bool:
    if isinstance(node, Mapping):  # nnx.state makes one of a NamedTuple
        return "loss_scale" in node and "skipped_steps" in node
    return isinstance(node, tuple) and hasattr(node, "loss_scale") and hasattr(node, "skipped_steps")


def _is_variable(node: Any) -> bool:
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Variable)


def _scale_states(state: PyTree) -> dict[str, Any]:
    """Return how many steps each scale state has skipped, by the paths of the scale states."""
    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_scale_state)
    return {
        name_of(path): leaf
        for path, node in nodes
        if _is_scale_state(node)
        for within, leaf in jax.tree_util.tree_leaves_with_path(node)
        if _is_entry(within, "skipped_steps")
    }


def _followers(state: PyTree) -> dict[str, Any]:
    """Return the values outside of scale states by their paths; variables of flax nnx are named as in their modules."""
    found = {}
    for path, node in jax.tree_util.tree_leaves_with_path(
        state, is_leaf=lambda node: _is_scale_state(node) or _is_variable(node)
    ):
        if _is_variable(node):
            name = re.sub(r"\['(\w+)'\]", r".\1", jax.tree_util.keystr(path)).removeprefix(".")
            for within, leaf in jax.tree_util.tree_leaves_with_path(node):
                key = jax.tree_util.keystr(within[1:])  # the first key is that of the variable's value
                found[name + key] = _values(leaf)
        elif not _is_scale_state(node):
            found[name_of(path)] = _values(node)
    return found


def _with_scale(state: PyTree, scale: float) -> PyTree:
    """Return a copy of the state with another loss scale, and the same arrays for the rest."""

    def replaced(node: Any) -> Any:
        return jax.tree_util.tree_map_with_path(scaled, node) if _is_scale_state(node) else node

    def scaled(path: Any, leaf: Any) -> Any:
        return jnp.full_like(leaf, scale) if _is_entry(path, "loss_scale") else leaf

    return jax.tree.map(replaced, state, is_leaf=_is_scale_state)


def _is_entry(path: Any, name: str) -> bool:
    """Return whether a path in a scale state leads to the entry of this name, an array or a variable that holds it."""
    return jax.tree_util.keystr(path[:1], simple=True) == name


def _values(leaf: Any) -> Any:
    """Return an array, or a leaf that is not an array, such as the functions and names in modules of Equinox."""
    if not is_array(leaf):
        return leaf
    is_key = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else jnp.asarray(leaf)


def _is_close(old: Any, a: Any, b: Any) -> bool:
    """Return whether two results agree, within two percent of how far they moved."""
    if not (is_array(a) and jnp.issubdtype(a.dtype, jnp.inexact)):
        return same(a, b)
    old, a, b = (each.astype(jnp.float32) for each in (old, a, b))
    moved = jnp.maximum(jnp.linalg.norm((a - old).ravel()), jnp.linalg.norm((b - old).ravel()))
    rounding = jnp.finfo(jnp.float32).eps * jnp.linalg.norm(a.ravel())
    return bool(jnp.linalg.norm((a - b).ravel()) <= CLOSE * moved + rounding)
