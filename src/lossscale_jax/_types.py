"""Types of arguments and results that several modules share."""

import os
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias, TypeVar

from lossscale_core import ScalingPolicy

PyTree: TypeAlias = Any
"""Nested containers of arrays; JAX has no static type for them."""

Tree = TypeVar("Tree")
"""A pytree that comes back with the structure that it had."""

PolicyLike: TypeAlias = ScalingPolicy | str | os.PathLike[str] | float | Mapping[str, Any]
"""What `lossscale_core.as_policy` accepts."""


class HasLossScale(Protocol):
    """The state of any policy, as far as scaling and unscaling need it."""

    @property
    def loss_scale(self) -> Any:
        """float32, shape `()`."""
