"""Types of arguments and results that several modules share."""

import os
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias, TypeVar

from lossscale_core import ScalingPolicy

Tree = TypeVar("Tree")
"""A tensor, a number, or a nested structure of them, which comes back with the structure that it had."""

PolicyLike: TypeAlias = ScalingPolicy | str | os.PathLike[str] | float | Mapping[str, Any]
"""What `lossscale_core.as_policy` accepts."""


class HasLossScale(Protocol):
    """The state of any policy, as far as scaling and unscaling need it."""

    @property
    def loss_scale(self) -> Any:
        """float32, shape `()`."""
