"""The rules of `all_finite`: it finds every non-finite element, and flags no finite one."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from lossscale_core.testing import LARGEST_NUMBER
from tests.conformance.suite._trial import Trial

# 67 is a prime number, so that a loop over vectors of any width has a remainder, which is easily left unchecked.
_SHAPES = ((), (67,), (3, 5))
_LONG, _MANY = (3, 5, 7, 41), 12
_BAD = (np.nan, np.inf, -np.inf)


def every_position_is_seen(trial: Trial, dtype: str) -> None:
    """all_finite sees NaN and both infinities wherever they are in a leaf, and flags no finite value however large."""
    check = trial.run(trial.adapter.verbs.all_finite)
    clean_leaf = trial.array(np.ones(3), dtype)
    for clean in _clean_leaves(dtype):
        what = f"the flag of a {dtype} leaf of shape {clean.shape} and magnitude {np.abs(clean).max():g}"
        trial.expect_flag(f"{what}, all finite,", check([clean_leaf, trial.array(clean, dtype), clean_leaf]), True)
        for position, bad, spoiled in _spoiled(clean):
            leaves = [clean_leaf, trial.array(spoiled, dtype), clean_leaf]
            trial.expect_flag(f"{what} with {bad} at position {position}", check(leaves), False)
            if not trial.way.has_values:
                break


def long_and_many_leaves_are_seen(trial: Trial, dtype: str) -> None:
    """all_finite sees an overflow in the middle and at the end of a long leaf, and in the last leaf of many."""
    check, long = trial.run(trial.adapter.verbs.all_finite), np.ones(_LONG)
    few = [trial.array(np.ones(3), dtype)] * _MANY
    last = trial.array([1.0, 1.0, np.inf], dtype)
    trial.expect_flag("the flag of long and many leaves, all finite,", check([trial.array(long, dtype), *few]), True)
    trial.expect_flag(
        f"the flag with inf in the last of {_MANY}", check([trial.array(long, dtype), *few[1:], last]), False
    )
    for position in (long.size // 2, long.size - 1):
        spoiled = long.copy()
        spoiled.reshape(-1)[position] = np.nan
        what = f"the flag of a {dtype} leaf of shape {_LONG} with nan at position {position}"
        trial.expect_flag(what, check([trial.array(spoiled, dtype), *few]), False)


def an_empty_structure_is_finite(trial: Trial) -> None:
    """all_finite of an empty structure, of None and of empty and integer leaves is True: a bool of shape ()."""
    dtype = trial.adapter.dtypes[0]
    nothing: dict[str, Any] = {
        "no leaves": [],
        "an empty dict": {},
        "None": None,
        "a None leaf": [None, {"w": None}],
        "an empty leaf": [trial.array(np.zeros(0), dtype)],
        "integer leaves": [trial.array([3, -7], "int32"), trial.array(np.int32(2**31 - 1), "int32")],
    }
    for what, grads in nothing.items():
        trial.expect_flag(f"the flag of {what}", trial.run(trial.adapter.verbs.all_finite)(grads), True)


def nothing_hides_an_overflow(trial: Trial) -> None:
    """all_finite finds an overflow at each depth of nesting, and next to None, empty, integer and other leaves."""
    dtypes = trial.adapter.dtypes
    good, bad = ([trial.array([1.0, end], dtype) for dtype in dtypes] for end in (1.0, -np.inf))
    number, empty = trial.array([1, 2], "int32"), trial.array(np.zeros(0), dtypes[0])
    hidden = {
        "no container": bad[0],
        "nested containers": {"a": {"b": [bad[0]]}},
        "a tuple with None": (None, bad[0], None),
        "a dict with an integer and an empty leaf": {"z": empty, "y": bad[0], "x": number},
        **{f"a {name} leaf after all dtypes": [*good, leaf] for name, leaf in zip(dtypes, bad, strict=True)},
    }
    for what, grads in hidden.items():
        trial.expect_flag(f"the flag with -inf in {what}", trial.run(trial.adapter.verbs.all_finite)(grads), False)


def _clean_leaves(dtype: str) -> Iterator[Any]:
    """Yield finite arrays: small ones, and the largest numbers of a dtype: their squares and sums overflow."""
    part = {"complex64": "float32", "complex128": "float64"}.get(dtype)
    largest = LARGEST_NUMBER[part or dtype]
    for shape in _SHAPES:
        for size in (1.0, largest):
            yield np.asarray(np.resize([size, size, -size], shape) * (1.0 + 0.0j if part else 1.0))


def _spoiled(clean: Any) -> Iterator[tuple[int, Any, Any]]:
    """Yield `clean` with each bad value at the last position, and with one of them at each or at every fifth position.

    Five has no factor in common with the width of a vector, so that each lane is tried.
    """
    bad = (*_BAD, *(complex(1.0, part) for part in _BAD)) if clean.dtype.kind == "c" else _BAD
    last = clean.size - 1
    for position in (*range(0, last, 1 if last < 16 else 5), last):
        for value in bad if position == last else [bad[position % len(bad)]]:
            spoiled = clean.copy()
            spoiled.reshape(-1)[position] = value
            yield position, value, spoiled
