"""Warnings that point at the user's code, also when they are issued deep within TensorFlow."""

from typing import Any

import tensorflow as tf

from lossscale_core import BaseScaling, ScalingPolicy, adapters
from lossscale_core.adapters import shown_number
from lossscale_core.errors import CheckpointWarning


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the first caller outside of this package, Keras and TensorFlow.

    The number of frames in between varies: AutoGraph wraps public methods, and a replica's step runs in a callback.
    """
    adapters.warn_caller(message, category, packages=("lossscale_tf", "lossscale_keras", "keras", "tensorflow"))


def warn_if_resumed(policy: ScalingPolicy, state: Any, iterations: Any) -> None:
    """Warn if the wrapped optimizer continues and the scale starts over; `iterations` are its steps."""
    steps_before = int(tf.convert_to_tensor(iterations))
    if steps_before > 0 and int(state.steps) == 0 and BaseScaling.of(policy).scales_losses:
        warn_caller(
            f"the wrapped optimizer has taken {steps_before} steps before, but the loss scale starts over at "
            f"{shown_number(float(state.loss_scale))}; to continue from a checkpoint, keep this optimizer in it, or "
            "its state_dict() for load_state_dict()",
            CheckpointWarning,
        )
