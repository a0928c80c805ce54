"""Wrappers in configs, in Keras's files, and in `tf.train.Checkpoint`.

Supported configs are those of this wrapper, of Keras 3's wrapper, and of `tf.keras.mixed_precision`'s two wrappers.
Around an optimizer of tf_keras, a checkpoint has the layout of the unwrapped optimizer, and the loss scale in addition.
`tf.keras.mixed_precision.LossScaleOptimizer` has this layout, too, so that each can restore the others' checkpoints:
https://github.com/keras-team/tf-keras/blob/v2.21.0/tf_keras/mixed_precision/loss_scale_optimizer.py#L1444
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from lossscale_core import (
    BaseScaling,
    SpikeGuard,
    as_policy,
    init_nonfinite_state,
    policy_from_dict,
    policy_to_dict,
)
from lossscale_core.errors import CheckpointWarning
from lossscale_tf._documented import policy_of_loss_scale
from lossscale_tf._step import Step
from lossscale_tf._versions import stored_names
from lossscale_tf._warning import warn_caller
from lossscale_tf._wrapper import share_deferred_restorations
from lossscale_tf.keras._inner import deserialized, is_keras_3

_VALUE = "VARIABLE_VALUE"
"""The name under which TensorFlow saves a variable's value."""
_ONLY_IN_NESTED = "_used_scale/.ATTRIBUTES/VARIABLE_VALUE"


class SavedLikeInner:
    """The layout of a wrapper in a checkpoint: the children of `inner`, under their names, and the loss scale.

    The scale is saved twice: the whole state under `_scale_state`, and, if the policy grows, in the format of
    tf_keras's wrapper under `loss_scale`; restoring the latter calls `Step.restored`. A spike guard's state is under
    `_guard_state`, and the counters of updates and losses that are not finite are under `_nonfinite_state`. An older
    layout, with the wrapper's own children next to `inner_optimizer`, is restored, too.
    """

    def __init__(self, inner: Any, step: Step, grows: bool) -> None:
        self._inner = inner
        self._own = {"_scale_state": step.state}
        if step.guard is not None:
            self._own["_guard_state"] = step.guard.state
        if step.nonfinite is not None and step.nonfinite.counters is not None:
            self._own["_nonfinite_state"] = step.nonfinite.counters
        if grows:
            self._own["loss_scale"] = _LossScale(step.state.loss_scale, step.state.growth_tracker, step.restored)
        self._is_nested = False

    @classmethod
    def of(cls, wrapper: Any, inner: Any, step: Step) -> "SavedLikeInner | None":
        """Return the layout of a wrapper around a tf_keras optimizer; None for an optimizer of Keras 3."""
        if is_keras_3(inner):
            return None
        share_deferred_restorations(wrapper, inner)
        return cls(inner, step, grows="growth_interval" in BaseScaling.of(step.policy).settings())

    def children(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the objects to save by their names."""
        return {**self._inner._trackable_children(*args, **kwargs), **self._own}

    def read_layout(self, path: str) -> None:
        """Detect the layout of the checkpoint to be restored."""
        self._is_nested = any(name.endswith(_ONLY_IN_NESTED) for name, _ in tf.train.list_variables(path))

    def lookup(self, name: str, nested: Callable[[], Any]) -> Any:
        """Return the object to restore `name` into, or None; `nested` returns the object of the older layout."""
        if self._is_nested:
            return nested()
        return self._own.get(name) or self._inner._lookup_dependency(name)


def config_of(name: str, inner: Any, step: Step, is_compiled: bool) -> dict[str, Any]:
    """Return the config for `arguments_of`, without the running state."""
    on_floor, nonfinite = step.watch.on_floor, step.nonfinite
    update, loss = ("ignore", "back_off") if nonfinite is None else (nonfinite.on_update, nonfinite.on_loss)
    return {
        "name": name,
        "inner_optimizer": keras.saving.serialize_keras_object(inner),
        "policy": policy_to_dict(step.policy),
        "global_clipnorm": step.max_norm,
        "jit_compile": is_compiled,
        # Left out if they have their defaults: versions without these arguments refuse them with any value.
        **({} if step.guard is None else {"guard": dataclasses.asdict(step.guard.guard)}),
        **({} if on_floor == "warn" else {"on_floor": on_floor}),
        **({} if update == "ignore" else {"on_nonfinite_update": update}),
        **({} if loss == "back_off" else {"on_nonfinite_loss": loss}),
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

    The last variables are the guard's and the counters of what is not finite, which start over if they are not stored.
    """
    shapes = [tuple(variable.shape) for variable in optimizer.variables]
    guard = () if optimizer.guard is None else tuple(optimizer.guard.init_state())
    counts = () if optimizer.nonfinite_state is None else tuple(init_nonfinite_state())
    first = len(shapes) - len(guard) - len(counts)
    names = stored_names(store)
    stored_last = len(names) - first if names == set(map(str, range(len(names)))) else None
    starts_guard = bool(guard) and stored_last in (0, len(counts))
    starts_counts = bool(counts) and stored_last in (0, len(guard))
    if starts_guard or starts_counts:
        values = [store[str(n)] for n in range(first, len(names))]
        last = [*(guard if starts_guard else values[: len(guard)])]
        last += counts if starts_counts else values[len(values) - len(counts) :]
        store = {str(n): store[str(n)] for n in range(first)} | {str(n): each for n, each in enumerate(last, first)}
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
    if starts_guard:
        warn_caller(
            "the saved optimizer has no state of a spike guard, so that the guard starts over with its warm-up",
            CheckpointWarning,
        )
    return store


class _LossScale(tf.__internal__.tracking.AutoTrackable):
    """The loss scale in the format of tf_keras."""

    def __init__(self, loss_scale: Any, growth_tracker: Any, on_restored: Callable[[], None]) -> None:
        self.current_loss_scale = loss_scale
        # tf_keras counts in int64, and TensorFlow restores no value into a variable of another dtype.
        self.good_steps = _Int64View(growth_tracker, on_restored)


class _Int64View(tf.__internal__.tracking.AutoTrackable):
    """A variable that is saved and restored as an int64."""

    def __init__(self, variable: Any, on_restored: Callable[[], None]) -> None:
        self._self_variable = variable
        self._self_on_restored = on_restored

    def _trackable_children(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}  # the variable itself is saved elsewhere

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return {_VALUE: tf.cast(tf.convert_to_tensor(self._self_variable), tf.int64)}

    def _restore_from_tensors(self, restored: dict[str, Any]) -> Any:
        self._self_on_restored()
        return self._self_variable.assign(tf.cast(restored[_VALUE], self._self_variable.dtype))
