"""Replacements for what older versions of Keras lack, each with the version that made it unnecessary.

pyproject.toml declares the oldest version that works. When it reaches the version of a replacement, remove that.
"""

from typing import Any


def stored_names(store: Any) -> set[str]:
    """Return the names in a mapping of Keras's savers, which lacks `in` before 3.10 and cannot be iterated."""
    return set(store.keys())
