"""Types of arguments and results that several modules share."""

from typing import Any, Protocol, TypeAlias, TypeVar

PyTree: TypeAlias = Any
"""Nested containers of arrays; JAX has no static type for them."""

Tree = TypeVar("Tree")
"""A pytree that comes back with the structure that it had."""


class HasLossScale(Protocol):
    """The state of any policy, as far as scaling and unscaling need it."""

    @property
    def loss_scale(self) -> Any:
        """float32, shape `()`."""
