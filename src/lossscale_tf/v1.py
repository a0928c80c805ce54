"""Loss scaling around the optimizers of `tf.compat.v1.train`, in graphs with sessions and eagerly.

```python
optimizer = v1.LossScaleOptimizer(tf.compat.v1.train.AdamOptimizer(), "dynamic")
train_op = optimizer.minimize(loss, global_step)
```

Follows the interfaces of `tf.contrib.mixed_precision` and `tf.compat.v1.mixed_precision`, whose managers and loss
scales are functions here that return policies.
"""

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lossscale_core import as_policy
from lossscale_tf._documented import (
    DynamicLossScale,
    ExponentialUpdateLossScaleManager,
    FixedLossScale,
    FixedLossScaleManager,
    require_policy_or_number,
)
from lossscale_tf._grads import fitted, lifted, mark_origin, origins, scale
from lossscale_tf._in_flight import dependencies, values_of
from lossscale_tf._state import StateVariables
from lossscale_tf._trace import Traces
from lossscale_tf._wrapper import (
    StepLock,
    Wrapper,
    decide_together,
    merges_replicas,
    pairs_of,
    require_clipnorm,
    scales_already,
    share_deferred_restorations,
)

__all__ = [
    "DynamicLossScale",
    "ExponentialUpdateLossScaleManager",
    "FixedLossScale",
    "FixedLossScaleManager",
    "LossScaleOptimizer",
    "MixedPrecisionLossScaleOptimizer",
]

_Optimizer: Any = tf.compat.v1.train.Optimizer


class LossScaleOptimizer(Wrapper, _Optimizer):
    """A `tf.compat.v1.train.Optimizer` that scales the loss, unscales the gradients, and skips what overflowed.

    `opt` is the optimizer to wrap, `loss_scale_manager` (or `loss_scale`) anything `as_policy` takes; "dynamic" is
    `DynamicLossScale()` with its 2**15. `use_locking` and `name` default to the wrapped optimizer's. `global_clipnorm`
    clips the unscaled gradients to that norm by the read that proves them finite. The state's variables are in
    `GLOBAL_VARIABLES`, so that a `Saver` keeps them. In a graph nothing synchronises with the host; eagerly,
    `apply_gradients` reads the flag and the state. Raises `TypeError` for what is no such optimizer, or wraps one
    already.
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
    ) -> None:
        _require_optimizer(opt)
        if (loss_scale_manager is None) == (loss_scale is None):
            raise ValueError("loss_scale must be given, or loss_scale_manager: a policy, a number, or 'dynamic'")
        chosen = loss_scale if loss_scale_manager is None else loss_scale_manager
        require_policy_or_number(chosen)
        require_clipnorm(global_clipnorm)
        name = opt.get_name() if name is None else name
        _require_name(name)
        super().__init__(opt._use_locking if use_locking is None else use_locking, name)
        self._optimizer = opt
        self._policy = DynamicLossScale() if isinstance(chosen, str) and chosen == "dynamic" else as_policy(chosen)
        self._max_norm = global_clipnorm
        with tf.name_scope(f"{name}_loss_scale"):
            self._scale_state = StateVariables(self._policy, _variable)
        self._traces = Traces()
        self._one_at_a_time = StepLock()
        share_deferred_restorations(self, opt)

    @property
    def loss_scale(self) -> Any:
        """The variable that holds the loss scale."""
        return self._scale_state.loss_scale

    def compute_gradients(
        self,
        loss: Any,
        var_list: Any = None,
        gate_gradients: int = _Optimizer.GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: Any = None,
    ) -> list[tuple[Any, Any]]:
        """Return (gradient, variable) pairs of `loss`, unscaled, in the variables' dtypes; a gradient may be None.

        `loss` is a tensor, or a callable without arguments, as it must be eagerly. Halves are scaled and unscaled in
        float32. The other arguments are those of `tf.compat.v1.train.Optimizer`; the last four do nothing eagerly.
        Raises `ValueError` for what is no variable.
        """
        _require_variables([] if var_list is None else tf.nest.flatten(var_list))
        grad_loss = None if grad_loss is None or tf.executing_eagerly() else lifted(grad_loss)
        state = self._scale_state.read()
        scaled = (lambda: scale(loss(), state)) if callable(loss) else scale(loss, state)
        pairs = self._optimizer.compute_gradients(
            scaled, var_list, gate_gradients, aggregation_method, colocate_gradients_with_ops, grad_loss
        )
        self._traces.begin("compute_gradients")
        inverse = 1.0 / state.loss_scale
        unscaled = [(fitted(grad, variable, inverse), variable) for grad, variable in pairs]
        for (leaf, _), (grad, _) in zip(unscaled, pairs, strict=True):
            mark_origin(leaf, grad, state.loss_scale)
        self._traces.remember_in_graph(values_of(leaf) for leaf, _ in unscaled if leaf is not None)
        return unscaled

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Apply unscaled gradients where all of them are finite on every replica; else leave everything as it was.

        `global_step` counts applied steps. Returns the operation in a graph and None eagerly. Raises `ValueError` where
        no variable has a gradient or one is no variable, `TypeError` for what is no list of pairs, and `RuntimeError`
        in a cross-replica context. Warns where the gradients cannot come from `compute_gradients`.
        """
        if tf.distribute.in_cross_replica_context():
            raise RuntimeError("gradients are applied in a replica context; call this inside strategy.run")
        if global_step is not None and tf.executing_eagerly():
            self._warn_of_lost_state(global_step)
        pairs = _pairs(grads_and_vars)
        present = [(grad, variable) for grad, variable in pairs if grad is not None]
        if not present:
            raise ValueError(f"No gradients provided for any variable: {[v.name for _, v in pairs]}.")
        variables = [variable for _, variable in present]
        self._warn_of_foreign_gradients([grad for grad, _ in present], variables)
        self._create_slots_outside_of_branches(variables)
        grads, loss_scale = origins([grad for grad, _ in present])
        grads = [fitted(grad, variable) for grad, variable in zip(grads, variables, strict=True)]  # as it is applied
        finite, factor = self._check(grads, loss_scale)

        def apply(*grads: Any) -> Any:
            unscaled = [fitted(grad, variable, factor) for grad, variable in zip(grads, variables, strict=True)]
            return self._optimizer.apply_gradients(zip(unscaled, variables, strict=True), global_step=global_step)

        name = name or f"{self.get_name()}_apply"
        return decide_together(finite, grads, apply, functools.partial(self._apply_or_skip, name=name))

    def get_slot(self, var: Any, name: str) -> Any:
        """Return the wrapped optimizer's slot for `var`, or None."""
        return self._optimizer.get_slot(var, name)

    def get_slot_names(self) -> list[str]:
        """Return the names of the wrapped optimizer's slots."""
        names: list[str] = self._optimizer.get_slot_names()
        return names

    def variables(self) -> list[Any]:
        """Return the wrapped optimizer's variables, then those of the loss scale's state."""
        return [*self._optimizer.variables(), *self._scale_state.all]

    def _trackable_children(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return what a checkpoint keeps: the wrapped optimizer's own, under its names, and the state."""
        return {**self._optimizer._trackable_children(*args, **kwargs), "loss_scale_state": self._scale_state}

    def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "loss_scale_state":
            return self._scale_state
        return self._optimizer._lookup_dependency(name, *args, **kwargs)

    def _create_or_restore_slot_variable(self, *args: Any, **kwargs: Any) -> None:
        self._optimizer._create_or_restore_slot_variable(*args, **kwargs)

    def _apply_or_skip(self, finite: tf.Tensor, apply: Callable[[], Any], name: str) -> Any:
        """Apply where `finite`, and update the state; eagerly the flag is read, and the update is the host's."""
        if tf.executing_eagerly():
            is_finite = bool(finite)
            with self._one_at_a_time:
                if is_finite:
                    apply()
                self._update_on_host(is_finite)
            return None

        def apply_all() -> tf.Tensor:
            with tf.control_dependencies(
                [operation for operation in tf.nest.flatten(apply()) if operation is not None]
            ):
                return tf.constant(True)

        train_ops = tf.compat.v1.get_collection_ref(tf.compat.v1.GraphKeys.TRAIN_OP)
        others = list(train_ops)
        applied = tf.cond(finite, apply_all, lambda: tf.constant(False))
        step = tf.group(applied, *self._update_in_graph(finite), name=name)
        train_ops[:] = [*others, step]  # the wrapped optimizer has added its own, which lies within the branch
        return step

    def _update_in_graph(self, finite: tf.Tensor) -> list[Any]:
        """Update the state; a session, which keeps no order, may run several of these updates at a time."""

        def update() -> list[Any]:
            return self._scale_state.assign(self._policy.update(self._scale_state.read(), finite, xp=tf))

        if tf.compat.v1.executing_eagerly_outside_functions():
            return update()
        mutex = tf.raw_ops.MutexV2(shared_name=f"{self._scale_state.steps.name}/update", container="")
        lock = tf.raw_ops.MutexLock(mutex=mutex)
        with tf.control_dependencies([lock]):
            updates = [tf.identity(each) for each in update()]
        with tf.control_dependencies(updates):
            return [tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)]

    def _create_slots_outside_of_branches(self, variables: list[Any]) -> None:
        """Create the wrapped optimizer's slots where it would itself, so that they have the names it gives them."""
        if not tf.executing_eagerly() and not merges_replicas():
            with tf.init_scope():
                self._optimizer._create_slots(variables)

    def _warn_of_foreign_gradients(self, grads: list[Any], variables: list[Any]) -> None:
        pending = self._traces.apply(variables if tf.executing_eagerly() else ())
        if self._traces.missing(pending, ["compute_gradients"]) or self._are_foreign_in_graph(grads):
            warnings.warn(
                "these gradients cannot come from this optimizer's compute_gradients, so their loss was not scaled; "
                "call compute_gradients or minimize",
                stacklevel=4,  # past AutoGraph's wrapper of the public method
            )

    def _are_foreign_in_graph(self, grads: list[Any]) -> bool:
        """Return whether gradients were taken in this graph, and not by this optimizer; an accumulator's may be its."""
        made = self._traces.remembered()
        if not made or tf.executing_eagerly():
            return False
        found, operations = dependencies(grads, made)
        return not found and any(_OF_GRADIENTS.search(name) for name in operations)


_OF_GRADIENTS = re.compile(r"(^|/)(gradients|gradient_tape)(_\d+)?/")
"""What TensorFlow calls the operations that it adds for gradients."""
_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")
"""What TensorFlow takes for a scope's name in a graph."""

MixedPrecisionLossScaleOptimizer = LossScaleOptimizer
"""The name that `tf.compat.v1.mixed_precision` has for it."""


def _variable(name: str, value: Any) -> Any:
    if tf.executing_eagerly():
        return tf.Variable(value, trainable=False, name=name, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
    return tf.compat.v1.Variable(
        value, trainable=False, name=name, use_resource=True, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
    )


def _require_name(name: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"name={name!r} must begin with a letter, a digit or a dot, and may go on with these and _ \\ / > -"
        )


def _require_optimizer(opt: Any) -> None:
    if scales_already(opt):
        raise TypeError("this optimizer scales the loss already; wrap the optimizer once")
    if not isinstance(opt, _Optimizer):
        raise TypeError(
            f"opt={opt!r} must be a tf.compat.v1.train.Optimizer; lossscale_tf has one for Keras optimizers"
        )


def _pairs(grads_and_vars: Any) -> list[tuple[Any, Any]]:
    pairs = pairs_of(grads_and_vars)
    _require_variables([variable for _, variable in pairs])
    return pairs


def _require_variables(variables: list[Any]) -> None:
    for variable in variables:
        if not isinstance(variable, tf.Variable):
            raise ValueError(f"{variable!r} is no tf.Variable; gradients are taken of variables and applied to them")
