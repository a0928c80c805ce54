"""A wrapper in configs, in Keras's files, and in `tf.train.Checkpoint`.

Around an optimizer of tf_keras, a checkpoint has the bare optimizer's own layout, and the loss scale beside it.
`tf.keras.mixed_precision.LossScaleOptimizer` has this layout, too, so that each restores what the others saved:
https://github.com/keras-team/tf-keras/blob/v2.21.0/tf_keras/mixed_precision/loss_scale_optimizer.py#L1444
"""

from collections.abc import Callable
from typing import Any, Self

import tensorflow as tf

from lossscale_core import BaseScaling
from lossscale_core.errors import CheckpointWarning
from lossscale_tf._step import Step
from lossscale_tf._versions import stored_names
from lossscale_tf._warning import warn_caller
from lossscale_tf._wrapper import share_deferred_restorations
from lossscale_tf.keras._config import arguments_of, config_of
from lossscale_tf.keras._inner import is_keras_3
from lossscale_tf.keras._updates import Updates

_VALUE = "VARIABLE_VALUE"
"""The name under which TensorFlow saves a variable's value."""
_ONLY_IN_NESTED = "_used_scale/.ATTRIBUTES/VARIABLE_VALUE"


class _SavedLikeInner:
    """What a checkpoint keeps of a wrapper: the children of `inner`, under their names, and the loss scale.

    The scale is there twice: the whole state under `_scale_state`, and as tf_keras's wrapper keeps it under
    `loss_scale`, if the policy grows; the step is told when that is restored. A spike guard's state is under
    `_guard_state`. An older layout, in which the wrapper's own children and `inner_optimizer` are beside each other, is
    restored as well.
    """

    def __init__(self, inner: Any, step: Step, grows: bool) -> None:
        self._inner = inner
        self._own = {"_scale_state": step.state}
        if step.guard is not None:
            self._own["_guard_state"] = step.guard.state
        if grows:
            self._own["loss_scale"] = _LossScale(step.state.loss_scale, step.state.growth_tracker, step.restored)
        self._is_nested = False

    def children(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return what is saved."""
        return {**self._inner._trackable_children(*args, **kwargs), **self._own}

    def look_at(self, path: str) -> None:
        """Find out which layout the checkpoint has that is about to be restored."""
        self._is_nested = any(name.endswith(_ONLY_IN_NESTED) for name, _ in tf.train.list_variables(path))

    def lookup(self, name: str, nested: Callable[[], Any]) -> Any:
        """Return the object to restore `name` into, or None; `nested` returns that of the older layout."""
        if self._is_nested:
            return nested()
        return self._own.get(name) or self._inner._lookup_dependency(name)


class SavedAttributes:
    """A wrapper's part in what is saved: in configs, in Keras's files and in TensorFlow's checkpoints."""

    name: str
    inner_optimizer: Any
    _step: Step
    _updates: Updates
    _saved: _SavedLikeInner | None = None

    def get_config(self) -> dict[str, Any]:
        """Return what `from_config` needs, without the running state: strings, numbers and dicts of them."""
        return config_of(self.name, self.inner_optimizer, self._step, self._updates.is_compiled)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Self:
        """Make an optimizer from a config.

        Args:
            config: A config of ours, of Keras 3, or of one of `tf.keras.mixed_precision`'s two. It is left as it is.
            custom_objects: The classes of the user's that the inner optimizer's config names.

        Returns:
            The wrapper, around a new inner optimizer.

        """
        return cls(**arguments_of(config, custom_objects))

    def load_own_variables(self, store: Any) -> None:
        """Load what `save_own_variables` stored; nothing of it, with a warning, if it is another optimizer's.

        What was saved without a spike guard is loaded, with a warning, and the guard starts over.

        Args:
            store: A mapping of numbers, as strings, to arrays.

        """
        matching = _matching(self, store)
        if matching is not None:
            super().load_own_variables(matching)  # type: ignore[misc]  # Keras's, as the rest of what is inherited

    def _save_like(self, inner: Any, step: Step) -> None:
        """Keep what TensorFlow's checkpoints hold in the layout of `inner`, if it is an optimizer of tf_keras."""
        if is_keras_3(inner):
            return
        share_deferred_restorations(self, inner)
        is_dynamic = "growth_interval" in BaseScaling.of(step.policy).settings()
        self._saved = _SavedLikeInner(inner, step, is_dynamic)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        if self._saved is None or save_type != "checkpoint":
            return super()._trackable_children(save_type, **kwargs)  # type: ignore[misc]
        return self._saved.children(save_type, **kwargs)

    def _checkpoint_adapter(self, path: str) -> Any:
        if self._saved is not None:
            self._saved.look_at(path)
        return super()._checkpoint_adapter(path)  # type: ignore[misc]

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        own = super()._lookup_dependency  # type: ignore[misc]
        if self._saved is None or cached_dependencies is None:  # without these it is asked by whoever tracks attributes
            return own(name, cached_dependencies)
        return self._saved.lookup(name, lambda: own(name))


def _matching(optimizer: Any, store: Any) -> Any:
    """Return what is stored for a wrapper's variables, the guard's at their end; None if it is another optimizer's."""
    shapes = [tuple(variable.shape) for variable in optimizer.variables]
    start = () if optimizer.guard is None else optimizer.guard.init_state()
    without_guard = len(shapes) - len(start)
    names = stored_names(store)
    starts_guard = len(names) == without_guard < len(shapes)
    if starts_guard:
        fresh = {str(n): value for n, value in enumerate(start, without_guard)}
        store, names = {name: store[name] for name in names} | fresh, names | set(fresh)
    stored = [tuple(store[str(n)].shape) for n in range(len(shapes)) if str(n) in names]
    # Keras compares the number of variables only, and raises at the first shape that differs, with those before it set:
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
    """The loss scale as tf_keras saves it."""

    def __init__(self, loss_scale: Any, growth_tracker: Any, on_restored: Callable[[], None]) -> None:
        self.current_loss_scale = loss_scale
        # tf_keras counts in int64, and TensorFlow restores no value into a variable of another dtype.
        self.good_steps = _Int64View(growth_tracker, on_restored)


class _Int64View(tf.__internal__.tracking.AutoTrackable):
    """A variable that is saved and restored as an int64, which its value fits into."""

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
