"""`LossScaleOptimizer`: a subclass of `lossscale_keras`'s class with the methods that TensorFlow documents."""

import dataclasses
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Self, cast

import keras
import tensorflow as tf

import lossscale_keras
from lossscale_core import BaseScaling, SpikeGuard
from lossscale_core.adapters import describe, require_pairs, warn_caller
from lossscale_core.errors import CallOrderError
from lossscale_keras.forwarding import forwarded
from lossscale_keras.tensorflow import call_once, unconverted
from lossscale_tf._policies import policy_from_arguments, require_no_base_arguments
from lossscale_tf._verbs import Gradient, Tree, is_gradient, scale_by, times, unscale_by
from lossscale_tf._wrappers import mark_gradient, mark_of, origins, present_gradients, warn_if_resumed
from lossscale_tf.keras import _inner
from lossscale_tf.keras._slots import Slots

_apply_gradients: ContextVar[tuple[Any, bool]] = ContextVar("_apply_gradients", default=(None, False))
"""In a call of `apply_gradients`: its optimizer, and whether the gradients are already summed over the replicas."""


@keras.saving.register_keras_serializable("lossscale")
class LossScaleOptimizer(lossscale_keras.LossScaleOptimizer):
    """A Keras optimizer that scales the loss, unscales the gradients, and skips steps that overflow.

    ```python
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(), "dynamic")
    model.compile(optimizer, loss)            # under mixed_float16, fit scales the loss
    ```

    In a loop of your own, call `minimize`. Or call `get_scaled_loss` before the tape's gradient,
    `get_unscaled_gradients` after it, and then `apply_gradients`, as with `tf.keras.mixed_precision`. For everything
    else, see `lossscale_keras.LossScaleOptimizer`.

    Args:
        inner_optimizer: A Keras 3 or tf_keras optimizer. An older name of this argument is `optimizer`.
        loss_scale: "dynamic", which is the documented rule and starts at 2**15; a bool, as for `dynamic`; or anything
            else that `as_policy` accepts.
        initial_scale: The first scale of dynamic scaling, 2**15 if left out; or the scale, if `dynamic` is False.
        dynamic_growth_steps: The number of finite steps after which a dynamic scale grows; 2000 if left out.
        dynamic: Whether the scale changes during training.
        policy: Anything that `as_policy` accepts, instead of the four arguments above.
        global_clipnorm: As in `lossscale_keras`.
        guard: As in `lossscale_keras`.
        name: The name of the optimizer.
        **base_arguments: Other arguments of Keras's optimizers. Only their default values are allowed.

    Raises:
        TypeError: `inner_optimizer` is not a Keras optimizer, or it scales the loss already.
        ValueError: The arguments contradict each other, or the inner optimizer is in another wrapper.
        RuntimeError: Keras runs on a backend other than TensorFlow.
    """

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
        require_no_base_arguments(base_arguments)
        chosen = policy_from_arguments(policy, loss_scale, dynamic, initial_scale, dynamic_growth_steps)
        super().__init__(inner, chosen, guard=guard, global_clipnorm=global_clipnorm, name=name)
        self._slots = Slots(inner)
        self._steps = _Steps()

    def get_scaled_loss(self, loss: Tree) -> Tree:
        """Scale a loss. Pass the result to a tape's `gradient`.

        Args:
            loss: A tensor of any float dtype, a nested structure of them, or a callable that returns one.

        Returns:
            The scaled loss, in float32 or wider. For a callable, a callable that returns the scaled loss.

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
            loss: The scaled loss of these gradients, if you scaled another loss after it.

        Returns:
            The gradients in the same structure, in float32 or wider.

        Raises:
            CallOrderError: The gradients are unscaled already.
            ValueError: This optimizer did not scale `loss`.
        """
        if any((mark := mark_of(leaf, self._losses)) and mark.kind != "scaled" for leaf in tf.nest.flatten(grads)):
            raise CallOrderError("these gradients are unscaled already; call get_unscaled_gradients once a step")
        named = None if loss is None else self._named(loss)
        return self._unscaled(grads, self._losses.unscale(named), "unscaled")

    def _unscaled(self, grads: Any, loss: Any, kind: Any) -> Any:
        """Divide gradients by the scale of their loss, and mark them."""
        unscaled = unscale_by(grads, loss.loss_scale)
        for leaf, grad in zip(tf.nest.flatten(unscaled), tf.nest.flatten(grads), strict=True):
            if is_gradient(leaf):
                mark_gradient(loss, leaf, grad, kind)
        return unscaled

    # Not `unconverted`: AutoGraph converts a user's loss only if it has converted all callers in between.
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
        tape, grad_loss = _loss_arguments(loss, tape, grad_loss)
        # The multiplication must be recorded, too. Like tf_keras, enter the user's tape again, even if it is closed.
        tape = tape or tf.GradientTape()
        with tape:
            value = loss() if callable(loss) else loss
            self._require_unscaled(value)
            loss_scale = self._losses.current()
            scaled = scale_by(value, loss_scale)
        variables = tf.nest.flatten(var_list() if callable(var_list) else var_list)  # the loss may create them
        if grad_loss is not None:  # in the dtype of the scaled loss, which is float32 for a loss in float16
            grad_loss = tf.nest.map_structure(lambda grad, loss: tf.cast(grad, loss.dtype), grad_loss, scaled)
        return self._computed(tape.gradient(scaled, variables, output_gradients=grad_loss), variables, loss_scale)

    @unconverted
    def _computed(self, grads: Any, variables: list[Any], loss_scale: tf.Tensor) -> list[tuple[Any, Any]]:
        return list(zip(self._unscaled(grads, self._losses.compute(loss_scale), "computed"), variables, strict=True))

    def get_gradients(self, loss: Any, params: Any) -> list[Gradient]:
        """Return the unscaled gradients of a loss.

        Args:
            loss: A callable, or a tensor of the graph being built.
            params: A variable, or a list of them.

        Returns:
            A gradient for each variable, in float32 or wider.

        Raises:
            ValueError: The loss has no gradient with respect to a variable, or it is an eager tensor.
        """
        if callable(loss):
            pairs = self.compute_gradients(loss, params)
        elif tf.executing_eagerly():
            raise ValueError("an eager tensor has no graph to differentiate; pass a callable, or use a GradientTape")
        else:
            _inner.require_no_session()
            self._require_unscaled(loss)
            loss_scale, variables = self._losses.current(), tf.nest.flatten(params)
            pairs = self._computed(tf.gradients(scale_by(loss, loss_scale), variables), variables, loss_scale)
        if missing := [variable.name for grad, variable in pairs if grad is None]:
            raise ValueError(f"the loss has no gradient with respect to {', '.join(missing)}")
        return [grad for grad, _ in pairs]

    @unconverted
    def apply_gradients(self, grads_and_vars: Any, name: str | None = None, **aggregation: Any) -> None:
        """Apply gradients if all of them are finite on every replica, else skip the step.

        The gradients must be unscaled, unless `scale_loss` scaled the last loss, as in `fit`. The step first sums them
        over the replicas.

        Args:
            grads_and_vars: (gradient, variable) pairs; a gradient may be None.
            name: Not used.
            **aggregation: Pass `experimental_aggregate_gradients=False` or `skip_gradients_aggregation=True` if you
                have summed the gradients already.

        Returns:
            The count of applied steps. Eagerly it is the inner optimizer's variable. In a graph it is a tensor that is
                ready when the step has ended. Return it, or wait for it by `tf.control_dependencies`.

        Raises:
            CallOrderError: `get_scaled_loss` was called, but `get_unscaled_gradients` was never called and the scale
                was never read.
            TypeError: `grads_and_vars` is not a list of pairs.
            ValueError: No variable has a gradient.
        """
        grads, variables = _split_pairs(grads_and_vars)
        token = _apply_gradients.set((self, _are_summed(aggregation)))
        try:
            self.apply(grads, variables)  # so that a subclass may override `apply`, as in Keras
        finally:
            _apply_gradients.reset(token)
        iterations = self.inner_optimizer.iterations
        # TensorFlow lets a read wait for operations that may set the variable. Here, the branch with the step sets it.
        return iterations if tf.executing_eagerly() else tf.convert_to_tensor(iterations)

    @unconverted
    def apply(self, grads: Iterable[Any], trainable_variables: Any = None, *, loss: Any = None) -> None:
        """Apply gradients of a scaled loss. Unscale them first, unless `get_unscaled_gradients` has done so.

        Keras 3 calls this method in `fit`.

        Args:
            grads: A gradient or None for each variable.
            trainable_variables: The variables. If left out, the variables that the optimizer was built with.
            loss: The scaled loss of these gradients, if you scaled another loss after it.

        Raises:
            ValueError: This optimizer did not scale `loss`, or there are more or fewer gradients than variables.
        """
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        gradients = list(grads)
        self._require_same_number(gradients, variables)
        caller, is_summed = _apply_gradients.get()
        takes_scaled, is_summed = caller is not self, caller is self and is_summed
        named = None if loss is None else self._named(loss)
        gradients, variables = _present_gradients(gradients, variables)
        gradients, loss_scale = self._look_up(gradients, variables, takes_scaled, named)
        if not is_summed and (aggregate := _inner.own_aggregator(self.inner_optimizer)) is not None:
            gradients = gradients if loss_scale is None else unscale_by(gradients, loss_scale)
            gradients, loss_scale, is_summed = aggregate(gradients, variables), None, True
        if not self._steps.has_begun:
            call_once(self._warn_if_resumed)
        self._steps.is_traced |= not tf.executing_eagerly()
        self._take(gradients, variables, loss_scale, is_summed)

    @property
    def steps_with_missing_calls(self) -> int:
        """The number of steps of your loop without scaling or unscaling. Synchronises with the host."""
        return int(self._steps.missing.numpy())

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

    @initial_scale.setter
    def initial_scale(self, scale: float) -> None:
        raise AttributeError(f"initial_scale={describe(scale)} cannot be set; make the optimizer with another policy")

    @property
    def dynamic_growth_steps(self) -> int | None:
        """The policy's growth interval; None for a fixed scale.

        Setting it replaces the policy. The new interval may be below the current count. A step that is traced already
        keeps the old interval, and a warning says so.
        """
        return BaseScaling.of(self.policy).growth_interval if self.dynamic else None

    @dynamic_growth_steps.setter
    def dynamic_growth_steps(self, steps: int) -> None:
        if not self.dynamic:
            raise AttributeError(f"dynamic_growth_steps belongs to dynamic scaling, and the policy is {self.policy}")
        self.policy = dataclasses.replace(self.policy, growth_interval=steps)  # type: ignore[type-var]
        if self._steps.is_traced:
            warn_caller(
                f"dynamic_growth_steps={steps!r} does not reach a step that is traced already; trace it again, for "
                "fit by model.make_train_function(force=True)"
            )

    @property
    def weights(self) -> list[tf.Variable]:
        """The inner optimizer's variables, in the order in which it created them."""
        return self._slots.weights()

    @property
    def variables(self) -> list[Any]:
        """The variables of the wrapper, such as the state of the policy, then the variables of the inner optimizer.

        Around an optimizer of tf_keras you may also call the list, as in tf_keras. The call returns the list.
        """
        variables = [*self._variables, *self.weights]
        return variables if isinstance(self.inner_optimizer, keras.optimizers.Optimizer) else _CallableList(variables)

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

    def finalize_variable_values(self, var_list: Any) -> None:
        """Log events of the loss scale, and call the inner optimizer's method. Keras calls it at the end of `fit`."""
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
            config: A config of this wrapper, of Keras 3's wrapper, or of a wrapper of `tf.keras.mixed_precision`. This
                method does not change it.
            custom_objects: The user's classes that the inner optimizer's config names.

        Returns:
            The wrapper, around a new inner optimizer.
        """
        return cls(**_inner.arguments_of(config, custom_objects))

    def _warn_if_resumed(self) -> None:
        self._steps.has_begun = True
        with tf.init_scope():  # leaves a trace, because variables have values only outside of it
            if tf.executing_eagerly():
                warn_if_resumed(self.policy, self._state.copy(), self.inner_optimizer.iterations)

    def _look_up(
        self, grads: list[Any], variables: list[Any], takes_scaled: bool, named: Any
    ) -> tuple[list[Any], tf.Tensor | None]:
        """Return the gradients to apply, and the scale by which to divide them; None if they are unscaled."""
        marks = [mark_of(grad, self._losses) for grad in grads]
        scaled = [mark.loss for mark in marks if mark is not None and mark.kind == "scaled"]
        unscaled = next((mark.loss for mark in marks if mark is not None and mark.kind != "scaled"), None)
        if BaseScaling.of(self.policy).scales_losses:
            self._check_calls(takes_scaled, unscaled is not None, bool(scaled))
        if unscaled is not None:
            self._losses.forget(unscaled)
            pairs = zip(grads, variables, strict=True)
            # `get_unscaled_gradients` also divided the new values of float8 scales.
            grads = [times(grad, unscaled.loss_scale) if self._is_overwritten(v) else grad for grad, v in pairs]
            return origins(grads)
        if named is None and len(scaled) == len(grads) and all(loss is scaled[0] for loss in scaled):
            named = scaled[0]
        return grads, self._losses.divisor(takes_scaled) if named is None else named.loss_scale

    def _check_calls(self, takes_scaled: bool, has_unscaled: bool, has_scaled: bool) -> None:
        """Count a step without scaling or unscaling, and warn about the first such step.

        Raise `CallOrderError` if the loop cannot have divided the gradients of a scaled loss.
        """
        losses = self._losses
        calls = {"get_scaled_loss": losses.is_scaled, "get_unscaled_gradients": losses.is_unscaled or takes_scaled}
        missing = [name for name, is_made in calls.items() if not is_made]
        if missing == ["get_unscaled_gradients"] and not losses.is_read:
            raise CallOrderError(
                "get_scaled_loss was called and get_unscaled_gradients was not, so that these gradients seem to be "
                "multiplied by the loss scale; apply the result of get_unscaled_gradients(grads), or use minimize. If "
                "you have divided them, or their loss was not scaled, read optimizer.loss_scale before apply_gradients"
            )
        if missing or (has_unscaled and has_scaled):
            self._steps.missing.assign_add(1)  # when a traced step runs, not only when it is traced
            self._warn_once(
                f"{' and '.join(missing)} not called before apply_gradients; call get_scaled_loss before the tape's "
                "gradient and get_unscaled_gradients after it, each once a step, or use minimize"
                if missing
                else "some of these gradients were unscaled, and others were not; pass all of them to "
                "get_unscaled_gradients, and apply its result"
            )
        elif not has_unscaled:
            self._warn_if_divided(takes_scaled)

    # ---- calls to the inner optimizer, which may come from tf_keras

    _require_optimizer = staticmethod(_inner.require_optimizer)
    _build_inner = staticmethod(_inner.build)

    def _apply_inner(self, grads: list[Any], variables: list[Any]) -> None:
        if isinstance(self.inner_optimizer, keras.optimizers.Optimizer):
            super()._apply_inner(grads, variables)
        else:
            _inner.apply_summed(self.inner_optimizer, grads, variables)

    # ---- attributes of the inner optimizer

    beta_1, beta_2 = forwarded("beta_1"), forwarded("beta_2")
    momentum, rho, decay = forwarded("momentum"), forwarded("rho"), forwarded("decay")
    lr = forwarded("learning_rate")
    # Methods of tf_keras's optimizers that have nothing to do with scaling.
    add_weight, aggregate_gradients = forwarded("add_weight"), forwarded("aggregate_gradients")
    gradient_aggregator = forwarded("gradient_aggregator")

    @property
    def iterations(self) -> Any:
        """The inner optimizer's count of applied steps, to read and set."""
        return self.inner_optimizer.iterations

    @iterations.setter
    def iterations(self, value: Any) -> None:
        _inner.set_iterations(self.inner_optimizer, value)

    @property
    def epsilon(self) -> float:
        """An attribute without effect: in TensorFlow's documents, `epsilon` is not a hyperparameter of the wrapper."""
        if "epsilon" not in self.__dict__:
            raise AttributeError
        return self.__dict__["epsilon"]

    @epsilon.setter
    def epsilon(self, value: float) -> None:
        warn_caller(
            "epsilon is set on the LossScaleOptimizer, where nothing reads it; set it on inner_optimizer instead"
        )
        self.__dict__["epsilon"] = value

    def __getattr__(self, name: str) -> Any:
        if name == "get_updates":  # of legacy optimizers
            raise AttributeError(f"{type(self).__name__} has no get_updates; call minimize(loss, var_list)")
        return super().__getattr__(name)

    def __dir__(self) -> list[str]:
        # TensorFlow's checkpoints look for untracked slots in every object that lists this name. They find the slots in
        # the inner optimizer already, and would save them twice.
        return [name for name in super().__dir__() if name != "get_slot_names"]


class _Steps:
    """Flags and a counter for the steps of a wrapper, in an object that TensorFlow's checkpoints do not save."""

    def __init__(self) -> None:
        self.has_begun = self.is_traced = False
        with tf.init_scope():
            first = tf.VariableAggregation.ONLY_FIRST_REPLICA
            self.missing = tf.Variable(0, trainable=False, dtype=tf.int64, aggregation=first)
            """The number of steps without scaling or unscaling."""


class _CallableList(list[Any]):
    """A list that returns itself if you call it, like `variables` of tf_keras's optimizers."""

    def __call__(self) -> "_CallableList":
        return self


def _loss_arguments(loss: Any, tape: Any, grad_loss: Any) -> tuple[tf.GradientTape | None, Any]:
    """Return the tape and `grad_loss` of a loss; raise `ValueError` if the tape is missing."""
    if not callable(loss) and tape is None:
        raise ValueError("a loss that is a tensor needs the tape it was computed under; pass tape=, or a callable")
    if tape is not None and not isinstance(tape, tf.GradientTape):  # in an older signature, grad_loss was third
        return None, tape
    return tape, grad_loss


def _split_pairs(grads_and_vars: Any) -> tuple[list[Any], list[Any]]:
    """Return the gradients and the variables of pairs; raise `TypeError` for values other than pairs."""
    pairs = require_pairs(grads_and_vars, "apply_gradients")
    if not pairs:
        raise ValueError("grads_and_vars is empty, so that no variable has a gradient; pass (gradient, variable) pairs")
    for _, variable in pairs:
        if not isinstance(variable, tf.Variable | keras.Variable):
            raise TypeError(f"{variable!r} is not a variable; grads_and_vars must be (gradient, variable) pairs")
    grads, variables = zip(*pairs, strict=True)
    return list(grads), list(variables)


def _are_summed(aggregation: dict[str, Any]) -> bool:
    """Return whether an argument of tf_keras's two interfaces says that gradients are already summed over replicas."""
    are_to_be_summed = bool(aggregation.pop("experimental_aggregate_gradients", True))
    are_to_be_summed &= not aggregation.pop("skip_gradients_aggregation", False)
    if aggregation:
        raise TypeError(f"apply_gradients() got an unexpected keyword argument {next(iter(aggregation))!r}")
    return not are_to_be_summed


def _present_gradients(grads: list[Any], variables: list[Any]) -> tuple[list[Gradient], list[Any]]:
    """Return the gradients that are not None, and their variables; raise an error if there are none."""
    _inner.require_no_session()
    pairs = present_gradients(zip(grads, variables, strict=True))
    if not pairs:
        raise ValueError(f"none of the variables {[v.name for v in variables]} has a gradient")
    if len(pairs) < len(variables):
        missing = [v.name for grad, v in zip(grads, variables, strict=True) if grad is None]
        warn_caller(f"no gradient exists for {', '.join(missing)}; they keep their values")
    for tensor, _ in pairs:
        if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
            raise TypeError(f"a gradient of dtype {tensor.dtype.name} cannot be applied; differentiate floats")
    return [grad for grad, _ in pairs], [variable for _, variable in pairs]
