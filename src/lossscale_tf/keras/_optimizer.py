"""`LossScaleOptimizer`: that of `lossscale_keras`, with the methods and names that TensorFlow's documents promise."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Self, cast

import keras
import tensorflow as tf

import lossscale_keras
from lossscale_core import BaseScaling, ScaleState, SpikeGuard
from lossscale_core.adapters import check_setting, describe, warn_caller
from lossscale_core.errors import CallOrderError
from lossscale_tf._marks import mark_gradient, mark_of, origins
from lossscale_tf._state import warn_if_resumed
from lossscale_tf._verbs import Gradient, Tree, is_gradient, scale_by, times, unconverted, unscale_by
from lossscale_tf.keras import _arguments, _inner, _names
from lossscale_tf.keras._inner import as_tensorflow, is_keras_3
from lossscale_tf.keras._saving import arguments_of
from lossscale_tf.keras._slots import Slots


@keras.saving.register_keras_serializable("lossscale")
class LossScaleOptimizer(lossscale_keras.LossScaleOptimizer):
    """A Keras optimizer that scales the loss, unscales the gradients, and skips the steps that overflow.

    ```python
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(), "dynamic")
    model.compile(optimizer, loss)            # under mixed_float16, fit scales the loss
    ```

    In a loop of your own call `minimize`, or `get_scaled_loss` before the tape's gradient, `get_unscaled_gradients`
    after it, then `apply_gradients`, as with `tf.keras.mixed_precision`. A skipped step changes neither variables nor
    slots nor `iterations`. In `tf.function` nothing synchronises with the host; eagerly, `apply_gradients` reads the
    flag and the state. What is not documented here is as in `lossscale_keras.LossScaleOptimizer`.

    Args:
        inner_optimizer: A Keras 3 or tf_keras optimizer; `optimizer` is an older name of this argument.
        loss_scale: Anything that `as_policy` accepts; or a bool, as for `dynamic`. In this class and in `v1`, "dynamic"
            is the documents' rule, which begins at 2**15; everywhere else it is `DynamicScaling()`, from 2**16.
        initial_scale: The first scale of dynamic scaling, 2**15 if left out; or the scale, if `dynamic` is False.
        dynamic_growth_steps: The finite steps after which a dynamic scale grows; 2000 if left out.
        dynamic: Whether the scale adapts.
        policy: Anything that `as_policy` accepts, instead of the four arguments before.
        global_clipnorm: The norm to clip unscaled gradients to, in the same read as the finiteness check.
        guard: A `SpikeGuard`, which skips a step if its norm is far above the norms before it, and then leaves the loss
            scale and its counters unchanged. The norm is that of the unscaled gradients before clipping. Eagerly, an
            `OverflowStreakError` is raised when its `max_streak` is reached.
        name: The optimizer's name.
        **base_arguments: Other arguments of Keras's optimizers; only their default values are allowed.

    Raises:
        TypeError: `inner_optimizer` is not a Keras optimizer, or scales the loss already.
        ValueError: The arguments contradict each other, or another wrapper has this optimizer.
        RuntimeError: Keras runs on another backend than TensorFlow.
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
        _inner.require_tensorflow()
        inner = optimizer if inner_optimizer is None else inner_optimizer
        _inner.require_optimizer(inner)
        _names.require_no_base_arguments(base_arguments)
        chosen = _arguments.policy_of_arguments(policy, loss_scale, dynamic, initial_scale, dynamic_growth_steps)
        super().__init__(inner, chosen, guard=guard, global_clipnorm=global_clipnorm, name=name)
        self._slots = Slots(inner)
        self._steps = _Steps()
        self._is_initialised = True

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
        return self._scaled(loss, by_keras=False)

    @unconverted
    def _scaled(self, loss: Tree, by_keras: bool) -> Tree:
        _inner.require_no_session()
        return super()._scaled(loss, by_keras)

    @unconverted
    def get_unscaled_gradients(self, grads: Tree, *, loss: Any = None) -> Tree:
        """Divide gradients by the scale of the last loss that was scaled, or of `loss`.

        Args:
            grads: A nested structure of tensors, `IndexedSlices` and None: gradients of a scaled loss.
            loss: The scaled loss itself, if another loss was scaled after it.

        Returns:
            The gradients in the same structure, in float32 or wider.

        Raises:
            CallOrderError: The gradients were unscaled before.
            ValueError: `loss` was not scaled by this optimizer.
        """
        if any((mark := mark_of(leaf, self._losses)) and mark.kind != "scaled" for leaf in tf.nest.flatten(grads)):
            raise CallOrderError("these gradients are unscaled already; call get_unscaled_gradients once a step")
        named = None if loss is None else self._named(loss)
        return self._unscaled(grads, self._losses.unscale(named), "unscaled")

    def _unscaled(self, grads: Any, loss: Any, kind: Any) -> Any:
        """Return gradients divided by the scale of their loss, and mark them."""
        unscaled = unscale_by(grads, loss.loss_scale)
        for leaf, grad in zip(tf.nest.flatten(unscaled), tf.nest.flatten(grads), strict=True):
            if is_gradient(leaf):
                mark_gradient(loss, leaf, grad, kind)
        return unscaled

    # Not marked `unconverted`: AutoGraph converts a user's loss only if it has converted all callers in between.
    def minimize(
        self,
        loss: Any,
        var_list: Any,
        tape: tf.GradientTape | None = None,
        *,
        grad_loss: Any = None,
        name: str | None = None,
    ) -> Any:
        """Take a whole step: scale `loss`, differentiate, unscale and apply.

        Args:
            loss: A callable, or a tensor computed under `tape`.
            var_list: A variable, a list of them, or a callable that returns one.
            tape: The tape of a loss that is a tensor.
            grad_loss: The gradient of the loss itself, if it is not 1.
            name: Not used.

        Returns:
            The result of `apply_gradients`.

        Raises:
            ValueError: The loss is a tensor and `tape` is missing, or no variable has a gradient.
        """
        return self.apply_gradients(self.compute_gradients(loss, var_list, tape, grad_loss=grad_loss), name=name)

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
        _inner.require_no_session()
        tape, grad_loss = _arguments.loss_arguments(loss, tape, grad_loss)
        # A tape that is closed already is entered again, as in tf_keras, since it must record the multiplication, too.
        tape = tape or tf.GradientTape()
        with tape:
            value = loss() if callable(loss) else loss
            self._require_unscaled(value)
            loss_scale = self._losses.present_scale()
            scaled = scale_by(value, loss_scale)
        variables = tf.nest.flatten(var_list() if callable(var_list) else var_list)  # the loss may create them
        if grad_loss is not None:  # in the dtype of the scaled loss, which is wider than that of half losses
            grad_loss = tf.nest.map_structure(lambda grad, loss: tf.cast(grad, loss.dtype), grad_loss, scaled)
        return self._computed(tape.gradient(scaled, variables, output_gradients=grad_loss), variables, loss_scale)

    @unconverted
    def _computed(self, grads: Any, variables: list[Any], loss_scale: tf.Tensor) -> list[tuple[Any, Any]]:
        loss = self._losses.compute(loss_scale, as_tensorflow(variables))
        return list(zip(self._unscaled(grads, loss, "computed"), variables, strict=True))

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
        if callable(loss):
            pairs = self.compute_gradients(loss, params)
        elif tf.executing_eagerly():
            raise ValueError("an eager tensor has no graph to differentiate; pass a callable, or use a GradientTape")
        else:
            _inner.require_no_session()
            self._require_unscaled(loss)
            loss_scale, variables = self._losses.present_scale(), tf.nest.flatten(params)
            pairs = self._computed(tf.gradients(scale_by(loss, loss_scale), variables), variables, loss_scale)
        if missing := [variable.name for grad, variable in pairs if grad is None]:
            raise ValueError(f"the loss has no gradient with respect to {', '.join(missing)}")
        return [grad for grad, _ in pairs]

    @unconverted
    def apply_gradients(self, grads_and_vars: Any, name: str | None = None, **aggregation: Any) -> None:
        """Apply gradients if all of them are finite on every replica, else skip the step.

        The gradients must be unscaled, except if `scale_loss` scaled the last loss, as Keras does in `fit`. They are
        summed over replicas first.

        Args:
            grads_and_vars: (gradient, variable) pairs; a gradient may be None.
            name: Not used.
            **aggregation: `experimental_aggregate_gradients=False` or `skip_gradients_aggregation=True` says that the
                gradients are summed already.

        Returns:
            The count of applied steps: in a graph a tensor that is ready when the step has ended, to wait for by
                `tf.control_dependencies`, or to return; eagerly the inner optimizer's variable.

        Raises:
            CallOrderError: `get_scaled_loss` was called, and `get_unscaled_gradients` was not.
            TypeError: `grads_and_vars` is not a list of pairs.
            ValueError: No variable has a gradient.
        """
        self._apply(*_arguments.keras_pairs(grads_and_vars), _arguments.are_summed(aggregation))
        iterations = self.inner_optimizer.iterations
        # TensorFlow lets a read wait for the operation that may have set the variable: the branch that takes the step.
        return iterations if tf.executing_eagerly() else tf.convert_to_tensor(iterations)

    @unconverted
    def apply(self, grads: Iterable[Any], trainable_variables: Any = None, *, loss: Any = None) -> None:
        """Apply gradients of a scaled loss; unscale them first unless `get_unscaled_gradients` did.

        Keras 3 calls this method in `fit`.

        Args:
            grads: A gradient or None for each variable.
            trainable_variables: The variables; if left out, those that the optimizer was built with.
            loss: The scaled loss itself, if another loss was scaled after it.

        Raises:
            ValueError: `loss` was not scaled by this optimizer, or there are more or fewer gradients than variables.
        """
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        grads = list(grads)
        self._require_pairs(grads, variables)
        named = None if loss is None else self._named(loss)
        self._apply(grads, variables, is_summed=False, takes_scaled=True, named=named)

    def build(self, var_list: Any) -> None:
        """Create the inner optimizer's variables.

        Args:
            var_list: The list of the variables to train.
        """
        self._is_initialised = False  # so that Keras does not create averages and accumulators in the wrapper, too
        try:
            super().build(var_list)
        finally:
            self._is_initialised = True

    @property
    def steps_with_missing_calls(self) -> int:
        """The number of steps in a loop of your own that missed scaling or unscaling. Synchronises with the host."""
        return int(self._steps.missing.numpy())

    @property
    def dynamic_scale(self) -> Any:
        """The variable that holds the loss scale."""
        self._losses.read_scale()
        return super().dynamic_scale

    @property
    def scale_state(self) -> ScaleState:
        """The policy's state, as tensors of shape `()`."""
        self._losses.read_scale()
        return super().scale_state

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale may change."""
        return "growth_interval" in BaseScaling.of(self.policy).settings()

    @property
    def dynamic_counter(self) -> tf.Variable | None:
        """The variable that counts finite steps toward growth; None for a fixed scale."""
        return self._state.variables[1] if self.dynamic else None

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
        self.policy = dataclasses.replace(self.policy, growth_interval=steps)  # type: ignore[type-var]
        if self._steps.is_traced:
            warn_caller(
                f"dynamic_growth_steps={steps!r} does not reach a step that is traced already; trace it again, for "
                "fit by model.make_train_function(force=True)"
            )

    @property  # type: ignore[misc]
    def global_clipnorm(self) -> float | None:
        """The norm that this wrapper clips to or, without one, the inner optimizer."""
        return getattr(self.inner_optimizer, "global_clipnorm", None) if self._max_norm is None else self._max_norm

    @property
    def weights(self) -> list[tf.Variable]:
        """The inner optimizer's variables, in the order in which they were made."""
        return self._slots.weights()

    @property
    def variables(self) -> list[Any]:
        """The wrapper's own variables, the state's among them, then the inner optimizer's.

        Around an optimizer of tf_keras the list can also be called and returns itself, as in tf_keras.
        """
        variables = [*self._variables, *self.weights]
        return variables if is_keras_3(self.inner_optimizer) else _names.CallableList(variables)

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
            self._read_and_log()
        if hasattr(self.inner_optimizer, "finalize_variable_values"):
            self.inner_optimizer.finalize_variable_values(var_list)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a saved state; see `lossscale_keras`."""
        super().load_state_dict(saved)
        self._steps.has_begun = True

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

    def _apply(
        self, grads: list[Any], variables: list[Any], is_summed: bool, takes_scaled: bool = False, named: Any = None
    ) -> None:
        grads, variables = _arguments.present_gradients(grads, variables)
        found, grads = self._look_up(grads, variables, takes_scaled, named)
        loss_scale = found.loss_scale
        if not is_summed and (aggregate := _inner.own_aggregator(self.inner_optimizer)) is not None:
            grads = grads if loss_scale is None else unscale_by(grads, loss_scale)
            grads, loss_scale, is_summed = aggregate(grads, variables), None, True
        if not self._steps.has_begun:
            self._once(self._warn_if_resumed)
        self._steps.is_traced |= not tf.executing_eagerly()
        self._take(grads, variables, loss_scale, is_summed)
        self._losses.apply(as_tensorflow(variables), found)

    def _warn_if_resumed(self) -> None:
        self._steps.has_begun = True
        with tf.init_scope():  # leaves a trace, since variables have values only outside of it
            if tf.executing_eagerly():
                warn_if_resumed(self.policy, self._state.copy(), self.inner_optimizer.iterations)

    def _look_up(self, grads: list[Any], variables: list[Any], takes_scaled: bool, named: Any) -> tuple[Any, list[Any]]:
        """Return what is known of gradients that are about to be applied, and the gradients to apply."""
        of_tensorflow = as_tensorflow(variables)
        marks = [mark_of(grad, self._losses) for grad in grads]
        unscaled = next((mark.loss for mark in marks if mark is not None and mark.kind != "scaled"), None)
        if unscaled is not None:
            pairs = zip(grads, variables, strict=True)  # the new values of float8 scales were divided, too
            grads = [times(grad, unscaled.loss_scale) if self._is_overwritten(each) else grad for grad, each in pairs]
            grads, loss_scale = origins(grads)
            found = self._losses.look_up_unscaled(unscaled, of_tensorflow, loss_scale)
        else:
            losses = [mark and mark.loss for mark in marks]
            if named is None and all(each is losses[0] for each in losses):
                named = losses[0]
            found = self._losses.look_up(of_tensorflow, takes_scaled, named)
        if not (found.is_scaled and found.is_unscaled) and BaseScaling.of(self.policy).scales_losses:
            self._warn_of_missing_calls(found.is_scaled, found.is_unscaled)
        return found, grads

    def _warn_of_missing_calls(self, is_scaled: bool, is_unscaled: bool) -> None:
        """Count a step of a user's loop that misses scaling or unscaling, and warn of the first one."""
        self._steps.missing.assign_add(1)  # when a traced step runs, not only when it is traced
        if not self._losses.has_warned:
            self._losses.has_warned = True
            calls = {"get_scaled_loss": is_scaled, "get_unscaled_gradients": is_unscaled}
            warn_caller(
                f"{' and '.join(name for name, is_made in calls.items() if not is_made)} not called before "
                "apply_gradients; call get_scaled_loss before the tape's gradient and get_unscaled_gradients after it, "
                "each once a step, or use minimize"
            )

    # ---- optimizers of tf_keras

    @staticmethod
    def _clipnorm_of(inner: Any, own: float | None) -> float | None:
        if own is None:
            return None
        check_setting("global_clipnorm", own)
        if (of_inner := getattr(inner, "global_clipnorm", None)) is not None:
            raise ValueError(
                f"global_clipnorm={own!r}, and the inner optimizer's is {of_inner!r}, so that gradients would be "
                "clipped twice; set one of the two"
            )
        return float(own)

    def _build_inner(self, variables: list[Any]) -> None:
        _inner.build(self.inner_optimizer, variables)

    def _apply_inner(self, grads: list[Any], variables: list[Any]) -> None:
        if is_keras_3(self.inner_optimizer):
            super()._apply_inner(grads, variables)
        else:
            _inner.apply_summed(self.inner_optimizer, grads, variables)

    # ---- names

    # The wrapper reads all names of `_names.NAMES` from its inner optimizer. The exception is while Keras's constructor
    # or `build` runs, which sets and reads its own defaults.
    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("inner_optimizer")  # copying and unpickling read attributes before it is set
        if name in _names.SETTINGS:
            return getattr(inner, name, _names.SETTINGS[name]) if self._is_initialised else _names.SETTINGS[name]
        if inner is not None and (name in _names.READ or _names.is_hyperparameter(self, name)):
            return getattr(inner, _names.spelled(name))
        if name == "get_updates":  # of legacy optimizers
            raise AttributeError(f"{type(self).__name__} has no get_updates; call minimize(loss, var_list)")
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not self._is_initialised and name in _names.NAMES and name != "inner_optimizer":
            return
        if not self._is_initialised or name.startswith("_") or name == "built":
            super().__setattr__(name, value)
            return
        inner = self.inner_optimizer
        if name == "iterations":
            _names.set_iterations(inner, value)
        elif name in _names.REMEDIES:
            raise AttributeError(f"{name}={describe(value)} cannot be set, {_names.REMEDIES[name]}")
        elif _names.is_hyperparameter(self, name):
            if not hasattr(inner, _names.spelled(name)):
                raise AttributeError(f"'{type(inner).__name__}' object has no attribute '{_names.spelled(name)}'")
            setattr(inner, _names.spelled(name), value)
        else:
            if name in _names.READ or (not hasattr(type(self), name) and hasattr(inner, name)):
                warn_caller(
                    f"{name} is set on the LossScaleOptimizer, where nothing reads it; set it on inner_optimizer "
                    "instead"
                )
            if name not in _names.READ:
                super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return _names.listed(super().__dir__(), self.inner_optimizer)


class _Steps:
    """What a wrapper knows of its own steps. TensorFlow's checkpoints do not look into it."""

    def __init__(self) -> None:
        self.has_begun = self.is_traced = False
        with tf.init_scope():
            first = tf.VariableAggregation.ONLY_FIRST_REPLICA
            self.missing = tf.Variable(0, trainable=False, dtype=tf.int64, aggregation=first)
            """The number of steps that missed a call."""
