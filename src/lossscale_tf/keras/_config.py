"""The constructor's arguments, and configs: ours, Keras 3's, and those of `tf.keras.mixed_precision`'s two wrappers."""

import copy
import dataclasses
from typing import Any

import keras

from lossscale_core import ScalingPolicy, SpikeGuard, as_policy, policy_from_dict, policy_to_dict
from lossscale_tf._documented import (
    documented_policy,
    policy_of_loss_scale,
    require_no_base_arguments,
    require_policy_or_number,
)
from lossscale_tf._step import Step
from lossscale_tf._wrapper import require_clipnorm, require_guard
from lossscale_tf.keras._inner import deserialized, require_optimizer, require_tensorflow


def require_arguments(
    inner: Any, global_clipnorm: float | None, guard: SpikeGuard | None, base_arguments: dict[str, Any]
) -> None:
    """Raise the error that says which of the constructor's arguments cannot be."""
    require_tensorflow()
    require_optimizer(inner)
    require_no_base_arguments(base_arguments)
    require_clipnorm(global_clipnorm)
    of_inner = getattr(inner, "global_clipnorm", None)
    if global_clipnorm is not None and of_inner is not None:
        raise ValueError(
            f"global_clipnorm={global_clipnorm!r}, and the inner optimizer's is {of_inner!r}, so that gradients would "
            "be clipped twice; set one of the two"
        )
    require_guard(guard)


def policy_of_arguments(
    policy: Any, loss_scale: Any, dynamic: bool | None, initial_scale: float | None, growth_steps: int | None
) -> ScalingPolicy:
    """Return the policy that the constructor's arguments stand for, which is either `policy` or all the others."""
    require_policy_or_number(loss_scale if policy is None else policy)
    if policy is None:
        return documented_policy(loss_scale, dynamic, initial_scale, growth_steps)
    if (loss_scale, initial_scale, growth_steps, dynamic) != ("dynamic", None, None, None):
        raise ValueError(
            "policy= was given beside other settings of the loss scale; pass either policy= or the settings, not both"
        )
    return as_policy(policy)


def config_of(name: str, inner: Any, step: Step, is_compiled: bool) -> dict[str, Any]:
    """Return what `arguments_of` needs, without the running state."""
    on_floor = step.watch.on_floor
    return {
        "name": name,
        "inner_optimizer": keras.saving.serialize_keras_object(inner),
        "policy": policy_to_dict(step.policy),
        "global_clipnorm": step.max_norm,
        "jit_compile": is_compiled,
        # Left out where they have their defaults: versions without these arguments refuse them, whatever the value.
        **({} if step.guard is None else {"guard": dataclasses.asdict(step.guard.guard)}),
        **({} if on_floor == "warn" else {"on_floor": on_floor}),
    }


def arguments_of(config: dict[str, Any], custom_objects: Any) -> dict[str, Any]:
    """Return the constructor's arguments of a config, which is left as it is."""
    config = copy.deepcopy(config)
    config.pop("learning_rate", None)  # of the wrapper, which has none
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
