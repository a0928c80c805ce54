"""Wrappers in configs and in Keras's files.

Supported configs are those of this wrapper, of Keras 3's wrapper, and of `tf.keras.mixed_precision`'s two wrappers.
"""

import copy
from typing import Any

import numpy as np

from lossscale_core import (
    GuardState,
    SpikeGuard,
    as_policy,
    policy_from_dict,
)
from lossscale_tf._documented import policy_of_loss_scale
from lossscale_tf._versions import stored_names
from lossscale_tf.keras._inner import deserialized


def arguments_of(config: dict[str, Any], custom_objects: Any) -> dict[str, Any]:
    """Return the constructor's arguments from a config, which is not changed."""
    config = copy.deepcopy(config)
    config.pop("learning_rate", None)  # the wrapper has no learning rate
    config.pop("jit_compile", None)  # a setting of 0.1.0.dev0
    inner = config.pop("inner_optimizer", None) or config.pop("optimizer")
    config["inner_optimizer"] = deserialized(inner, custom_objects) if isinstance(inner, dict) else inner
    loss_scale = config.pop("loss_scale", None)
    if isinstance(loss_scale, dict) and "class_name" in loss_scale:  # of the experimental API
        loss_scale = policy_of_loss_scale(loss_scale)
    if config.get("policy") is not None:
        config["policy"] = policy_from_dict(config["policy"])
    elif loss_scale is not None:
        config["policy"] = as_policy(loss_scale)
    if isinstance(config.get("guard"), dict):
        config["guard"] = SpikeGuard(**config["guard"])
    return config


def named(optimizer: Any, store: Any) -> Any:
    """Return the stored numbers of a wrapper's states under their names.

    Files of 0.1.0.dev0 number them: the step count and the rate of Keras, then the states of the policy, of the inner
    optimizer, and of the guard.
    """
    state, guard = optimizer.scale_state._fields, [f"guard_{each}" for each in GuardState._fields]
    inner = [tuple(each.shape) for each in optimizer.inner_optimizer.variables]
    shapes = [()] * (2 + len(state)) + inner + [()] * len(guard)
    stored = [tuple(store[str(n)].shape) for n in range(len(stored_names(store)))] if "0" in stored_names(store) else []
    if stored not in (shapes, shapes[: -len(guard)]):  # perhaps Keras's own wrapper's
        return store
    names = {**dict(enumerate(state, 2)), **dict(enumerate(guard, len(shapes) - len(guard)))}
    return {"version": np.asarray(1), **{name: store[str(n)] for n, name in names.items() if n < len(stored)}}
