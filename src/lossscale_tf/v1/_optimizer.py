"""`LossScaleOptimizer` of `tf.compat.v1`: an optimizer around another, in graphs with sessions and eagerly."""

import functools
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lossscale_core import ScaleWatch, SpikeGuard, as_policy
from lossscale_core.adapters import check_guard, shown
from lossscale_tf._calls import Calls, mark_gradient, origins
from lossscale_tf._documented import DynamicLossScale, require_policy_or_number
from lossscale_tf._guard import Guard
from lossscale_tf._state import StateVariables
from lossscale_tf._step import Step, cast_to_variables, merges_replicas
from lossscale_tf._verbs import Gradient, as_tensor, cast_for, lifted, scale
from lossscale_tf._wrapper import (
    Wrapper,
    pairs_of,
    require_clipnorm,
    scales_already,
    share_deferred_restorations,
)
from lossscale_tf.v1._foreign import warn_of_foreign

_Optimizer: Any = tf.compat.v1.train.Optimizer


class LossScaleOptimizer(Wrapper, _Optimizer):
    """A `tf.compat.v1.train.Optimizer` that scales the loss, unscales the gradients, and skips steps that overflow.

    The state's variables are in `GLOBAL_VARIABLES`, so that a `Saver` saves them. In a graph nothing synchronises with
    the host; eagerly, `apply_gradients` reads the flag and the state.

    Args:
        opt: The optimizer to wrap.
        loss_scale_manager: Anything that `as_policy` accepts; "dynamic" means `DynamicLossScale()`, from 2**15.
        use_locking: As for any `tf.compat.v1.train.Optimizer`; by default, that of the wrapped optimizer.
        name: The name of the operations; by default, that of the wrapped optimizer.
        loss_scale: Another name of `loss_scale_manager`.
        global_clipnorm: The norm to clip unscaled gradients to, in the same read as the finiteness check.
        guard: A `SpikeGuard`, which skips a step if its norm is far above the norms before it, and then leaves the loss
            scale and its counters unchanged.

    Raises:
        TypeError: `opt` is not such an optimizer, or scales the loss already.
        ValueError: `loss_scale_manager` and `loss_scale` are both given, or neither is; or `name` is malformed.
        PolicyError: The loss scale, the norm or the guard is not valid.

    """

    def __init__(
        self,
        opt: Any,
        loss_scale_manager: Any = None,
        use_locking: bool | None = None,
        name: str | None = None,
        *,
        loss_scale: Any = None,
        global_clipnorm: float | None = None,
        guard: SpikeGuard | None = None,
    ) -> None:
        _require_optimizer(opt)
        if (loss_scale_manager is None) == (loss_scale is None):
            raise ValueError("loss_scale must be given, or loss_scale_manager: a policy, a number, or 'dynamic'")
        chosen = loss_scale if loss_scale_manager is None else loss_scale_manager
        require_policy_or_number(chosen)
        require_clipnorm(global_clipnorm)
        check_guard(guard)
        name = opt.get_name() if name is None else name
        _require_name(name)
        super().__init__(opt._use_locking if use_locking is None else use_locking, name)
        self._optimizer = opt
        policy = DynamicLossScale() if isinstance(chosen, str) and chosen == "dynamic" else as_policy(chosen)
        with tf.name_scope(f"{name}_loss_scale"):
            state = StateVariables(policy, _variable)
        with tf.name_scope(f"{name}_spike_guard"):
            guarding = Guard.of(guard, _variable)
        self._step = Step(policy, state, global_clipnorm, guarding, ScaleWatch())
        self._calls = Calls()
        share_deferred_restorations(self, opt)

    @property
    def loss_scale(self) -> tf.Variable:
        """The variable that holds the loss scale: float32, of shape `()`."""
        return self._step.state.loss_scale

    def compute_gradients(
        self,
        loss: Any,
        var_list: Any = None,
        gate_gradients: int = _Optimizer.GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: Any = None,
    ) -> list[tuple[Gradient | None, Any]]:
        """Scale the loss, differentiate it, and unscale the gradients. Halves are scaled and unscaled in float32.

        Args:
            loss: A tensor, or a callable without arguments, as it must be eagerly.
            var_list: The variables; if left out, the trainable ones, or eagerly those that the loss reads.
            gate_gradients: As for any `tf.compat.v1.train.Optimizer`; ignored eagerly, like the next three.
            aggregation_method: As there.
            colocate_gradients_with_ops: As there.
            grad_loss: The gradient of the loss itself, if it is not 1.

        Returns:
            (gradient, variable) pairs, unscaled, in the variables' dtypes; a gradient may be None.

        Raises:
            ValueError: A member of `var_list` is not a variable.

        """
        _require_variables([] if var_list is None else tf.nest.flatten(var_list))
        grad_loss = None if grad_loss is None or tf.executing_eagerly() else lifted(grad_loss)
        state = self._step.state.read()
        scaled = (lambda: scale(loss(), state)) if callable(loss) else scale(loss, state)
        pairs = self._optimizer.compute_gradients(
            scaled, var_list, gate_gradients, aggregation_method, colocate_gradients_with_ops, grad_loss
        )
        inverse = 1.0 / state.loss_scale
        unscaled = [(None if grad is None else cast_for(each, grad, inverse), each) for grad, each in pairs]
        record = self._calls.scale_and_unscale(state.loss_scale, [variable for _, variable in pairs])
        for (leaf, _), (grad, _) in zip(unscaled, pairs, strict=True):
            if leaf is not None:
                mark_gradient(leaf, record, grad, state.loss_scale)
        return unscaled

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(
        self, grads_and_vars: Any, global_step: tf.Variable | None = None, name: str | None = None
    ) -> tf.Operation | None:
        """Apply unscaled gradients if all of them are finite on every replica, else change nothing.

        A warning is issued if the gradients cannot come from `compute_gradients`.

        Args:
            grads_and_vars: (gradient, variable) pairs; a gradient may be None.
            global_step: A variable that counts applied steps.
            name: The name of the operation; by default, that given to the constructor.

        Returns:
            The operation in a graph, None eagerly.

        Raises:
            TypeError: `grads_and_vars` is not a list of pairs.
            ValueError: No variable has a gradient, or one of them is not a variable.
            RuntimeError: The call is made in a cross-replica context.

        """
        if tf.distribute.in_cross_replica_context():
            raise RuntimeError("gradients are applied in a replica context; call this inside strategy.run")
        if global_step is not None and tf.executing_eagerly():
            self._step.warn_if_resumed(global_step)
        pairs = _pairs(grads_and_vars)
        present = [(as_tensor(grad), variable) for grad, variable in pairs if grad is not None]
        if not present:
            raise ValueError(f"No gradients provided for any variable: {[v.name for _, v in pairs]}.")
        grads, variables = [grad for grad, _ in present], [variable for _, variable in present]
        warn_of_foreign(self._calls, grads, variables)
        self._create_slots_outside_of_branches(variables)
        grads, loss_scale = origins(grads)

        def update(grads: Sequence[Gradient], factor: tf.Tensor | None, variables: list[Any]) -> Any:
            pairs = zip(cast_to_variables(grads, variables, factor), variables, strict=True)
            return self._optimizer.apply_gradients(pairs, global_step=global_step)

        train_op = functools.partial(_as_train_op, name or f"{self.get_name()}_apply", _train_ops())
        return self._step.take(grads, variables, loss_scale, update, train_op)

    def get_slot(self, var: Any, name: str) -> tf.Variable | None:
        """Return the wrapped optimizer's slot for `var`, or None."""
        return self._optimizer.get_slot(var, name)

    def get_slot_names(self) -> list[str]:
        """Return the names of the wrapped optimizer's slots."""
        return self._optimizer.get_slot_names()

    def variables(self) -> list[tf.Variable]:
        """Return the wrapped optimizer's variables, then those of the states of loss scale and guard."""
        return [*self._optimizer.variables(), *(each for state in self._states().values() for each in state.all)]

    def _trackable_children(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the objects in a checkpoint: those of the wrapped optimizer, under its names, and the states."""
        return {**self._optimizer._trackable_children(*args, **kwargs), **self._states()}

    def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name in self._states():
            return self._states()[name]
        return self._optimizer._lookup_dependency(name, *args, **kwargs)

    def _states(self) -> dict[str, StateVariables]:
        """Return the states of loss scale and guard, under their names in a checkpoint."""
        guard = self._step.guard
        return {"loss_scale_state": self._step.state, **({} if guard is None else {"spike_guard_state": guard.state})}

    def _create_or_restore_slot_variable(self, *args: Any, **kwargs: Any) -> None:
        self._optimizer._create_or_restore_slot_variable(*args, **kwargs)

    def _create_slots_outside_of_branches(self, variables: list[Any]) -> None:
        """Create the slots in the place where the wrapped optimizer would, so that their names are the same."""
        if not tf.executing_eagerly() and not merges_replicas():
            with tf.init_scope():
                self._optimizer._create_slots(variables)


# https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/framework/ops.py#L1014
_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")
"""The names that TensorFlow accepts for a scope in a graph."""


def _train_ops() -> list[Any]:
    return list(tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.TRAIN_OP))


def _as_train_op(name: str, others: list[Any], *done: Any) -> tf.Operation:
    """Return the operation of a whole step, and add it and `others` to the collection of train operations."""
    step = tf.group(*done, name=name)
    # The wrapped optimizer has added its own operation, which is within the branch and cannot be run.
    tf.compat.v1.get_collection_ref(tf.compat.v1.GraphKeys.TRAIN_OP)[:] = [*others, step]
    return step


def _variable(name: str, value: Any) -> tf.Variable:
    if tf.executing_eagerly():
        return tf.Variable(value, trainable=False, name=name, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
    # After `disable_v2_behavior` the default is a reference variable; a value that was read may change later.
    return tf.compat.v1.Variable(
        value, trainable=False, name=name, use_resource=True, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
    )


def _require_name(name: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"name={name!r} must begin with a letter, a digit or a dot, and may continue with these and _ \\ / > -"
        )


def _require_optimizer(opt: Any) -> None:
    if scales_already(opt):
        raise TypeError("this optimizer scales the loss already; wrap the optimizer once")
    if not isinstance(opt, _Optimizer):
        raise TypeError(
            f"opt={shown(opt)} must be a tf.compat.v1.train.Optimizer; wrap a Keras optimizer by "
            "lossscale_tf.LossScaleOptimizer"
        )


def _pairs(grads_and_vars: Any) -> list[tuple[Any, Any]]:
    pairs = pairs_of(grads_and_vars)
    _require_variables([variable for _, variable in pairs])
    return pairs


def _require_variables(variables: list[Any]) -> None:
    for variable in variables:
        if not isinstance(variable, tf.Variable):
            raise ValueError(f"{variable!r} is not a tf.Variable; gradients are taken of variables and applied to them")
