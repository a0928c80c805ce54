"""`LossScaleOptimizer`: a Keras optimizer around another, which applies or skips each step as a whole."""

import copy
import dataclasses
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from lossscale_core import NoScaling, as_policy, policy_from_dict, policy_to_dict
from lossscale_core.errors import CallOrderError
from lossscale_tf._documented import documented_policy, policy_of_loss_scale
from lossscale_tf._grads import cast, finite_when_unscaled, scale, times, unscale
from lossscale_tf._norm import clip_factor, global_norm
from lossscale_tf._state import StateVariables
from lossscale_tf._trace import Traces
from lossscale_tf._wrapper import Wrapper, decide_together, merges_replicas, pairs_of, require_clipnorm

HYPERPARAMETERS = frozenset({"learning_rate", "lr", "beta_1", "beta_2", "momentum", "rho", "decay"})
"""What is read from and set on the inner optimizer."""


@keras.saving.register_keras_serializable("lossscale")
class LossScaleOptimizer(Wrapper, keras.optimizers.LossScaleOptimizer):
    """A Keras optimizer that scales the loss, unscales the gradients, and skips the steps that overflowed.

    ```python
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(), "dynamic")
    model.compile(optimizer, loss)            # under mixed_float16, fit scales by itself
    ```

    In a loop of one's own: `minimize`, or `get_scaled_loss` before the tape's gradient, `get_unscaled_gradients` after
    it, then `apply_gradients`.

    `inner_optimizer` is a Keras 3 or tf_keras optimizer. `loss_scale` (or `policy`) is anything `as_policy` takes; a
    bool stands for `dynamic` of `tf.keras.mixed_precision`, whose `initial_scale` and `dynamic_growth_steps` are taken
    too, with their defaults of 2**15 and 2000. `global_clipnorm` clips the unscaled gradients to that norm by the read
    that proves them finite. A skipped step changes neither variables nor slots nor `iterations`.

    Follows the interface of `tf.keras.mixed_precision.LossScaleOptimizer`. In `tf.function` nothing synchronises with
    the host; eagerly, `apply_gradients` does once.
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
        name: str | None = None,
        optimizer: Any = None,
    ) -> None:
        inner_optimizer = optimizer if inner_optimizer is None else inner_optimizer
        _require_optimizer(inner_optimizer)
        if policy is None:
            policy = documented_policy(loss_scale, dynamic, initial_scale, dynamic_growth_steps)
        require_clipnorm(global_clipnorm)
        policy = as_policy(policy)
        super().__init__(inner_optimizer, name=name)
        self._policy = policy
        self._max_norm = global_clipnorm
        self._traces = Traces()
        self._scale_state = StateVariables(policy, self._make_variable)
        self.steps_with_missing_calls = 0
        self._is_initialised = True

    _is_initialised = False

    @property
    def loss_scale(self) -> tf.Tensor:
        """The current loss scale: float32, of shape `()`."""
        return tf.convert_to_tensor(self._scale_state.loss_scale)

    @property
    def dynamic_scale(self) -> Any:
        """The variable that holds the loss scale; Keras 3's name."""
        return self._scale_state.loss_scale

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale may change."""
        return hasattr(self._policy, "growth_interval")

    @property
    def dynamic_counter(self) -> Any:
        """The variable that counts finite steps toward growth; None for a fixed scale."""
        return self._scale_state.growth_tracker if self.dynamic else None

    @property
    def dynamic_growth_steps(self) -> int | None:
        """The policy's growth interval; None for a fixed scale.

        Setting it replaces the policy, for eager steps and new traces; it works below the present count, too.
        """
        return getattr(self._policy, "growth_interval", None)

    @dynamic_growth_steps.setter
    def dynamic_growth_steps(self, steps: int) -> None:
        if self._is_initialised:
            self._policy = dataclasses.replace(self._policy, growth_interval=steps)

    @property
    def initial_scale(self) -> float:
        """The loss scale of the first step."""
        return float(self._policy.init_state().loss_scale)

    @initial_scale.setter
    def initial_scale(self, _: Any) -> None:
        if self._is_initialised:
            raise AttributeError("initial_scale is the policy's; make the optimizer with another policy")

    @property
    def iterations(self) -> Any:
        """The inner optimizer's count of applied steps."""
        return self.inner_optimizer.iterations

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss scaled, as Keras itself asks for in `fit`: the next `apply` takes scaled gradients."""
        pending = self._traces.begin(by_keras=True)
        return scale(loss, self._captured_scale(pending))

    def get_scaled_loss(self, loss: Any) -> Any:
        """Return the loss scaled, in float32 or wider: what to take a tape's gradient of; a callable for a callable."""
        if callable(loss):
            return lambda: self.get_scaled_loss(loss())
        pending = self._traces.begin(by_keras=False)
        pending.scaled = True
        return scale(loss, self._captured_scale(pending))

    def get_unscaled_gradients(self, grads: Any) -> Any:
        """Return gradients of a scaled loss unscaled, in float32 or wider; `None` and `IndexedSlices` are kept.

        Raises `CallOrderError` for gradients that this call returned before.
        """
        pending = self._traces.current()
        pending.scaled_by_keras = False  # whoever unscales, scales
        if any(leaf is known for leaf in tf.nest.flatten(grads) if leaf is not None for known in pending.unscaled):
            raise CallOrderError("these gradients are unscaled already; call get_unscaled_gradients once a step")
        unscaled = unscale(grads, self._captured_scale(pending))
        pending.unscaled += [leaf for leaf in tf.nest.flatten(unscaled) if leaf is not None]
        return unscaled

    def minimize(self, loss: Any, var_list: Any, tape: tf.GradientTape | None = None) -> None:
        """Scale `loss`, differentiate it, unscale and apply: a whole step.

        `loss` is a callable, or a tensor computed under `tape`; `var_list` a variable, a list of them, or a callable
        that returns one.
        """
        if not callable(loss) and tape is None:
            raise ValueError("a loss that is a tensor needs the tape it was computed under; pass tape=, or a callable")
        with tf.GradientTape() if tape is None else tape as tape:
            scaled = self.get_scaled_loss(loss() if callable(loss) else loss)
        variables = tf.nest.flatten(var_list() if callable(var_list) else var_list)
        grads = self.get_unscaled_gradients(tape.gradient(scaled, variables))
        self.apply_gradients(zip(grads, variables, strict=True))

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        """Return the unscaled gradients of `loss`, a callable or a graph's tensor; `ValueError` where there is none."""
        with tf.GradientTape() as tape:
            scaled = self.get_scaled_loss(loss() if callable(loss) else loss)
        params = tf.nest.flatten(params)
        if callable(loss):
            grads = tape.gradient(scaled, params)
        elif tf.executing_eagerly():
            raise ValueError("an eager tensor has no graph to differentiate; pass a callable, or use a GradientTape")
        else:
            grads = tf.gradients(scaled, params)
        if missing := [param.name for param, grad in zip(params, grads, strict=True) if grad is None]:
            raise ValueError(f"the loss has no gradient with respect to {', '.join(missing)}")
        return self.get_unscaled_gradients(grads)

    def apply_gradients(self, grads_and_vars: Any, name: str | None = None, **aggregation: Any) -> None:
        """Apply (gradient, variable) pairs where every gradient is finite on every replica; else skip the step.

        Gradients are taken as unscaled, except where Keras scaled the loss itself (`fit`). They are summed over
        replicas first, unless `experimental_aggregate_gradients=False` or `skip_gradients_aggregation=True` says that
        they are. Raises `TypeError` for what is no list of pairs and `ValueError` where no variable has a gradient.
        """
        pairs = _pairs(grads_and_vars)
        is_summed = not _aggregates(aggregation)
        self._apply([grad for grad, _ in pairs], [variable for _, variable in pairs], is_summed)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Apply gradients to the variables that the optimizer was built with, or to those given; Keras's own entry."""
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        self._apply(list(grads), variables, is_summed=False)

    def build(self, variables: Any) -> None:
        """Create the inner optimizer's variables."""
        if hasattr(self.inner_optimizer, "build"):
            self.inner_optimizer.build(variables)
        else:  # tf_keras's legacy optimizers
            self.inner_optimizer._create_all_weights(variables)
        keras.optimizers.Optimizer.build(self, variables)

    @property
    def weights(self) -> list[Any]:
        """The inner optimizer's variables, in the order in which they were made."""
        inner = self.inner_optimizer
        return list(inner.variables if _is_keras_3(inner) else getattr(inner, "weights", None) or inner.variables)

    def get_weights(self) -> list[Any]:
        """Return what `weights` hold, as arrays."""
        return [variable.numpy() for variable in self.weights]

    def set_weights(self, weights: list[Any]) -> None:
        """Set what `weights` hold."""
        for variable, value in zip(self.weights, weights, strict=True):
            variable.assign(value)

    def add_slot(self, var: Any, slot_name: str, initializer: Any = "zeros") -> Any:
        """Add a slot for `var` to the inner optimizer, and return its variable."""
        inner = self.inner_optimizer
        if hasattr(inner, "add_slot"):
            return inner.add_slot(var, slot_name, initializer)
        if not _is_keras_3(inner):
            return inner.add_variable_from_reference(var, slot_name)
        return inner.add_variable_from_reference(var, slot_name, initializer=initializer)

    def get_slot_names(self) -> list[str]:
        """Return the names of the inner optimizer's slots."""
        if hasattr(self.inner_optimizer, "get_slot_names"):
            return list(self.inner_optimizer.get_slot_names())
        return list(dict.fromkeys(name for _, name in self._slots()))

    def get_slot(self, var: Any, slot_name: str) -> Any:
        """Return the inner optimizer's slot for `var`, or None."""
        if hasattr(self.inner_optimizer, "get_slot"):
            return self.inner_optimizer.get_slot(var, slot_name)
        return self._slots().get((_slot_prefix(var), slot_name))

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        """Tell the inner optimizer which variables not to decay."""
        self.inner_optimizer.exclude_from_weight_decay(*args, **kwargs)

    def _slots(self) -> dict[tuple[str, str], Any]:
        """Return a Keras 3 optimizer's slots by their variable and name, which it keeps in theirs."""
        prefixes = [_slot_prefix(variable) for variable in self._trainable_variables]
        return {
            (prefix, slot.name.removeprefix(prefix)): slot
            for slot in self.inner_optimizer.variables
            for prefix in prefixes
            if slot.name.startswith(prefix)
        }

    def _build(self, variables: list[Any]) -> None:
        with tf.init_scope(), keras.name_scope(self.name):
            self.build(variables)
        self.built = True

    def _look_back(self) -> None:
        with tf.init_scope():  # from within a trace, to where variables have values
            if tf.executing_eagerly():
                self._warn_of_lost_state(self.iterations)

    def _captured_scale(self, pending: Any) -> Any:
        """Return a state with the scale of this step: whatever multiplies its loss divides its gradients, too."""
        if pending.used_state is None:
            pending.used_state = self._scale_state.read()
        return pending.used_state

    def _apply(self, grads: list[Any], variables: list[Any], is_summed: bool) -> None:
        if tf.distribute.in_cross_replica_context():
            raise ValueError("gradients are applied in a replica context; call this inside strategy.run")
        if all(grad is None for grad in grads):
            raise ValueError(f"none of the variables {[v.name for v in variables]} has a gradient")
        if not self.built:
            _outside_of_replicas(lambda: self._build(variables))
        _outside_of_replicas(self._look_back)
        pending = self._traces.current(variables)
        pending.applied |= set(map(id, variables))
        self._warn_of_missing_calls(pending)
        used = self._captured_scale(pending) if pending.scaled_by_keras else None
        present = [(grad, variable) for grad, variable in zip(grads, variables, strict=True) if grad is not None]
        gradients = [grad for grad, _ in present]
        if not is_summed:
            gradients = _summed_over_replicas(gradients)
        self._take_step(gradients, [variable for _, variable in present], used)

    def _take_step(self, grads: list[Any], variables: list[Any], used: Any) -> None:
        loss_scale = None if used is None else used.loss_scale
        factor = inverse = None if used is None else 1.0 / used.loss_scale
        if self._max_norm is None:
            finite = finite_when_unscaled(grads, loss_scale)
        else:
            norm = global_norm(grads, 1.0 if loss_scale is None else loss_scale)
            finite = tf.math.is_finite(norm)
            clip = clip_factor(norm, self._max_norm)
            factor = clip if factor is None else factor * clip
        lifted_to = 0 if inverse is None else tf.float32.size
        narrowed = [
            _fitted(grad, variable, inverse)
            for grad, variable in zip(grads, variables, strict=True)
            if tf.as_dtype(variable.dtype).size < max(grad.dtype.size, lifted_to)
        ]
        finite &= finite_when_unscaled(narrowed)

        def apply(*grads: Any) -> tf.Tensor:
            self._apply_to_inner([_fitted(g, v, factor) for g, v in zip(grads, variables, strict=True)], variables)
            return tf.constant(True)

        decide_together(finite, grads, apply, self._apply_or_skip)

    def _apply_or_skip(self, finite: tf.Tensor, apply: Callable[[], Any]) -> None:
        """Apply where `finite`, and update the state; eagerly the flag is read, and the update is the host's."""

        def apply_summed() -> tf.Tensor:
            with _without_summing(self.inner_optimizer):
                apply()
            return tf.constant(True)

        if not tf.executing_eagerly():
            before = self._scale_state.read()
            tf.cond(finite, apply_summed, lambda: tf.constant(False))
            self._scale_state.assign(self._policy.update(before, finite, xp=tf))
            return
        is_finite = bool(finite)
        if is_finite:
            apply_summed()
        self._update_on_host(is_finite)

    def _apply_to_inner(self, grads: list[Any], variables: list[Any]) -> None:
        """Let the inner optimizer apply gradients that are summed over replicas already."""
        inner = self.inner_optimizer
        if _is_keras_3(inner):
            inner.apply(grads, variables)
        elif hasattr(inner, "_create_slots"):  # tf_keras's legacy optimizers
            inner.apply_gradients(zip(grads, variables, strict=True), experimental_aggregate_gradients=False)
        else:
            inner.apply_gradients(zip(grads, variables, strict=True), skip_gradients_aggregation=True)

    def _warn_of_missing_calls(self, pending: Any) -> None:
        """Count a step of one's own loop that misses scaling or unscaling, and say so once."""
        if pending.scaled_by_keras or isinstance(self._policy, NoScaling):
            return
        missing = [
            name
            for name, was_called in (("get_scaled_loss", pending.scaled), ("get_unscaled_gradients", pending.unscaled))
            if not was_called
        ]
        if not missing:
            return
        self.steps_with_missing_calls += 1
        if self.steps_with_missing_calls == 1:
            warnings.warn(
                f"{' and '.join(missing)} not called before apply_gradients; call get_scaled_loss before the tape's "
                "gradient and get_unscaled_gradients after it, each once a step, or use minimize",
                stacklevel=4,
            )

    def _make_variable(self, name: str, value: Any) -> Any:
        return self.add_variable(
            shape=(),
            dtype=value.dtype.name,
            initializer=keras.initializers.Constant(value),
            aggregation="only_first_replica",
            name=name,
        )

    def __getattr__(self, name: str) -> Any:
        if name in HYPERPARAMETERS and "inner_optimizer" in self.__dict__:
            return getattr(self.inner_optimizer, _spelled(name))
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_initialised and name in HYPERPARAMETERS:
            setattr(self.inner_optimizer, _spelled(name), value)
            return
        is_new = self._is_initialised and name not in self.__dict__ and not hasattr(type(self), name)
        if is_new and not name.startswith("_") and hasattr(self.inner_optimizer, name):
            warnings.warn(
                f"{name} is set on the LossScaleOptimizer, where nothing reads it; set it on inner_optimizer instead",
                stacklevel=2,
            )
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        names = {*super().__dir__(), *(name for name in HYPERPARAMETERS if hasattr(self, name))}
        # TensorFlow's checkpoints would look for untracked slots in whatever lists this name; Keras's are tracked.
        return sorted(names - {"get_slot_names"})

    def get_config(self) -> dict[str, Any]:
        """Return what `from_config` needs, without the running state."""
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "policy": policy_to_dict(self._policy),
            "global_clipnorm": self._max_norm,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "LossScaleOptimizer":
        """Return an optimizer from a config: ours, Keras 3's, or one of `tf.keras.mixed_precision`'s two.

        `config` is left as it is.
        """
        config = copy.deepcopy(config)
        inner = config.pop("inner_optimizer", None) or config.pop("optimizer")
        if isinstance(inner, dict):
            inner = keras.optimizers.deserialize(inner, custom_objects)
        loss_scale = config.pop("loss_scale", None)
        if isinstance(loss_scale, dict) and "class_name" in loss_scale:  # of the experimental API
            loss_scale = policy_of_loss_scale(loss_scale)
        if config.get("policy") is not None:
            config["policy"] = policy_from_dict(config["policy"])
        elif loss_scale is not None:
            config["policy"] = as_policy(loss_scale)
        return cls(inner, **config)


def _require_optimizer(inner: Any) -> None:
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise TypeError(f"{type(inner).__name__} scales the loss already; wrap the optimizer once")
    if not isinstance(inner, keras.optimizers.Optimizer) and not hasattr(inner, "apply_gradients"):
        raise TypeError(f"inner_optimizer={inner!r} is no Keras optimizer; pass one, such as keras.optimizers.Adam()")


def _is_keras_3(optimizer: Any) -> bool:
    return isinstance(optimizer, keras.optimizers.Optimizer)


def _slot_prefix(variable: Any) -> str:
    """Return what a Keras 3 optimizer's slots for `variable` begin their names with."""
    return re.sub(r"[/:]", "_", getattr(variable, "path", variable.name)) + "_"


def _spelled(name: str) -> str:
    return "learning_rate" if name == "lr" else name


def _pairs(grads_and_vars: Any) -> list[tuple[Any, Any]]:
    pairs = pairs_of(grads_and_vars)
    for _, variable in pairs:
        if not isinstance(variable, tf.Variable | keras.Variable):
            raise TypeError(f"{variable!r} is no variable; grads_and_vars must be (gradient, variable) pairs")
    return pairs


def _aggregates(arguments: dict[str, Any]) -> bool:
    """Return whether gradients are to be summed over replicas, in the words of either tf_keras interface."""
    aggregates = bool(arguments.pop("experimental_aggregate_gradients", True))
    aggregates &= not arguments.pop("skip_gradients_aggregation", False)
    if arguments:
        raise TypeError(f"apply_gradients() got an unexpected keyword argument {next(iter(arguments))!r}")
    return aggregates


def _outside_of_replicas(make: Callable[[], None]) -> None:
    """Call `make` once for all replicas, where variables may be created."""
    if not merges_replicas():
        make()
    else:
        tf.distribute.get_replica_context().merge_call(lambda _: make())


def _summed_over_replicas(grads: list[Any]) -> list[Any]:
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return grads
    return context.all_reduce(tf.distribute.ReduceOp.SUM, grads)


def _fitted(grad: Any, variable: Any, factor: Any) -> Any:
    """Return a gradient times `factor`, in its variable's dtype; one that overwrites its variable is left alone."""
    if getattr(variable, "overwrite_with_gradient", False):
        return grad
    wide = grad if factor is None else times(grad, factor)
    return cast(wide, tf.as_dtype(variable.dtype))


@contextmanager
def _without_summing(optimizer: Any) -> Iterator[None]:
    """Keep a Keras 3 optimizer from summing gradients over replicas a second time."""
    if not _is_keras_3(optimizer):
        yield
        return
    with _summing:
        _depth[optimizer] = _depth.get(optimizer, 0) + 1
        optimizer.__dict__["_all_reduce_sum_gradients"] = list
    try:
        yield
    finally:
        with _summing:  # another thread may still be at it
            _depth[optimizer] -= 1
            if not _depth[optimizer]:
                del _depth[optimizer], optimizer.__dict__["_all_reduce_sum_gradients"]


_summing = threading.Lock()
_depth: dict[Any, int] = {}
