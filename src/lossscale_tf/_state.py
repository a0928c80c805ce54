"""The state of a policy in TensorFlow, as tensors and as variables for checkpoints; variables for a guard's state."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from lossscale_core import ScaleState, as_policy


def init_state(policy: Any, *, device: str | None = None) -> ScaleState:
    """Make the state before the first step. Does not synchronise with the host.

    Args:
        policy: Anything that `as_policy` accepts.
        device: The name of the device to place the state on; TensorFlow's own choice if left out.

    Returns:
        The policy's NamedTuple of tensors of shape `()`, in float32 and int32.

    Raises:
        PolicyError: `policy` is not a policy.

    """
    start = as_policy(policy).init_state()
    with tf.device(device):
        return start._make(map(tf.constant, start))


class StateVariables(tf.Module):
    """The state of a policy or a spike guard in variables of shape `()`, one for each field and with its name."""

    _of_tensorflow: list[tf.Variable]

    def __init__(self, policy: Any, make_variable: Callable[[str, Any], tf.Variable]) -> None:
        super().__init__(name="loss_scale_state")
        start = policy.init_state()
        self._make = start._make
        self._names = start._fields
        self._on_host = [type(value) for value in start]
        for name, value in start._asdict().items():
            setattr(self, name, make_variable(name, value))
        # TensorFlow's variables take half the time of Keras's wrappers around them. The list is set without automatic
        # tracking, which would save it, too.
        variables = [each.value if isinstance(each, keras.Variable) else each for each in self.all]
        object.__setattr__(self, "_of_tensorflow", variables)

    @property
    def all(self) -> list[Any]:
        """Every variable, in the order of the fields."""
        return [getattr(self, name) for name in self._names]

    def read(self) -> Any:
        """Return the state as tensors."""
        return self._make([tf.convert_to_tensor(variable) for variable in self._of_tensorflow])

    def read_on_host(self) -> Any:
        """Return the state as host scalars; eagerly only. Synchronises with the host."""
        values = [each.value().numpy() for each in self._of_tensorflow]
        return self._make([kind(value) for kind, value in zip(self._on_host, values, strict=True)])

    def assign(self, state: Any) -> list[Any]:
        """Set every variable to its field of `state`."""
        return [variable.assign(value) for variable, value in zip(self._of_tensorflow, state, strict=True)]

    def assign_changed(self, before: Any, after: Any) -> None:
        """Set the variables of the fields that differ between two host states."""
        # An eager assignment takes longer than the whole update on the host, and most steps change two fields only.
        for variable, old, new in zip(self._of_tensorflow, before, after, strict=True):
            if new != old:
                variable.assign(new)
