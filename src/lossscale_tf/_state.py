"""A policy's state in TensorFlow: as tensors, and as variables that a checkpoint keeps."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lossscale_core import ScaleState, as_policy


def init_state(policy: Any, *, device: str | None = None) -> ScaleState:
    """Make the state before the first step. Does not synchronise with the host.

    Args:
        policy: A policy, or anything else that `as_policy` takes.
        device: The name of the device to place the state on; TensorFlow's own choice if left out.

    Returns:
        The policy's NamedTuple of tensors of shape `()`, in float32 and int32.

    Raises:
        PolicyError: `policy` does not describe a policy.

    """
    start = as_policy(policy).init_state()
    with tf.device(device):
        state: ScaleState = start._make(map(tf.constant, start))
    return state


class StateVariables(tf.Module):
    """A policy's state in variables of shape `()`, one for each field and named as it is."""

    def __init__(self, policy: Any, make_variable: Callable[[str, Any], tf.Variable]) -> None:
        super().__init__(name="loss_scale_state")
        start = policy.init_state()
        self._make = start._make
        self._names = start._fields
        self._on_host = [type(value) for value in start]
        for name, value in start._asdict().items():
            setattr(self, name, make_variable(name, value))

    @property
    def all(self) -> list[tf.Variable]:
        """Every variable, in the order of the fields."""
        return [getattr(self, name) for name in self._names]

    def read(self) -> ScaleState:
        """Return the state as tensors."""
        state: ScaleState = self._make(tf.convert_to_tensor(variable) for variable in self.all)
        return state

    def read_on_host(self) -> ScaleState:
        """Return the state as host scalars; eagerly only. Synchronises with the host."""
        values = (kind(variable.numpy()) for kind, variable in zip(self._on_host, self.all, strict=True))
        state: ScaleState = self._make(values)
        return state

    def assign(self, state: ScaleState) -> list[Any]:
        """Set every variable to its field of `state`."""
        return [variable.assign(value) for variable, value in zip(self.all, state, strict=True)]

    def assign_changed(self, before: ScaleState, after: ScaleState) -> None:
        """Set the variables whose field differs between two host states."""
        for variable, old, new in zip(self.all, before, after, strict=True):
            if new != old:
                variable.assign(new)
