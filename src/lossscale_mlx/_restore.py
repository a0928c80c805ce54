"""Restoring what a skipped step has changed in a model or in the state of an optimizer."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from lossscale_core.errors import CallOrderError


class Snapshot:
    """What a tree of dicts, lists and tuples holds before a step."""

    def __init__(self, tree: Any) -> None:
        self.tree, self.outline, self.containers = tree, _outline(tree), list(_containers(tree))

    def restore_unless(self, applied: mx.array, *, retries: int = 0) -> None:
        """Restore the tree if the step is not applied. Dicts and lists are written in place, as `mx.compile` requires.

        This evaluates nothing as long as the step has only replaced arrays by others of their shape and dtype. After
        any other change, and with `retries`, it waits for the flag, and also restores the attributes of modules.
        """
        changed = sorted({name for name, _ in self.outline ^ _outline(self.tree)})
        if changed or retries:
            what = f"undoing a new shape or type of {', '.join(changed)}" if changed else "minimize(retries=...)"
            for now, held in [] if read(applied, what) else self.containers:
                type(held).clear(now)  # a module has an `update` that does something else
                (list.extend if isinstance(held, list) else dict.update)(now, held)
            return
        for now, held in self.containers:
            for at in range(len(held)) if isinstance(held, list) else [key for key in held if key in now]:
                new, old = now[at], held[at]
                if new is not old:
                    now[at] = tree_map(lambda a, b: mx.where(applied, a, b) if isinstance(a, mx.array) else a, new, old)


def read(flag: mx.array, what: str) -> Any:
    """Return the value of an array of shape `()`; raise `CallOrderError` where it has none."""
    try:
        return flag.item()
    except (ValueError, RuntimeError) as error:
        # The words of MLX for an array that depends on an input, and for an input itself.
        if not any(words in str(error) for words in ("function transformations", "without a primitive")):
            raise
        raise CallOrderError(f"{what} reads an array, which has no value in mx.compile; avoid it there") from error


def _outline(tree: Any) -> set[tuple[str, Any]]:
    """Return the path of each leaf with its shape and dtype, or with its identity if it is not an array."""
    leaves: Any = tree_flatten(tree)
    return {(name, (leaf.shape, leaf.dtype) if isinstance(leaf, mx.array) else id(leaf)) for name, leaf in leaves}


def _containers(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each dict and list with a copy of what it holds, and the attributes of each module."""
    if isinstance(tree, dict | list):
        attributes = getattr(tree, "__dict__", {})  # a module has some
        yield attributes, {**attributes}
        yield tree, {**tree} if isinstance(tree, dict) else [*tree]
    for each in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ():
        yield from _containers(each)
