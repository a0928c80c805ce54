"""`LossScaleOptimizer` of `tf.compat.v1`: a wrapper around an optimizer, in graphs with sessions and eagerly."""

import functools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from lossscale_core import ScaleState, ScalingPolicy, StepInfo, check_limits, metrics, state_from_dict, state_to_dict
from lossscale_core.adapters import describe, require_pairs, warn_caller
from lossscale_keras.tensorflow import merges_replicas
from lossscale_tf._policies import policy_from_loss_scale, require_no_manager
from lossscale_tf._verbs import Gradient, at_least_float32, cast_for, scale
from lossscale_tf._wrappers import mark_gradient, origins, present_gradients, scales_already, warn_if_resumed
from lossscale_tf.v1._step import Step

_Optimizer: Any = tf.compat.v1.train.Optimizer


class LossScaleOptimizer(_Optimizer):
    """A `tf.compat.v1.train.Optimizer` that scales the loss, unscales the gradients, and skips steps that overflow.

    The variables of the state are in `GLOBAL_VARIABLES`, so that a `Saver` saves them. In a graph nothing synchronises
    with the host. Eagerly, `apply_gradients` reads the flag and the state.

    Args:
        opt: The optimizer to wrap.
        loss_scale_manager: Anything that `as_policy` accepts. "dynamic" means `DynamicLossScale()`, which starts at
            2**15.
        use_locking: As for any `tf.compat.v1.train.Optimizer`. By default, the setting of the wrapped optimizer.
        name: The name of the operations. By default, the name of the wrapped optimizer.
        loss_scale: Another name of `loss_scale_manager`.

    Raises:
        TypeError: `opt` is not a `tf.compat.v1.train.Optimizer`, or it scales the loss already.
        ValueError: `loss_scale_manager` and `loss_scale` are both set, or neither is set; or `name` is malformed.
        PolicyError: The loss scale is not valid.
    """

    def __init__(
        self,
        opt: Any,
        loss_scale_manager: Any = None,
        use_locking: bool | None = None,
        name: str | None = None,
        *,
        loss_scale: Any = None,
    ) -> None:
        _require_optimizer(opt)
        if (loss_scale_manager is None) == (loss_scale is None):
            raise ValueError("loss_scale must be given, or loss_scale_manager: a policy, a number, or 'dynamic'")
        chosen = loss_scale if loss_scale_manager is None else loss_scale_manager
        require_no_manager(chosen)
        name = opt.get_name() if name is None else name
        _require_name(name)
        super().__init__(opt._use_locking if use_locking is None else use_locking, name)
        self._optimizer = opt
        with tf.name_scope(f"{name}_loss_scale"):
            self._step = Step(policy_from_loss_scale(chosen))
        self._warns_of_gradients = True  # until `compute_gradients` is called
        _share_deferred_restorations(self, opt)

    @property
    def policy(self) -> ScalingPolicy:
        """The scaling policy."""
        return self._step.policy

    @property
    def last_step(self) -> StepInfo | None:
        """The outcome of the last eager step, or None. In a graph, let `step_info` compare two states instead."""
        return self._step.last_step

    @property
    def scale_state(self) -> ScaleState:
        """The policy's state, as tensors of shape `()`."""
        return self._step.state.read()

    @property
    def loss_scale(self) -> tf.Variable:
        """The variable that holds the loss scale: float32, of shape `()`."""
        return self._step.state.loss_scale

    def metrics(self) -> dict[str, tf.Tensor]:
        """Return the state's numbers under stable names; see `lossscale_core.metrics`. Does not synchronise."""
        return metrics(self.scale_state)

    def diagnose(self) -> str:
        """Describe the condition of loss scaling in one or two sentences; see `lossscale_core.diagnose`. Eager only.

        Synchronises with the host.
        """
        return self._step.watch.diagnose(self.policy, self._step.state.read_on_host())

    def check_limits(self) -> None:
        """Log events, and raise an error if a limit is reached. Synchronises with the host.

        Each eager step does this. Call this method if a `tf.function` takes the steps.

        Raises:
            OverflowStreakError: The policy's `max_overflow_streak` is reached.
        """
        check_limits(self.policy, self._read_and_log() if tf.executing_eagerly() else self.scale_state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the policy as plain numbers, which other frameworks can load.

        `tf.train.Checkpoint` and a `Saver` save the state without this method. This method works only eagerly. In a
        graph, run `scale_state` in a session and pass the result to `lossscale_core.state_to_dict`. Synchronises with
        the host.
        """
        return state_to_dict(self._read_and_log(), self.policy)

    def load_state_dict(self, saved: Mapping[str, Any]) -> tf.Operation | None:
        """Continue from a saved state, with the policy of this optimizer.

        A `CheckpointWarning` names each setting that differs from the saved policy.

        Args:
            saved: The result of `state_dict`, or of `lossscale_core.state_to_dict` in any framework.

        Returns:
            The operation to run in a session of the graph. None eagerly, because the state is set already.

        Raises:
            CheckpointError: `saved` is not a saved state, or a newer version of this package wrote it.
        """
        assigned = self._step.restart(state_from_dict(saved, self.policy))
        return None if tf.executing_eagerly() else tf.group(*assigned)

    def _read_and_log(self) -> ScaleState:
        """Return the state as host scalars, and log events of the loss scale."""
        state: ScaleState = self._step.state.read_on_host()
        self._step.watch.log(self.policy, state)
        return state

    def compute_gradients(
        self,
        loss: Any,
        var_list: Any = None,
        gate_gradients: int = _Optimizer.GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: Any = None,
    ) -> list[tuple[Gradient | None, Any]]:
        """Scale the loss, differentiate it, and unscale the gradients, in float32 or wider.

        Args:
            loss: A tensor, or a callable without arguments. Eagerly it must be a callable.
            var_list: The variables. If left out, the trainable variables, or eagerly the variables that the loss reads.
            gate_gradients: As for any `tf.compat.v1.train.Optimizer`. Eagerly this argument and the next three have no
                effect.
            aggregation_method: As for any `tf.compat.v1.train.Optimizer`.
            colocate_gradients_with_ops: As for any `tf.compat.v1.train.Optimizer`.
            grad_loss: The gradient of the loss itself, if it is not 1.

        Returns:
            (gradient, variable) pairs, unscaled, in the variables' dtypes; a gradient may be None.

        Raises:
            ValueError: A member of `var_list` is not a variable.
        """
        _require_variables([] if var_list is None else tf.nest.flatten(var_list))
        grad_loss = None if grad_loss is None or tf.executing_eagerly() else at_least_float32(grad_loss)
        state = self._step.state.read()
        scaled = (lambda: scale(loss(), state)) if callable(loss) else scale(loss, state)
        pairs = self._optimizer.compute_gradients(
            scaled, var_list, gate_gradients, aggregation_method, colocate_gradients_with_ops, grad_loss
        )
        inverse = 1.0 / state.loss_scale
        unscaled = [(None if grad is None else cast_for(v, grad, inverse), v) for grad, v in pairs]
        scaled_loss = _ScaledLoss(self, state.loss_scale)
        for (leaf, _), (grad, _) in zip(unscaled, pairs, strict=True):
            if leaf is not None:
                mark_gradient(scaled_loss, leaf, grad, "computed")
        self._warns_of_gradients = False
        return unscaled

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(
        self, grads_and_vars: Any, global_step: tf.Variable | None = None, name: str | None = None
    ) -> tf.Operation | None:
        """Apply unscaled gradients if all of them are finite on every replica, else skip the step.

        If `compute_gradients` was never called, a warning says once that the loss of these gradients was not scaled.

        Args:
            grads_and_vars: (gradient, variable) pairs; a gradient may be None.
            global_step: A variable that counts applied steps.
            name: The name of the operation. By default, the constructor's `name` with the suffix `_apply`.

        Returns:
            The operation of the step in a graph; None eagerly.

        Raises:
            TypeError: `grads_and_vars` is not a list of pairs.
            ValueError: No variable has a gradient, or a value is not a variable.
            RuntimeError: The caller is in a cross-replica context.
        """
        if tf.distribute.in_cross_replica_context():
            raise RuntimeError("gradients are applied in a replica context; call this inside strategy.run")
        if global_step is not None and tf.executing_eagerly() and self.last_step is None:
            warn_if_resumed(self.policy, self.scale_state, global_step)
        pairs = require_pairs(grads_and_vars, "apply_gradients")
        _require_variables([variable for _, variable in pairs])
        present = present_gradients(pairs)
        if not present:
            raise ValueError(f"No gradients provided for any variable: {[v.name for _, v in pairs]}.")
        grads, variables = [grad for grad, _ in present], [variable for _, variable in present]
        if self._warns_of_gradients:
            self._warns_of_gradients = False
            warn_caller(
                "these gradients cannot come from this optimizer's compute_gradients, so their loss was not scaled; "
                "call compute_gradients or minimize"
            )
        if not tf.executing_eagerly() and not merges_replicas():
            # The slots are made outside of the branch that applies the step: the wrapper must not change their names.
            with tf.init_scope():
                self._optimizer._create_slots(variables)
        grads, loss_scale = origins(grads)

        def update(grads: list[Gradient]) -> Any:
            return self._optimizer.apply_gradients(zip(grads, variables, strict=True), global_step=global_step)

        others = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.TRAIN_OP)
        train_op = functools.partial(_as_train_op, name or f"{self.get_name()}_apply", others)
        return self._step.take(grads, variables, loss_scale, update, train_op)

    def get_slot(self, var: Any, name: str) -> tf.Variable | None:
        """Return the slot of the wrapped optimizer for `var`, or None."""
        return self._optimizer.get_slot(var, name)

    def get_slot_names(self) -> list[str]:
        """Return the names of the wrapped optimizer's slots."""
        return self._optimizer.get_slot_names()

    def variables(self) -> list[tf.Variable]:
        """Return the variables of the wrapped optimizer, then the variables of the policy's state."""
        return [*self._optimizer.variables(), *self._step.state.all]

    def _trackable_children(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the objects of a checkpoint: the objects of the wrapped optimizer, and the policy's state."""
        return {**self._optimizer._trackable_children(*args, **kwargs), "loss_scale_state": self._step.state}

    def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "loss_scale_state":
            return self._step.state
        return self._optimizer._lookup_dependency(name, *args, **kwargs)

    def _create_or_restore_slot_variable(self, *args: Any, **kwargs: Any) -> None:
        self._optimizer._create_or_restore_slot_variable(*args, **kwargs)


class _ScaledLoss(NamedTuple):
    """The scale of the loss of `compute_gradients`, and its optimizer, for the marks of the gradients."""

    owner: LossScaleOptimizer
    loss_scale: tf.Tensor


# https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/framework/ops.py#L1014
_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")
"""The names that TensorFlow accepts for a scope in a graph."""


def _as_train_op(name: str, others: list[Any], *done: Any) -> tf.Operation:
    """Return the operation of a whole step, and set the collection of train operations to it and `others`."""
    step = tf.group(*done, name=name)
    # The wrapped optimizer has added its own operation, which is in a branch, so that a session cannot run it.
    tf.compat.v1.get_collection_ref(tf.compat.v1.GraphKeys.TRAIN_OP)[:] = [*others, step]
    return step


def _share_deferred_restorations(wrapper: Any, inner: Any) -> None:
    """Let `inner` find the values of a checkpoint for variables that it creates later.

    A checkpoint contains the variables of `inner` as children of the wrapper. TensorFlow therefore keeps the values in
    a dictionary of the wrapper. But an optimizer that creates a variable looks into its own dictionary:
    https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/trackable/base.py#L601
    """
    wrapper._maybe_initialize_trackable()
    inner._maybe_initialize_trackable()
    # `vars` avoids TensorFlow's tracking of attributes.
    vars(inner)["_self_unconditional_deferred_dependencies"] = wrapper._deferred_dependencies


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
            f"opt={describe(opt)} must be a tf.compat.v1.train.Optimizer; wrap a Keras optimizer by "
            "lossscale_tf.LossScaleOptimizer"
        )


def _require_variables(variables: list[Any]) -> None:
    for variable in variables:
        if not isinstance(variable, tf.Variable):
            raise ValueError(f"{variable!r} is not a tf.Variable; pass the variables that the loss depends on")
