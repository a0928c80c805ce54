"""The inner optimizer's attributes, read and set through its wrapper."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from lossscale_tf._step import Step
from lossscale_tf._warning import warn_caller
from lossscale_tf.keras._inner import is_keras_3
from lossscale_tf.keras._slots import Slots
from lossscale_tf.keras._updates import Updates

HYPERPARAMETERS = frozenset({"learning_rate", "lr", "beta_1", "beta_2", "momentum", "rho", "decay"})
"""Names that are read from and set on the inner optimizer."""
READ_THROUGH = frozenset(
    {
        "clipnorm",
        "clipvalue",
        "ema_momentum",
        "ema_overwrite_frequency",
        "global_clipnorm",
        "gradient_accumulation_steps",
        "use_ema",
        "weight_decay",
    }
)
"""Names that are read from the inner optimizer, and must be set there."""


class InnerAttributes:
    """A wrapper's attributes that are those of its `inner_optimizer`. A subclass sets those that have no value here.

    While `_is_initialised` is false, as while Keras's constructor runs, attributes are the wrapper's own.
    """

    name: str
    inner_optimizer: Any
    _variables: list[Any]
    _trainable_variables: list[Any]
    _slots: Slots
    _step: Step
    _updates: Updates
    _is_initialised = False

    @property
    def iterations(self) -> Any:
        """The inner optimizer's count of applied steps; it can be set."""
        return self.inner_optimizer.iterations

    @iterations.setter
    def iterations(self, value: Any) -> None:
        inner = self.inner_optimizer
        if is_keras_3(inner):
            # Keras 3 counts micro-batches there, and divides by their number in a step where it is read:
            # https://github.com/keras-team/keras/blob/v3.15.1/keras/src/optimizers/base_optimizer.py
            inner._iterations.assign(value * (inner.gradient_accumulation_steps or 1))
        else:
            inner.iterations = value

    @property
    def weights(self) -> list[tf.Variable]:
        """The inner optimizer's variables, in the order in which they were made."""
        return self._slots.weights()

    @property
    def variables(self) -> list[Any]:
        """The wrapper's own variables, the state's among them, then the inner optimizer's, then the spike guard's.

        Around an optimizer of tf_keras the list can be called, as that one's can, and returns itself.
        """
        guards = [] if self._step.guard is None else self._step.guard.state.all
        ids = set(map(id, guards))
        own = [variable for variable in self._variables if id(variable) not in ids]
        variables = [*own, *self.weights, *guards]
        return variables if is_keras_3(self.inner_optimizer) else _CallableList(variables)

    def get_weights(self) -> list[Any]:
        """Return the values of `weights`, as NumPy arrays."""
        return [variable.numpy() for variable in self.weights]

    def set_weights(self, weights: list[Any]) -> None:
        """Set the values of `weights`.

        Args:
            weights: An array for each variable, in the order and the shapes of `get_weights`.

        Raises:
            ValueError: There are more or fewer arrays than variables, or a shape differs.

        """
        for variable, value in zip(self.weights, weights, strict=True):
            variable.assign(value)

    def add_slot(self, var: Any, slot_name: str, initializer: Any = "zeros") -> tf.Variable:
        """Add a slot for a variable to the inner optimizer.

        Args:
            var: The variable that the slot belongs to.
            slot_name: The name of the slot.
            initializer: Anything that Keras takes as an initializer.

        Returns:
            The slot's variable, with the shape of `var`.

        """
        return self._slots.add(var, slot_name, initializer)

    def get_slot_names(self) -> list[str]:
        """Return the names of the inner optimizer's slots."""
        return self._slots.names(self._trainable_variables)

    def get_slot(self, var: Any, slot_name: str) -> tf.Variable | None:
        """Return the inner optimizer's slot of this name for `var`, or None."""
        return self._slots.get(var, slot_name, self._trainable_variables)

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        """Tell the inner optimizer which variables not to decay; it says which arguments there are."""
        self.inner_optimizer.exclude_from_weight_decay(*args, **kwargs)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Let the inner optimizer do what it does at the end of `fit`, if anything, and log what is worth saying."""
        if tf.executing_eagerly():
            self._step.watch.log(self._step.policy, self._step.state.read_on_host())
        if hasattr(self.inner_optimizer, "finalize_variable_values"):
            self.inner_optimizer.finalize_variable_values(var_list)

    # A property, since TensorFlow asks `hasattr`, which must be false around an optimizer of Keras 3:
    # https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/checkpoint/restore.py#L775
    @property
    def _create_or_restore_slot_variable(self) -> Any:
        """The inner optimizer's, if it has slots of TensorFlow's own kind."""
        return self.inner_optimizer._create_or_restore_slot_variable

    @contextmanager
    def _own_attributes(self) -> Iterator[None]:
        """Keep attributes from the inner optimizer for a while."""
        object.__setattr__(self, "_is_initialised", False)
        try:
            yield
        finally:
            object.__setattr__(self, "_is_initialised", True)

    def __getattr__(self, name: str) -> Any:
        # Copying and unpickling ask for attributes before there are any; this would then ask itself, without end.
        if "inner_optimizer" in self.__dict__ and self._is_hyperparameter(name):
            return getattr(self.inner_optimizer, _spelled(name))
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        if not self._is_initialised or name.startswith("_") or name == "built":
            super().__setattr__(name, value)
        elif name == "iterations":  # past automatic tracking, whose look at the old value has tf_keras create it
            object.__setattr__(self, name, value)
        elif self._is_hyperparameter(name):
            self._set_hyperparameter(_spelled(name), value)
        else:
            if name in READ_THROUGH or (not hasattr(type(self), name) and hasattr(self.inner_optimizer, name)):
                warn_caller(
                    f"{name} is set on the LossScaleOptimizer, where nothing reads it; set it on inner_optimizer "
                    "instead"
                )
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        inner = dir(self.inner_optimizer)
        hyperparameters = HYPERPARAMETERS.union(vars(self.inner_optimizer).get("_hyper", ()))
        names = {*super().__dir__(), *(name for name in hyperparameters if _spelled(name) in inner)}
        # TensorFlow's checkpoints look for untracked slots in whatever lists this name; those of Keras 3 are tracked.
        return sorted(names if "get_slot_names" in inner else names - {"get_slot_names"})

    def _is_hyperparameter(self, name: str) -> bool:
        own = vars(self.inner_optimizer).get("_hyper", ())  # of a legacy optimizer, a user's own among them
        return name in HYPERPARAMETERS or (name in own and not hasattr(type(self), name))

    def _set_hyperparameter(self, name: str, value: Any) -> None:
        inner = self.inner_optimizer
        if not hasattr(inner, name):
            raise AttributeError(f"'{type(inner).__name__}' object has no attribute '{name}'")
        setattr(inner, name, value)
        self._updates.forget_compiled()


class _CallableList(list[Any]):
    """A list that returns itself when it is called, as `variables` of tf_keras's optimizers."""

    def __call__(self) -> "_CallableList":
        return self


def _spelled(name: str) -> str:
    return "learning_rate" if name == "lr" else name


def _read_through(name: str, default: Any) -> property:
    """Return a property that reads the inner optimizer's setting; while Keras makes or builds it, the wrapper's."""

    def read(self: InnerAttributes) -> Any:
        return getattr(self.inner_optimizer, name, default) if self._is_initialised else default

    def ignore(self: InnerAttributes, _: Any) -> None:
        """Ignore what Keras's constructor sets; `__setattr__` has warned of anything else."""

    return property(read, ignore, doc=f"The inner optimizer's `{name}`.")


# That one is in `ScaleAttributes`, since the wrapper may have a norm of its own.
for _name in READ_THROUGH - {"global_clipnorm"}:
    setattr(InnerAttributes, _name, _read_through(_name, False if _name == "use_ema" else None))
del _name
