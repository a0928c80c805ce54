"""Wrappers in configs and in Keras's files.

Supported configs are those of this wrapper, of Keras 3's wrapper, and of `tf.keras.mixed_precision`'s two wrappers.
"""

import copy
from typing import Any

from lossscale_core import SpikeGuard, as_policy, policy_from_dict
from lossscale_tf._documented import DynamicLossScale, FixedLossScale
from lossscale_tf.keras._inner import deserialized


def arguments_of(config: dict[str, Any], custom_objects: Any) -> dict[str, Any]:
    """Return the constructor's arguments from a config, which is not changed."""
    config = copy.deepcopy(config)
    config.pop("learning_rate", None)  # the wrapper has no learning rate
    inner = config.pop("inner_optimizer", None) or config.pop("optimizer")
    config["inner_optimizer"] = deserialized(inner, custom_objects) if isinstance(inner, dict) else inner
    loss_scale = config.pop("loss_scale", None)
    if isinstance(loss_scale, dict) and "class_name" in loss_scale:  # of the experimental API
        policy_type = FixedLossScale if loss_scale["class_name"] == "FixedLossScale" else DynamicLossScale
        loss_scale = policy_type(**loss_scale["config"])
    if config.get("policy") is not None:
        config["policy"] = policy_from_dict(config["policy"])
    elif loss_scale is not None:
        config["policy"] = as_policy(loss_scale)
    if isinstance(config.get("guard"), dict):
        config["guard"] = SpikeGuard(**config["guard"])
    return config
