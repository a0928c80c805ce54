"""Types of arguments and results that several modules share."""

from typing import Any, Protocol, TypeAlias, TypeVar

PyTree: TypeAlias = Any
"""Nested containers of arrays; JAX has no static type for them."""

Tree = TypeVar("Tree")
"""A pytree that is returned with the same structure."""


class HasLossScale(Protocol):
    """The part of a policy's state that scaling and unscaling need."""

    @property
    def loss_scale(self) -> Any:
        """float32, shape `()`."""
