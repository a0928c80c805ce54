"""JAX's debugging flags, under which an eager operation raises if its result holds NaN or infinity."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

P = ParamSpec("P")
T = TypeVar("T")


def is_checked() -> bool:
    """Return whether the results of eager operations are searched for NaN or infinity, each on the host."""
    flags: Any = jax.config  # JAX adds the attributes at run time
    return bool(flags.jax_debug_nans or flags.jax_debug_infs)


def unchecked(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap `function` so that the flags do not raise within it, since it handles NaN and infinity itself."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if not is_checked():
            return function(*args, **kwargs)
        with jax.debug_nans(False), jax.debug_infs(False):
            return function(*args, **kwargs)

    return run
