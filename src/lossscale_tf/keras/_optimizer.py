"""`LossScaleOptimizer`: a Keras optimizer around another, which applies or skips each step as a whole."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Self, cast

import keras
import tensorflow as tf

from lossscale_core import BaseScaling, ScaleWatch, SpikeGuard
from lossscale_core.adapters import shown
from lossscale_tf._guard import Guard
from lossscale_tf._state import StateVariables
from lossscale_tf._step import Step, outside_of_replicas
from lossscale_tf._verbs import Gradient, Tree, unconverted
from lossscale_tf._warning import warn_caller
from lossscale_tf._wrapper import Wrapper, require_single_wrapper
from lossscale_tf.keras._arguments import (
    are_summed,
    keras_pairs,
    loss_arguments,
    policy_of_arguments,
    present_gradients,
    require_arguments,
)
from lossscale_tf.keras._inner import build, build_once, is_keras_3
from lossscale_tf.keras._names import (
    NAMES,
    REMEDIES,
    SETTINGS,
    CallableList,
    Kind,
    kind_of,
    listed,
    set_iterations,
    spelled,
)
from lossscale_tf.keras._saving import arguments_of, config_of, matching
from lossscale_tf.keras._scaling import Scaling
from lossscale_tf.keras._slots import Slots
from lossscale_tf.keras._updates import Updates


# Keras's `compile` wraps any other optimizer in its own under mixed_float16, so that this is a subclass of Keras's:
# https://github.com/keras-team/keras/blob/v3.15.1/keras/src/trainers/trainer.py
@keras.saving.register_keras_serializable("lossscale")
class LossScaleOptimizer(Wrapper, keras.optimizers.LossScaleOptimizer):
    """A Keras optimizer that scales the loss, unscales the gradients, and skips the steps that overflow.

    ```python
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(), "dynamic")
    model.compile(optimizer, loss)            # under mixed_float16, fit scales the loss
    ```

    In a loop of your own call `minimize`, or `get_scaled_loss` before the tape's gradient, `get_unscaled_gradients`
    after it, then `apply_gradients`, as with `tf.keras.mixed_precision`. A skipped step changes neither variables nor
    slots nor `iterations`. In `tf.function` nothing synchronises with the host; eagerly, `apply_gradients` reads the
    flag and the state.

    Args:
        inner_optimizer: A Keras 3 or tf_keras optimizer; `optimizer` is an older name of this argument.
        loss_scale: Anything that `as_policy` accepts; or a bool, as for `dynamic`.
        initial_scale: The first scale of dynamic scaling, 2**15 if left out; or the scale, if `dynamic` is False.
        dynamic_growth_steps: The finite steps after which a dynamic scale grows; 2000 if left out.
        dynamic: Whether the scale adapts.
        policy: Anything that `as_policy` accepts, instead of the four arguments before.
        global_clipnorm: The norm to clip unscaled gradients to, in the same read as the finiteness check.
        guard: A `SpikeGuard`, which skips a step if its norm is far above the norms before it, and then leaves the loss
            scale and its counters unchanged. The norm is that of the unscaled gradients before clipping. Eagerly, a
            `SpikeStreakError` is raised when its `max_streak` is reached.
        name: The optimizer's name.
        **base_arguments: Other arguments of Keras's optimizers; only their default values are allowed.

    Raises:
        TypeError: `inner_optimizer` is not a Keras optimizer, or scales the loss already.
        ValueError: The arguments contradict each other, or another wrapper has this optimizer.

    """

    _is_initialised = False

    def __init__(
        self,
        inner_optimizer: Any = None,
        loss_scale: Any = "dynamic",
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        *,
        dynamic: bool | None = None,
        policy: Any = None,
        global_clipnorm: float | None = None,
        guard: SpikeGuard | None = None,
        name: str | None = None,
        optimizer: Any = None,
        **base_arguments: Any,
    ) -> None:
        inner = optimizer if inner_optimizer is None else inner_optimizer
        require_arguments(inner, global_clipnorm, guard, base_arguments)
        chosen = policy_of_arguments(policy, loss_scale, dynamic, initial_scale, dynamic_growth_steps)
        require_single_wrapper(self, inner)
        # After the checks: Keras's constructor sets `loss_scale_factor` of the inner optimizer to None permanently:
        # https://github.com/keras-team/keras/blob/v3.15.1/keras/src/optimizers/loss_scale_optimizer.py
        super().__init__(inner, name=name)
        self._slots = Slots(inner)
        # A checkpoint saves these three under the names of the attributes; without a guard it has no guard variables.
        self._scale_state = StateVariables(chosen, functools.partial(_add_variable, self, ""))
        guarding = Guard.of(guard, functools.partial(_add_variable, self, "guard_"))
        self._guard_state = None if guarding is None else guarding.state
        self._used_scale = _variable_of_each_replica(0.0)
        self._step = Step(chosen, self._scale_state, global_clipnorm, guarding, ScaleWatch())
        self._scaling = Scaling(self._step, self._used_scale)
        self._updates = Updates(inner)
        self._is_initialised = True

    @unconverted
    def scale_loss(self, loss: Tree) -> Tree:
        """Scale a loss as Keras itself does in `fit`: the next `apply_gradients` or `apply` takes scaled gradients.

        Args:
            loss: A tensor of any float dtype, or a nested structure of them.

        Returns:
            The loss scaled, in float32 or wider.

        Raises:
            CallOrderError: The loss is scaled already.

        """
        return self._scaling.scale(loss, by_keras=True)

    def get_scaled_loss(self, loss: Tree) -> Tree:
        """Scale a loss, to take a tape's gradient of it.

        Args:
            loss: A tensor of any float dtype, a nested structure of them, or a callable that returns one.

        Returns:
            The loss scaled, in float32 or wider; a callable for a callable.

        Raises:
            CallOrderError: The loss is scaled already.

        """
        if callable(loss):
            return cast(Tree, lambda: self.get_scaled_loss(loss()))
        return self._scaling.scale(loss)

    @unconverted
    def get_unscaled_gradients(self, grads: Tree) -> Tree:
        """Divide gradients by the scale of their own loss, even if the next loss was already scaled.

        Args:
            grads: A nested structure of tensors, `IndexedSlices` and None: gradients of a scaled loss.

        Returns:
            The gradients in the same structure, in float32 or wider.

        Raises:
            CallOrderError: The loss of the gradients cannot be determined; or they were unscaled before.

        """
        return self._scaling.unscale(grads)

    # Not marked `unconverted`: AutoGraph converts a user's loss only if it has converted all callers in between.
    def minimize(
        self,
        loss: Any,
        var_list: Any,
        tape: tf.GradientTape | None = None,
        *,
        grad_loss: Any = None,
        name: str | None = None,
    ) -> None:
        """Take a whole step: scale `loss`, differentiate, unscale and apply.

        Args:
            loss: A callable, or a tensor computed under `tape`.
            var_list: A variable, a list of them, or a callable that returns one.
            tape: The tape of a loss that is a tensor.
            grad_loss: The gradient of the loss itself, if it is not 1.
            name: Not used.

        Raises:
            ValueError: The loss is a tensor and `tape` is missing, or no variable has a gradient.

        """
        self.apply_gradients(self.compute_gradients(loss, var_list, tape, grad_loss=grad_loss), name=name)

    def compute_gradients(
        self, loss: Any, var_list: Any, tape: tf.GradientTape | None = None, *, grad_loss: Any = None
    ) -> list[tuple[Gradient | None, Any]]:
        """Scale `loss`, differentiate it and unscale the gradients, without applying them.

        Args:
            loss: A callable, or a tensor computed under `tape`.
            var_list: A variable, a list of them, or a callable that returns one.
            tape: The tape of a loss that is a tensor.
            grad_loss: The gradient of the loss itself, if it is not 1.

        Returns:
            (gradient, variable) pairs, unscaled, in float32 or wider; a gradient may be None.

        Raises:
            ValueError: The loss is a tensor and `tape` is missing.

        """
        return self._scaling.differentiate(loss, var_list, *loss_arguments(loss, tape, grad_loss))

    def get_gradients(self, loss: Any, params: Any) -> list[Gradient]:
        """Return the unscaled gradients of a loss.

        Args:
            loss: A callable, or a tensor of the graph being built.
            params: A variable, or a list of them.

        Returns:
            A gradient for each variable, in float32 or wider.

        Raises:
            ValueError: The loss has no gradient with respect to a variable, or is an eager tensor.

        """
        return self._scaling.gradients(loss, params)

    @unconverted
    def apply_gradients(self, grads_and_vars: Any, name: str | None = None, **aggregation: Any) -> None:
        """Apply gradients if all of them are finite on every replica, else skip the step.

        The gradients must be unscaled, except if Keras itself scaled the loss (`fit`). They are summed over replicas
        first.

        Args:
            grads_and_vars: (gradient, variable) pairs; a gradient may be None.
            name: Not used.
            **aggregation: `experimental_aggregate_gradients=False` or `skip_gradients_aggregation=True` says that the
                gradients are summed already.

        Raises:
            TypeError: `grads_and_vars` is not a list of pairs.
            ValueError: No variable has a gradient.

        """
        self._apply(*keras_pairs(grads_and_vars), are_summed(aggregation))

    @unconverted
    def apply(self, grads: Iterable[Any], trainable_variables: Any = None) -> None:
        """Apply gradients of a scaled loss; unscale them first unless `get_unscaled_gradients` did.

        Keras 3 calls this method in `fit`.

        Args:
            grads: A gradient or None for each variable.
            trainable_variables: The variables; if left out, those that the optimizer was built with.

        Raises:
            CallOrderError: No loss was scaled, so that it is unknown whether the gradients are scaled.

        """
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        self._apply(list(grads), variables, is_summed=False, may_be_scaled=True)

    def stateless_apply(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `NotImplementedError`, since Keras uses this method to train on JAX."""
        raise NotImplementedError("stateless_apply is for Keras on JAX; lossscale_jax.loss_scaled wraps optax there")

    def get_updates(self, loss: Any, params: Any) -> list[Any]:
        """Take a whole step, like the method of this name in legacy optimizers of tf_keras.

        Args:
            loss: As for `get_gradients`.
            params: The list of the variables.

        Returns:
            A list with the result of `apply_gradients`.

        Raises:
            ValueError: As `get_gradients`.

        """
        return [self.apply_gradients(zip(self.get_gradients(loss, params), params, strict=True))]

    def build(self, variables: Any) -> None:
        """Create the inner optimizer's variables.

        Args:
            variables: The list of the variables to train.

        """
        build(self.inner_optimizer, variables)
        self._is_initialised = False  # so that Keras does not create averages and accumulators in the wrapper, too
        try:
            keras.optimizers.Optimizer.build(self, variables)
        finally:
            self._is_initialised = True

    @property
    def steps_with_missing_calls(self) -> int:
        """The number of steps in a loop of your own that missed scaling or unscaling. Synchronises with the host."""
        return self._scaling.count_missing()

    @property
    def loss_scale(self) -> tf.Tensor:
        """The current loss scale: float32, of shape `()`."""
        return tf.convert_to_tensor(self._step.state.loss_scale)

    @property
    def dynamic_scale(self) -> tf.Variable:
        """The variable that holds the loss scale; Keras 3's name."""
        return self._step.state.loss_scale

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale may change."""
        return "growth_interval" in BaseScaling.of(self.policy).settings()

    @property
    def dynamic_counter(self) -> tf.Variable | None:
        """The variable that counts finite steps toward growth; None for a fixed scale."""
        return self._step.state.growth_tracker if self.dynamic else None

    @property
    def initial_scale(self) -> float:
        """The loss scale of the first step."""
        return float(self.policy.init_state().loss_scale)

    @property
    def dynamic_growth_steps(self) -> int | None:
        """The policy's growth interval; None for a fixed scale.

        Setting it replaces the policy; it may be set below the present count. A step that was traced before keeps the
        old interval, and a warning says so.
        """
        return BaseScaling.of(self.policy).growth_interval if self.dynamic else None

    @dynamic_growth_steps.setter
    def dynamic_growth_steps(self, steps: int) -> None:
        if not self.dynamic:
            raise AttributeError(f"dynamic_growth_steps is of dynamic scaling, and the policy is {self.policy}")
        self._step.policy = dataclasses.replace(self.policy, growth_interval=steps)  # type: ignore[type-var]
        if self._step.is_traced:
            warn_caller(
                f"dynamic_growth_steps={steps!r} does not reach a step that is traced already; trace it again, for "
                "fit by model.make_train_function(force=True)"
            )

    @property
    def global_clipnorm(self) -> float | None:
        """The norm that this wrapper clips to or, without one, the inner optimizer."""
        own = self._step.max_norm
        return getattr(self.inner_optimizer, "global_clipnorm", None) if own is None else own

    @property
    def weights(self) -> list[tf.Variable]:
        """The inner optimizer's variables, in the order in which they were made."""
        return self._slots.weights()

    @property
    def variables(self) -> list[Any]:
        """The wrapper's own variables, the state's among them, then the inner optimizer's, then the spike guard's.

        Around an optimizer of tf_keras the list can also be called and returns itself, as in tf_keras.
        """
        guards = [] if self._step.guard is None else self._step.guard.state.all
        ids = set(map(id, guards))
        own = [variable for variable in self._variables if id(variable) not in ids]
        variables = [*own, *self.weights, *guards]
        return variables if is_keras_3(self.inner_optimizer) else CallableList(variables)

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
            initializer: Anything that Keras accepts as an initializer.

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
        """Exclude variables from weight decay; the arguments are those of the inner optimizer's method."""
        self.inner_optimizer.exclude_from_weight_decay(*args, **kwargs)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Call this method of the inner optimizer, if it has one, at the end of `fit`, and log the state's events."""
        if tf.executing_eagerly():
            self._step.watch.log(self._step.policy, self._step.state.read_on_host())
        if hasattr(self.inner_optimizer, "finalize_variable_values"):
            self.inner_optimizer.finalize_variable_values(var_list)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a saved state, and drop records of scaled losses; see `Wrapper.load_state_dict`."""
        super().load_state_dict(saved)
        self._scaling.forget()

    def get_config(self) -> dict[str, Any]:
        """Return the config for `from_config`, without the running state: strings, numbers and dicts of them."""
        return config_of(self.name, self.inner_optimizer, self._step)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Self:
        """Make an optimizer from a config.

        Args:
            config: A config of this wrapper, of Keras 3's wrapper, or of one of `tf.keras.mixed_precision`'s two. It is
                not changed.
            custom_objects: The user's classes that the inner optimizer's config names.

        Returns:
            The wrapper, around a new inner optimizer.

        """
        return cls(**arguments_of(config, custom_objects))

    def load_own_variables(self, store: Any) -> None:
        """Load the variables that `save_own_variables` stored.

        If they belong to another optimizer, a warning is issued and nothing is loaded. If they were saved without a
        spike guard, a warning is issued and the guard starts over.

        Args:
            store: A mapping of numbers, as strings, to arrays.

        """
        found = matching(self, store)
        if found is not None:
            super().load_own_variables(found)
            self._scaling.forget()

    def _apply(self, grads: list[Any], variables: list[Any], is_summed: bool, may_be_scaled: bool = False) -> None:
        grads, variables = present_gradients(grads, variables)
        build_once(self, variables)
        if not self._step.has_begun:
            outside_of_replicas(self._warn_if_resumed)
        grads, loss_scale = self._scaling.to_apply(grads, variables, may_be_scaled)
        if not is_summed:
            grads, loss_scale = self._updates.summed(grads, variables, loss_scale)
        self._step.take(grads, variables, loss_scale, self._updates.run, self._scaling.updated_in_graph)

    def _warn_if_resumed(self) -> None:
        with tf.init_scope():  # leaves a trace, since variables have values only outside of it
            if tf.executing_eagerly():
                self._step.warn_if_resumed(self.inner_optimizer.iterations)

    # The wrapper reads all names of `_names.NAMES` from its inner optimizer. The exception is while Keras's constructor
    # or `build` runs, which sets and reads its own defaults.
    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("inner_optimizer")  # copying and unpickling read attributes before it is set
        if name in SETTINGS:
            return getattr(inner, name, SETTINGS[name]) if self._is_initialised else SETTINGS[name]
        if inner is not None and kind_of(self, name) in (Kind.HYPERPARAMETER, Kind.READ):
            return getattr(inner, spelled(name))
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        if not self._is_initialised and name in NAMES and name != "inner_optimizer":
            return
        if not self._is_initialised or name.startswith("_") or name == "built":
            super().__setattr__(name, value)
            return
        inner, kind = self.inner_optimizer, kind_of(self, name)
        if name == "iterations":
            set_iterations(inner, value)
        elif kind is Kind.REFUSED:
            raise AttributeError(f"{name}={shown(value)} cannot be set, {REMEDIES[name]}")
        elif kind is Kind.HYPERPARAMETER:
            if not hasattr(inner, spelled(name)):
                raise AttributeError(f"'{type(inner).__name__}' object has no attribute '{spelled(name)}'")
            setattr(inner, spelled(name), value)
        else:
            if kind is Kind.READ or (not hasattr(type(self), name) and hasattr(inner, name)):
                warn_caller(
                    f"{name} is set on the LossScaleOptimizer, where nothing reads it; set it on inner_optimizer "
                    "instead"
                )
            if kind is Kind.OWN:
                super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return listed(super().__dir__(), self.inner_optimizer)


def _add_variable(optimizer: keras.optimizers.Optimizer, prefix: str, name: str, value: Any) -> tf.Variable:
    return optimizer.add_variable(
        shape=(),
        dtype=value.dtype.name,
        initializer=keras.initializers.Constant(value),
        # All replicas compute the same state. Without an aggregation no replica may set a mirrored variable:
        # https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/distribute/values_util.py#L329
        aggregation="only_first_replica",
        name=f"{prefix}{name}",
    )


def _variable_of_each_replica(value: Any) -> tf.Variable:
    with tf.init_scope():
        return tf.Variable(
            value,
            trainable=False,
            name="used_loss_scale",
            # Each replica sets its own. A mirrored variable needs a merge call, which a user's loop must not contain:
            # https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/distribute/mirrored_run.py#L503
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
