"""Replacements for what older versions of JAX lack, each with the version that made it unnecessary.

pyproject.toml declares the oldest version that works. When it reaches the version of a replacement, remove that.
"""

from typing import Any

from jax import lax


def vary(leaf: Any, axes: tuple[str, ...]) -> Any:
    """Return an array marked as varying over mesh axes."""
    if hasattr(lax, "pcast"):
        return lax.pcast(leaf, axes, to="varying")
    return lax.pvary(leaf, axes)  # type: ignore[attr-defined]  # before 0.8.2


def varying_axes(aval: Any) -> frozenset[str]:
    """Return the mesh axes over which an abstract value is marked as varying."""
    manual = getattr(aval, "manual_axis_type", None)
    if manual is not None:
        return frozenset(manual.varying)
    return frozenset(getattr(aval, "vma", None) or ())  # before 0.10
