"""The state of a policy in tensors, at its start."""

from typing import Any

import tensorflow as tf

from lossscale_core import BaseScaling, ScaleState, ScalingPolicy, as_policy
from lossscale_core.adapters import format_number, warn_caller
from lossscale_core.errors import CheckpointWarning


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


def warn_if_resumed(policy: ScalingPolicy, state: Any, iterations: Any) -> None:
    """Warn if the wrapped optimizer continues and the scale starts over; `iterations` are its steps."""
    steps_before = int(tf.convert_to_tensor(iterations))
    if steps_before > 0 and int(state.steps) == 0 and BaseScaling.of(policy).scales_losses:
        warn_caller(
            f"the wrapped optimizer has taken {steps_before} steps before, but the loss scale starts over at "
            f"{format_number(float(state.loss_scale))}; to continue from a checkpoint, keep this optimizer in it, or "
            "its state_dict() for load_state_dict()",
            CheckpointWarning,
        )
