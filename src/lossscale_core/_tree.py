"""Functions for nested structures: dicts, lists, tuples and NamedTuples that hold leaves."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

_CONTAINERS = (dict, list, tuple)  # a tuple, because torch.compile cannot trace `dict | list | tuple`


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of a nested structure in order.

    Args:
        tree: A leaf, or a dict, list or tuple of nested structures; `None` is a leaf.

    Yields:
        The leaves.
    """
    if isinstance(tree, _CONTAINERS):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(part)
    else:
        yield tree


def map_leaves(function: Callable[..., Any], tree: Any, *others: Any, path: str = "") -> Any:
    """Return a nested structure with each leaf replaced by `function(leaf, *leaves of others in the same place)`.

    Args:
        function: Takes a leaf of `tree` and a leaf of each of `others`, and returns the new leaf.
        tree: The nested structure; `None` is a leaf.
        *others: Structures with the same containers, keys and shapes.
        path: The place of `tree` in a larger structure, for the error.

    Returns:
        The new structure, with containers of the same types.

    Raises:
        ValueError: The structures differ; the message names the first place.
    """
    for other in others:
        _require_same(path, tree, other)
    if not isinstance(tree, _CONTAINERS):
        return function(tree, *others)
    keys = list(tree) if isinstance(tree, dict) else range(len(tree))
    parts = [(f"{path}[{key!r}]", tree[key], *(other[key] for other in others)) for key in keys]
    return _rebuild(tree, keys, [map_leaves(function, *part, path=place) for place, *part in parts])


def _require_same(path: str, tree: Any, other: Any) -> None:
    """Require the same containers with the same keys, or leaves of the same shape."""
    if _layout(tree) != _layout(other):
        raise ValueError(
            f"the structures differ at {path or 'the top'}: {_describe(tree)} against {_describe(other)}; "
            "call select(grads_finite, new, old), with two trees of the same containers, keys and shapes"
        )


def _layout(tree: Any) -> tuple[Any, Any]:
    if isinstance(tree, _CONTAINERS):
        return type(tree), tree.keys() if isinstance(tree, dict) else len(tree)
    return tree is None, getattr(tree, "shape", ())


def _describe(tree: Any) -> str:
    if isinstance(tree, _CONTAINERS):
        return f"{type(tree).__name__} {f'with keys {list(tree)}' if isinstance(tree, dict) else f'of {len(tree)}'}"
    return f"{type(tree).__name__} of shape {tree.shape}" if hasattr(tree, "shape") else type(tree).__name__


def _rebuild(tree: Any, keys: Any, values: list[Any]) -> Any:
    if isinstance(tree, dict):
        rebuilt = tree.copy() if type(tree) is dict else copy.copy(tree)  # `copy` keeps the factory of a defaultdict
        rebuilt.update(zip(keys, values, strict=True))
        return rebuilt
    if hasattr(tree, "_make"):
        return tree._make(values)
    return type(tree)(values)
