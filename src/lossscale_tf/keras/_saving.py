"""Wrappers in configs and in Keras's files.

Supported configs are those of this wrapper, of Keras 3's wrapper, and of `tf.keras.mixed_precision`'s two wrappers.
"""

import copy
import dataclasses
from typing import Any

import keras

from lossscale_core import (
    SpikeGuard,
    as_policy,
    policy_from_dict,
    policy_to_dict,
)
from lossscale_core.errors import CheckpointWarning
from lossscale_tf._documented import policy_of_loss_scale
from lossscale_tf._step import Step
from lossscale_tf._versions import stored_names
from lossscale_tf._warning import warn_caller
from lossscale_tf.keras._inner import deserialized


def config_of(name: str, inner: Any, step: Step) -> dict[str, Any]:
    """Return the config for `arguments_of`, without the running state."""
    return {
        "name": name,
        "inner_optimizer": keras.saving.serialize_keras_object(inner),
        "policy": policy_to_dict(step.policy),
        "global_clipnorm": step.max_norm,
        **({} if step.guard is None else {"guard": dataclasses.asdict(step.guard.guard)}),
    }


def arguments_of(config: dict[str, Any], custom_objects: Any) -> dict[str, Any]:
    """Return the constructor's arguments from a config, which is not changed."""
    config = copy.deepcopy(config)
    config.pop("learning_rate", None)  # the wrapper has no learning rate
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


def matching(optimizer: Any, store: Any) -> Any:
    """Return the stored values for a wrapper's variables; None if they are another optimizer's.

    The last variables are the guard's, which starts over if they are not stored.
    """
    shapes = [tuple(variable.shape) for variable in optimizer.variables]
    guard = () if optimizer.guard is None else tuple(optimizer.guard.init_state())
    first = len(shapes) - len(guard)
    names = stored_names(store)
    if guard and names == set(map(str, range(first))):
        warn_caller(
            "the saved optimizer has no state of a spike guard, so that the guard starts over with its warm-up",
            CheckpointWarning,
        )
        store = {name: store[name] for name in names} | {str(n): each for n, each in enumerate(guard, first)}
        names = set(store)
    stored = [tuple(store[str(n)].shape) for n in range(len(shapes)) if str(n) in names]
    # Keras compares only the number of variables, and raises at the first different shape, after setting those before:
    # https://github.com/keras-team/keras/blob/v3.15.1/keras/src/optimizers/base_optimizer.py
    if len(names) == len(shapes) and stored != shapes:
        warn_caller(
            f"the saved optimizer's variables have other shapes than those of '{optimizer.name}', so none is loaded; "
            "it is another optimizer's, and this one starts over"
        )
        return None
    return store
