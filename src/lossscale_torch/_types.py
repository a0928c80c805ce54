"""Types of arguments and results that several modules share."""

from typing import Any, Protocol, TypeVar

Tree = TypeVar("Tree")
"""A tensor, a number, or a nested structure of them, which is returned with the same structure."""


class HasLossScale(Protocol):
    """The part of a policy's state that scaling and unscaling need."""

    @property
    def loss_scale(self) -> Any:
        """float32, shape `()`."""
