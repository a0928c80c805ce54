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
    if isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from leaves(value)
    else:
        yield tree


def map_leaves(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Return a nested structure with each leaf replaced by `function(leaf, *leaves of others in the same place)`.

    Args:
        function: Takes a leaf of `tree`, and of each of `others`, and returns the new leaf.
        tree: The nested structure; `None` is a leaf.
        *others: Structures with the same containers, keys and shapes.

    Returns:
        The new structure, with containers of the same types.

    Raises:
        ValueError: The structures differ; the message names the first place.
    """
    return _map(function, "", tree, *others)


def _map(function: Callable[..., Any], path: str, tree: Any, *others: Any) -> Any:
    for other in others:
        _require_same(path, tree, other)
    if not isinstance(tree, _CONTAINERS):
        return function(tree, *others)
    keys = list(tree) if isinstance(tree, dict) else range(len(tree))
    mapped = [_map(function, f"{path}[{key!r}]", tree[key], *(other[key] for other in others)) for key in keys]
    return _rebuild(tree, keys, mapped)


def _require_same(path: str, tree: Any, other: Any) -> None:
    """Require the same container with the same keys, or for a leaf a leaf of the same shape."""
    if not isinstance(tree, _CONTAINERS):
        is_leaf = not isinstance(other, _CONTAINERS) and (tree is None) == (other is None)
        is_same = is_leaf and getattr(tree, "shape", ()) == getattr(other, "shape", ())
    elif isinstance(tree, dict):
        is_same = type(tree) is type(other) and tree.keys() == other.keys()
    else:
        is_same = type(tree) is type(other) and len(tree) == len(other)
    if not is_same:
        raise ValueError(
            f"the structures differ at {path or 'the top'}: {_describe(tree)} against {_describe(other)}; "
            "call select(grads_finite, new, old), with two trees of the same containers, keys and shapes"
        )


def _describe(tree: Any) -> str:
    if isinstance(tree, dict):
        return f"{type(tree).__name__} with keys {list(tree)}"
    if isinstance(tree, (list, tuple)):
        return f"{type(tree).__name__} of {len(tree)}"
    return f"{type(tree).__name__} of shape {tree.shape}" if hasattr(tree, "shape") else type(tree).__name__


def _rebuild(tree: Any, keys: Any, values: list[Any]) -> Any:
    if type(tree) is dict:
        return dict(zip(keys, values, strict=True))
    if isinstance(tree, dict):
        rebuilt = copy.copy(tree)  # a copy keeps the factory of a defaultdict
        rebuilt.update(zip(keys, values, strict=True))
        return rebuilt
    if hasattr(tree, "_make"):
        return tree._make(values)
    return type(tree)(values)
