"""Calls to an inner optimizer by the interface of its generation: Keras 3, tf_keras, or legacy in tf_keras."""

import copy
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from lossscale_core import SpikeGuard, as_policy, policy_from_dict
from lossscale_core.adapters import describe
from lossscale_keras.tensorflow import is_distributed
from lossscale_tf._policies import DynamicLossScale, FixedLossScale
from lossscale_tf._wrappers import scales_already


def require_tensorflow() -> None:
    """Raise `RuntimeError` if Keras runs on another backend, where its trainer could not trace this package's steps."""
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise RuntimeError(
            f"Keras runs on {backend}, and lossscale_tf trains on TensorFlow; set KERAS_BACKEND=tensorflow, or use "
            "lossscale_keras.LossScaleOptimizer, which trains on JAX, PyTorch and TensorFlow"
        )


def require_no_session() -> None:
    """Raise `RuntimeError` in a graph for sessions: Keras's optimizers return no operation that a session could run."""
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise RuntimeError(
            "in a tf.Graph a Keras optimizer returns no operation that a session could run, and trains nothing; use "
            "lossscale_tf.v1.LossScaleOptimizer around an optimizer of tf.compat.v1.train, or a tf.function"
        )


def require_optimizer(inner: Any) -> None:
    """Raise `TypeError` unless `inner` is a Keras optimizer that does not scale the loss already."""
    if scales_already(inner):
        raise TypeError(
            "LossScaleOptimizer cannot wrap another LossScaleOptimizer; "
            f"{type(inner).__name__} scales the loss already; wrap the optimizer once"
        )
    if isinstance(inner, tf.compat.v1.train.Optimizer):
        raise TypeError(
            f"inner_optimizer={describe(inner)} is of tf.compat.v1; wrap it by lossscale_tf.v1.LossScaleOptimizer"
        )
    if isinstance(inner, type) or not hasattr(inner, "apply_gradients"):
        raise TypeError(
            f"inner_optimizer={describe(inner)} is not a Keras optimizer; pass one, such as keras.optimizers.Adam()"
        )


def arguments_of(config: dict[str, Any], custom_objects: Any) -> dict[str, Any]:
    """Return the constructor's arguments from a config, and leave the config unchanged.

    The config may come from this wrapper, from Keras 3's wrapper, or from a wrapper of `tf.keras.mixed_precision`.
    """
    config = copy.deepcopy(config)
    config.pop("learning_rate", None)  # the wrapper has no learning rate
    inner = config.pop("inner_optimizer", None) or config.pop("optimizer")
    config["inner_optimizer"] = _deserialize(inner, custom_objects) if isinstance(inner, dict) else inner
    loss_scale = config.pop("loss_scale", None)
    if isinstance(loss_scale, dict) and "class_name" in loss_scale:  # a config of the experimental API
        policy_type = FixedLossScale if loss_scale["class_name"] == "FixedLossScale" else DynamicLossScale
        loss_scale = policy_type(**loss_scale["config"])
    if config.get("policy") is not None:
        config["policy"] = policy_from_dict(config["policy"])
    elif loss_scale is not None:
        config["policy"] = as_policy(loss_scale)
    if isinstance(config.get("guard"), dict):
        config["guard"] = SpikeGuard(**config["guard"])
    return config


def _deserialize(config: dict[str, Any], custom_objects: Any) -> Any:
    """Make the optimizer of a config, which comes from Keras 3 or from tf_keras."""
    if _is_of_tf_keras(config):  # Keras 3 has optimizers of the same names
        import tf_keras

        return tf_keras.optimizers.deserialize(config, custom_objects)
    optimizer = keras.optimizers.deserialize(config, custom_objects)
    # Keras returns a string for a class that its table lacks, such as Lamb:
    # https://github.com/keras-team/keras/blob/v3.15.1/keras/src/optimizers/__init__.py
    return keras.saving.deserialize_keras_object(config, custom_objects) if isinstance(optimizer, str) else optimizer


def _is_of_tf_keras(config: dict[str, Any]) -> bool:
    """Return whether a config comes from tf_keras, which may also write `keras` as its module."""
    module, settings = str(config.get("module")), config.get("config", {})
    if module.startswith("tf_keras.") or module == "keras.optimizers.legacy":
        return True
    # Older configs have no module. Only optimizers of tf_keras have ever had `decay`.
    return "is_legacy_optimizer" in settings or ("decay" in settings and "module" not in config)


def as_tensorflow(variables: Any) -> list[Any]:
    """Return variables of TensorFlow: the value of each Keras 3 variable, and other variables unchanged."""
    return [v.value if isinstance(v, keras.Variable) else v for v in variables]


def build(inner: Any, variables: Any) -> None:
    """Create the variables of the inner optimizer."""
    if isinstance(inner, keras.optimizers.Optimizer):
        inner.build(variables)
    elif hasattr(inner, "build"):
        inner.build(as_tensorflow(variables))
    else:
        inner._create_all_weights(as_tensorflow(variables))


def apply_summed(inner: Any, grads: list[Any], variables: list[Any]) -> None:
    """Let an optimizer of tf_keras apply gradients that are already summed over the replicas."""
    summed = {"skip_gradients_aggregation": True}
    if hasattr(inner, "_create_slots"):  # a legacy optimizer has another argument, which parameter servers reject
        sums = is_distributed() or own_aggregator(inner) is not None
        summed = {"experimental_aggregate_gradients": False} if sums else {}
    inner.apply_gradients(zip(grads, as_tensorflow(variables), strict=True), **summed)


def set_iterations(inner: Any, value: Any) -> None:
    """Set the count of applied steps."""
    # Keras 3's variable counts micro-batches; reading `iterations` divides by their number per step:
    # https://github.com/keras-team/keras/blob/v3.15.1/keras/src/optimizers/base_optimizer.py
    counter = inner._iterations if isinstance(inner, keras.optimizers.Optimizer) else inner.iterations
    counter.assign(value * (getattr(inner, "gradient_accumulation_steps", None) or 1))


def own_aggregator(inner: Any) -> Callable[[list[Any], list[Any]], list[Any]] | None:
    """Return a function that sums gradients by the user's `gradient_aggregator` of a legacy optimizer, or None."""
    aggregator = getattr(inner, "gradient_aggregator", None)
    if aggregator is None or getattr(aggregator, "__name__", "") == "all_reduce_sum_gradients":  # the default
        return None
    return lambda grads, variables: [
        grad for grad, _ in aggregator(list(zip(grads, as_tensorflow(variables), strict=True)))
    ]
