"""The versions of Python and of other packages that this version of lossscale was tried with."""

import re

TRIED = {
    "python": ("3.11", "3.14"),
    "numpy": ("2.0", "2.5"),
    "torch": ("2.6", "2.15"),
    "jax": ("0.7.2", "0.12"),
    "optax": ("0.2.6", "0.2.8"),
    "flax": ("0.11.2", "0.12.12"),
    "tensorflow": ("2.18", "2.21"),
    "keras": ("3.9", "3.15"),
    "mlx": ("0.30", "0.32"),
}
"""The oldest and the newest release of each that a test session was run with; `docs/works-with.md` lists them."""


def untried(package: str, version: str) -> str | None:
    """Return a sentence about an installed version that is older or newer than those tried, or None.

    A release that is tried includes its patches and pre-releases: 2.15 includes 2.15.1 and 2.15.0a0.
    """
    if package not in TRIED:
        return None
    oldest, newest = TRIED[package]
    if _numbers(version) < _numbers(oldest):
        return f"older than {oldest}, the oldest version that was tried; update {package}"
    if _numbers(version)[: len(_numbers(newest))] > _numbers(newest):
        return f"newer than {newest}, the newest version that was tried; if something fails, try {package} {newest}"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version: (2, 12, 0) of 2.12.0a0+cu130."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()
