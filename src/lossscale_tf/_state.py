"""The state of a policy in tensors."""

from typing import Any

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
