"""The inner optimizer's attributes, read and set through its wrapper."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from lossscale_core import SpikeGuard
from lossscale_core.errors import CheckpointWarning
from lossscale_tf._step import Step
from lossscale_tf._warning import warn_caller
from lossscale_tf.keras._inner import is_keras_3
from lossscale_tf.keras._slots import Slots

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
    guard: SpikeGuard | None
    _is_initialised = False

    @property
    def iterations(self) -> Any:
        """The inner optimizer's count of applied steps; it can be set."""
        return self.inner_optimizer.iterations

    @iterations.setter
    def iterations(self, value: Any) -> None:
        inner = self.inner_optimizer
        if is_keras_3(inner):
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
        guards = {id(variable) for variable in self._guard_variables()}
        own = [variable for variable in self._variables if id(variable) not in guards]
        variables = [*own, *self.weights, *self._guard_variables()]
        return variables if is_keras_3(self.inner_optimizer) else _CallableList(variables)

    def load_own_variables(self, store: Any) -> None:
        """Load what `save_own_variables` stored; nothing of it, with a warning, if it is another optimizer's.

        What was saved without a spike guard is loaded, with a warning, and the guard starts afresh.

        Args:
            store: A mapping of numbers, as strings, to arrays.

        """
        shapes = [tuple(variable.shape) for variable in self.variables]
        without_guard = len(shapes) - len(self._guard_variables())
        starts_guard = len(store.keys()) == without_guard < len(shapes)
        if starts_guard and self.guard is not None:
            start = {str(n): value for n, value in enumerate(self.guard.init_state(), without_guard)}
            store = {name: store[name] for name in store.keys()} | start  # noqa: SIM118, Keras's mappings have no more
        stored = [tuple(store[str(n)].shape) for n in range(len(shapes)) if str(n) in store]
        if len(store.keys()) == len(shapes) and stored != shapes:
            warn_caller(
                f"the saved optimizer's variables have other shapes than those of '{self.name}', so none is loaded; "
                "it is another optimizer's, and this one begins anew"
            )
            return
        if starts_guard:
            warn_caller(
                "the saved optimizer has no state of a spike guard, so that the guard starts afresh with its warm-up",
                CheckpointWarning,
            )
        super().load_own_variables(store)  # type: ignore[misc]  # Keras's, as the rest of what is inherited

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

    @property
    def _create_or_restore_slot_variable(self) -> Any:
        """The inner optimizer's, if it has slots of TensorFlow's own kind."""
        return self.inner_optimizer._create_or_restore_slot_variable

    def _guard_variables(self) -> list[Any]:
        return [] if self._step.guard is None else self._step.guard.state.all

    def _hyperparameter_was_set(self) -> None:
        """Follow a hyperparameter that was set through the wrapper; a subclass does what it has to."""

    @contextmanager
    def _own_attributes(self) -> Iterator[None]:
        """Keep attributes from the inner optimizer for a while."""
        object.__setattr__(self, "_is_initialised", False)
        try:
            yield
        finally:
            object.__setattr__(self, "_is_initialised", True)

    def __getattr__(self, name: str) -> Any:
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
        self._hyperparameter_was_set()


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


for _name in READ_THROUGH - {"global_clipnorm"}:
    setattr(InnerAttributes, _name, _read_through(_name, False if _name == "use_ema" else None))
del _name
