"""`LossScaleOptimizer`: a Keras optimizer around another, which applies or skips each step as a whole."""

import functools
from collections.abc import Iterable
from typing import Any, NoReturn, cast

import keras
import tensorflow as tf

from lossscale_core import OnFloor, ScaleWatch, SpikeGuard
from lossscale_tf._guard import Guard
from lossscale_tf._retries import Tries
from lossscale_tf._state import StateVariables
from lossscale_tf._step import Step
from lossscale_tf._verbs import Gradient, Tree
from lossscale_tf._wrapper import require_single_wrapper
from lossscale_tf.keras._arguments import are_summed, keras_pairs, loss_arguments, require_gradients
from lossscale_tf.keras._checkpoint import SavedAttributes
from lossscale_tf.keras._config import policy_of_arguments, require_arguments
from lossscale_tf.keras._inner import build, build_once
from lossscale_tf.keras._proxy import InnerAttributes
from lossscale_tf.keras._scale_attributes import ScaleAttributes
from lossscale_tf.keras._scaling import Scaling
from lossscale_tf.keras._slots import Slots
from lossscale_tf.keras._updates import Updates

_unconverted = tf.autograph.experimental.do_not_convert  # converting these lines takes AutoGraph seconds, for nothing


# Keras's `compile` wraps any other optimizer in its own under mixed_float16, so that this is a subclass of Keras's:
# https://github.com/keras-team/keras/blob/v3.15.1/keras/src/trainers/trainer.py
@keras.saving.register_keras_serializable("lossscale")
class LossScaleOptimizer(InnerAttributes, ScaleAttributes, SavedAttributes, keras.optimizers.LossScaleOptimizer):
    """A Keras optimizer that scales the loss, unscales the gradients, and skips the steps that overflowed.

    ```python
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(), "dynamic")
    model.compile(optimizer, loss)            # under mixed_float16, fit scales by itself
    ```

    In a loop of your own call `minimize`, or `get_scaled_loss` before the tape's gradient, `get_unscaled_gradients`
    after it, then `apply_gradients`, as with `tf.keras.mixed_precision`. A skipped step changes neither variables nor
    slots nor `iterations`. In `tf.function` nothing synchronises with the host; eagerly, `apply_gradients` reads the
    flag and the state.

    Args:
        inner_optimizer: A Keras 3 or tf_keras optimizer; `optimizer` is an older name of this argument.
        loss_scale: Anything `as_policy` takes; or a bool, which stands for `dynamic`.
        initial_scale: The first scale of dynamic scaling, 2**15 if left out; or the scale, if `dynamic` is False.
        dynamic_growth_steps: The finite steps after which a dynamic scale grows; 2000 if left out.
        dynamic: Whether the scale adapts.
        policy: Anything `as_policy` takes, in the place of the four arguments before.
        global_clipnorm: The norm to clip unscaled gradients to, by the read that proves them finite.
        jit_compile: Whether XLA compiles the update alone, which is called where the gradients are finite.
        guard: A `SpikeGuard` that skips a step whose norm is far above the norms before it, and then leaves the loss
            scale and its counters as they were. The norm is that of the unscaled gradients before clipping. Eagerly,
            its `max_streak` raises a `SpikeStreakError`.
        on_floor: What an overflow does that brings the loss scale down to the policy's `min_scale`: `"warn"` logs a
            warning, `"raise"` raises a `ScaleFloorError`, and `"ignore"` says nothing while the scale is there. Eager
            steps do so by themselves; `fit` and `tf.function`, where `LossScaleLogger` or you call
            `check_overflow_streak`.
        name: The optimizer's name.
        **base_arguments: The other arguments of Keras's optimizers, which must have their defaults.

    Raises:
        TypeError: `inner_optimizer` is not a Keras optimizer, or scales the loss already.
        ValueError: The arguments contradict each other, or another wrapper has this optimizer.

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
        jit_compile: bool = False,
        guard: SpikeGuard | None = None,
        on_floor: OnFloor = "warn",
        name: str | None = None,
        optimizer: Any = None,
        **base_arguments: Any,
    ) -> None:
        inner = optimizer if inner_optimizer is None else inner_optimizer
        require_arguments(inner, global_clipnorm, guard, base_arguments)
        watch = ScaleWatch(on_floor)
        chosen = policy_of_arguments(policy, loss_scale, dynamic, initial_scale, dynamic_growth_steps)
        require_single_wrapper(self, inner)
        # After the checks, since Keras's constructor sets `loss_scale_factor` of the inner optimizer to None for good:
        # https://github.com/keras-team/keras/blob/v3.15.1/keras/src/optimizers/loss_scale_optimizer.py
        super().__init__(inner, name=name)
        # A checkpoint keeps these three under the names of the attributes; without a guard it has no variables of one.
        self._scale_state = StateVariables(chosen, functools.partial(_add_variable, self, ""))
        guarding = Guard.of(guard, functools.partial(_add_variable, self, "guard_"))
        self._guard_state = None if guarding is None else guarding.state
        self._used_scale = _variable_of_each_replica()
        self._step = Step(chosen, self._scale_state, global_clipnorm, guarding, watch)
        self._scaling = Scaling(self._step, self._used_scale)
        self._updates = Updates(inner, self._step, self._scaling, jit_compile)
        self._slots = Slots(inner)
        self._save_like(inner, self._step)
        self._is_initialised = True

    @property
    def steps_with_missing_calls(self) -> int:
        """How many steps of a loop of your own missed scaling or unscaling. Synchronises with the host."""
        return self._scaling.count_missing()

    @_unconverted
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

    @_unconverted
    def get_unscaled_gradients(self, grads: Tree) -> Tree:
        """Divide gradients by the scale that multiplied their own loss, though the next loss may be scaled already.

        Args:
            grads: A nested structure of tensors, `IndexedSlices` and None: gradients of a scaled loss.

        Returns:
            The gradients in the same structure, in float32 or wider.

        Raises:
            CallOrderError: It cannot be told which loss they are of; or they were unscaled before.

        """
        return self._scaling.unscale(grads)

    # Left to AutoGraph, which converts a user's loss only where it has converted all callers on the way to it.
    def minimize(
        self,
        loss: Any,
        var_list: Any,
        tape: tf.GradientTape | None = None,
        *,
        grad_loss: Any = None,
        name: str | None = None,
        retries: int = 0,
        protect: Any = (),
    ) -> None:
        """Scale `loss`, differentiate it, unscale and apply: a whole step, with `retries` again where it overflows.

        What is applied is bit for bit what a run would have applied that had begun at the scale of the last try, if
        `protect` names what the loss writes to. Each try is one update of the policy, and only the last one raises an
        `OverflowStreakError`. In a graph the tries are one `while_loop`, and the loss is traced once.

        Args:
            loss: A callable, or a tensor computed under `tape`.
            var_list: A variable, a list of them, or a callable that returns one.
            tape: The tape of a loss that is a tensor.
            grad_loss: The gradient of the loss itself, if it is not 1.
            name: Not used.
            retries: How often to run the loss again, at the scale to which the policy has lowered it, while gradients
                overflow. A policy that does not adapt is not retried.
            protect: Layers, modules, variables and generators of random numbers. Their non-trainable variables and
                states are, after each skipped try, what they were before it, such as BatchNormalization's moving
                averages and the seeds of Dropout.

        Raises:
            ValueError: The loss is a tensor and `tape` is missing, or no variable has a gradient; or `retries` or
                `protect` are given beside a tape, beside a layer that is not built, or under several replicas.
            PolicyError: `retries` is not a whole number from 0.
            TypeError: `protect` holds something else.

        """
        tries = Tries(self._step, retries, protect)
        tape, grad_loss = loss_arguments(loss, tape, grad_loss, runs_again=not tries.is_plain)
        differentiate = functools.partial(self._scaling.differentiate, loss, var_list, tape, grad_loss)
        tries.run(differentiate, functools.partial(self.apply_gradients, name=name))

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

    @_unconverted
    def apply_gradients(self, grads_and_vars: Any, name: str | None = None, **aggregation: Any) -> None:
        """Apply gradients where all of them are finite on every replica; else skip the step.

        Gradients are taken as unscaled, except where Keras scaled the loss itself (`fit`). They are summed over
        replicas first.

        Args:
            grads_and_vars: (gradient, variable) pairs; a gradient may be None.
            name: Not used.
            **aggregation: `experimental_aggregate_gradients=False` or `skip_gradients_aggregation=True` says that the
                gradients are summed already.

        Raises:
            TypeError: `grads_and_vars` is not a list of pairs.
            ValueError: No variable has a gradient.

        """
        pairs = keras_pairs(grads_and_vars)
        self._apply([grad for grad, _ in pairs], [variable for _, variable in pairs], are_summed(aggregation))

    @_unconverted
    def apply(self, grads: Iterable[Any], trainable_variables: Any = None) -> None:
        """Apply gradients of a scaled loss, unscaled here unless `get_unscaled_gradients` did; Keras 3's own entry.

        Args:
            grads: A gradient or None for each variable.
            trainable_variables: The variables; if left out, those that the optimizer was built with.

        Raises:
            CallOrderError: No loss was scaled, so that it cannot be told whether the gradients are.

        """
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        self._apply(list(grads), variables, is_summed=False, may_be_scaled=True)

    def stateless_apply(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `NotImplementedError`: this is Keras's way to train on JAX."""
        raise NotImplementedError("stateless_apply is for Keras on JAX; lossscale_jax.loss_scaled wraps optax there")

    def build(self, variables: Any) -> None:
        """Create the inner optimizer's variables.

        Args:
            variables: The list of the variables to train.

        """
        build(self.inner_optimizer, variables)
        with self._own_attributes():  # Keras shall not make averages and accumulators here, too
            keras.optimizers.Optimizer.build(self, variables)

    def _apply(self, grads: list[Any], variables: list[Any], is_summed: bool, may_be_scaled: bool = False) -> None:
        present = require_gradients(grads, variables)
        build_once(self, variables)
        self._updates.take(present, is_summed, may_be_scaled)


def _add_variable(optimizer: keras.optimizers.Optimizer, prefix: str, name: str, value: Any) -> tf.Variable:
    return optimizer.add_variable(
        shape=(),
        dtype=value.dtype.name,
        initializer=keras.initializers.Constant(value),
        # All replicas compute the same state. Without an aggregation none of them may set a mirrored variable:
        # https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/distribute/values_util.py#L329
        aggregation="only_first_replica",
        name=f"{prefix}{name}",
    )


def _variable_of_each_replica() -> tf.Variable:
    with tf.init_scope():
        return tf.Variable(
            1.0,
            trainable=False,
            name="used_loss_scale",
            # A replica sets it alone. A mirrored variable is set by a merge call, which no loop of a user's may hold:
            # https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/distribute/mirrored_run.py#L503
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
