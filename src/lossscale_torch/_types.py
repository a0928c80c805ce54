"""Types of arguments and results that several modules share."""

from typing import Any, Protocol, TypeVar

Tree = TypeVar("Tree")
"""A tensor, a number, or a nested structure of them, which comes back with the structure that it had."""


class HasLossScale(Protocol):
    """The state of any policy, as far as scaling and unscaling need it."""

    @property
    def loss_scale(self) -> Any:
        """float32, shape `()`."""
