"""The names under which `jax.export` writes the state types, so that a serialized step can take and return states."""

import contextlib
from typing import Any

from jax.export import register_namedtuple_serialization

from lossscale_core import BaseScaling, GuardState
from lossscale_jax._accumulation import Window
from lossscale_jax._autodiff import ScaledGradients
from lossscale_jax._state import GuardedLossScaledState, LossScaledState


def register_state_types() -> None:
    """Register every state type once; a registration by the user is kept."""
    policies = [each for each in BaseScaling.__subclasses__() if each.__module__ == BaseScaling.__module__]
    of_the_core: set[Any] = {GuardState, *(policy.state_type for policy in policies)}
    for kind in (*of_the_core, LossScaledState, GuardedLossScaledState, Window, ScaledGradients):
        with contextlib.suppress(ValueError):  # JAX refuses a second registration, and the module may be imported twice
            register_namedtuple_serialization(kind, serialized_name=f"lossscale.{kind.__name__}")
