"""`LossScaleOptimizer`: a Keras optimizer around another, which applies or skips each step as a whole."""

import copy
import dataclasses
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import keras
import tensorflow as tf

from lossscale_core import BaseScaling, as_policy, policy_from_dict, policy_to_dict
from lossscale_core.errors import CallOrderError
from lossscale_tf._checkpoint import SavedLikeInner
from lossscale_tf._compiled import CompiledUpdates
from lossscale_tf._documented import (
    documented_policy,
    policy_of_loss_scale,
    require_no_base_arguments,
    require_policy_or_number,
)
from lossscale_tf._grads import (
    finite_when_unscaled,
    fitted,
    is_gradient,
    mark_origin,
    origins,
    scale_by,
    times,
    unscale_by,
)
from lossscale_tf._in_flight import ScaledLosses
from lossscale_tf._inner import (
    apply_summed,
    build,
    deserialized,
    have_no_values_yet,
    is_keras_3,
    require_no_session,
    require_optimizer,
    require_tensorflow,
    summed_by_its_own_function,
    without_summing,
)
from lossscale_tf._slots import Slots
from lossscale_tf._state import StateVariables
from lossscale_tf._trace import Tally, Traces
from lossscale_tf._wrapper import (
    StepLock,
    Wrapper,
    decide_together,
    outside_of_replicas,
    pairs_of,
    require_clipnorm,
    require_single_wrapper,
    share_deferred_restorations,
    summed_over_replicas,
)

HYPERPARAMETERS = frozenset({"learning_rate", "lr", "beta_1", "beta_2", "momentum", "rho", "decay"})
"""What is read from and set on the inner optimizer."""
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
"""What is read from the inner optimizer, and must be set there."""
_unconverted = tf.autograph.experimental.do_not_convert  # converting these lines takes AutoGraph seconds, for nothing


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
    that proves them finite. A skipped step changes neither variables nor slots nor `iterations`. With `jit_compile` the
    update alone is compiled by XLA, and called where the gradients are finite.

    Follows the interface of `tf.keras.mixed_precision.LossScaleOptimizer`. In `tf.function` nothing synchronises with
    the host; eagerly, `apply_gradients` reads the flag and the state. Raises `TypeError` for what is no Keras
    optimizer, or wraps one already, and `ValueError` for arguments that contradict each other.
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
        name: str | None = None,
        optimizer: Any = None,
        **base_arguments: Any,
    ) -> None:
        require_tensorflow()
        inner_optimizer = optimizer if inner_optimizer is None else inner_optimizer
        require_optimizer(inner_optimizer)
        require_no_base_arguments(base_arguments)
        require_policy_or_number(loss_scale if policy is None else policy)
        if policy is None:
            policy = documented_policy(loss_scale, dynamic, initial_scale, dynamic_growth_steps)
        elif (loss_scale, initial_scale, dynamic_growth_steps, dynamic) != ("dynamic", None, None, None):
            raise ValueError("policy= says all there is to say of the loss scale; leave the other arguments out")
        require_clipnorm(global_clipnorm)
        policy = as_policy(policy)
        require_single_wrapper(self, inner_optimizer)
        super().__init__(inner_optimizer, name=name)
        self._policy = policy
        self._max_norm = global_clipnorm
        self._compiled_updates = CompiledUpdates() if jit_compile else None
        self._traces = Traces()
        self._scaled_losses = ScaledLosses()
        self._one_at_a_time = StepLock()
        self._slots = Slots()
        self._scale_state = StateVariables(policy, self._make_variable)
        self._used_scale = _variable_of_each_replica()
        self._missing_calls = Tally()
        self._saved = None if is_keras_3(inner_optimizer) else self._saved_like_inner()
        self._is_initialised = True

    _is_initialised = False
    _saved: SavedLikeInner | None = None
    _is_traced = False
    _has_warned = False

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
        return "growth_interval" in BaseScaling.of(self._policy).settings()

    @property
    def dynamic_counter(self) -> Any:
        """The variable that counts finite steps toward growth; None for a fixed scale."""
        return self._scale_state.growth_tracker if self.dynamic else None

    @property
    def dynamic_growth_steps(self) -> int | None:
        """The policy's growth interval; None for a fixed scale.

        Setting it replaces the policy, below the present count, too. A step that is traced keeps the old one,
        and a warning says so.
        """
        return BaseScaling.of(self._policy).growth_interval if self.dynamic else None

    @dynamic_growth_steps.setter
    def dynamic_growth_steps(self, steps: int) -> None:
        if not self._is_initialised:
            return
        if not self.dynamic:
            raise AttributeError(f"dynamic_growth_steps is of dynamic scaling, and the policy is {self._policy}")
        self._policy = dataclasses.replace(self._policy, growth_interval=steps)
        if self._is_traced:
            warnings.warn(
                f"dynamic_growth_steps={steps!r} does not reach a step that is traced already; trace it again, for "
                "fit by model.make_train_function(force=True)",
                stacklevel=5,  # past three __setattr__
            )

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
    def global_clipnorm(self) -> Any:
        """The norm that this wrapper clips to or, without one, the inner optimizer."""
        return getattr(self.inner_optimizer, "global_clipnorm", None) if self._max_norm is None else self._max_norm

    @global_clipnorm.setter
    def global_clipnorm(self, _: Any) -> None:
        """Ignore what Keras's constructor sets; `__setattr__` has warned of anything else."""

    @property
    def steps_with_missing_calls(self) -> int:
        """How many steps of one's own loop missed scaling or unscaling. Synchronises with the host."""
        return int(self._missing_calls)

    @_unconverted
    def scale_loss(self, loss: Any) -> Any:
        """Return the loss scaled, as Keras itself asks for in `fit`: the next `apply` takes scaled gradients.

        Raises `CallOrderError` for a loss that is scaled already.
        """
        return self._scaled(loss, self._traces.begin("get_scaled_loss", by_keras=True))

    def get_scaled_loss(self, loss: Any) -> Any:
        """Return the loss scaled, in float32 or wider: what to take a tape's gradient of; a callable for a callable.

        Raises `CallOrderError` for a loss that is scaled already.
        """
        if callable(loss):
            return lambda: self.get_scaled_loss(loss())
        return self._scaled(loss, self._traces.begin("get_scaled_loss"))

    @_unconverted
    def get_unscaled_gradients(self, grads: Any) -> Any:
        """Return gradients of a scaled loss unscaled, in float32 or wider; `None` and `IndexedSlices` are kept.

        They are divided by the scale that multiplied their own loss, though the next loss may be scaled by another one
        already. Raises `CallOrderError` where it cannot be told which loss they are of, and for gradients that this
        call returned before, or that were made of those.
        """
        pending = self._traces.unscale()
        pending.scaled_by_keras = False  # whoever unscales, scales
        leaves = _leaves(grads)
        if self._are_unscaled(pending, leaves):
            raise CallOrderError("these gradients are unscaled already; call get_unscaled_gradients once a step")
        return self._unscaled(grads, self._scale_to_unscale_by(leaves, pending), pending)

    def _scale_to_unscale_by(self, leaves: list[Any], pending: Any) -> tf.Tensor:
        if not self._traces.missing(pending, ["get_scaled_loss"]):
            return self._scale_of(leaves)
        loss_scale = self._scaled_losses.scale_of(leaves, waiting_only=True)  # another thread may have scaled the loss
        if loss_scale is None:
            return self.loss_scale
        pending.calls.add("get_scaled_loss")
        return loss_scale

    def _are_unscaled(self, pending: Any, leaves: list[Any]) -> bool:
        before = pending.alive("get_unscaled_gradients")
        return any(one is other for one in leaves for other in before) or (
            not pending.applied and self._scaled_losses.made_since(leaves, before)
        )

    def _scale_of(self, grads: list[Any]) -> tf.Tensor:
        """Return the scale that multiplied the loss of these gradients."""
        loss_scale = self._scaled_losses.scale_of(grads)
        return tf.convert_to_tensor(self._used_scale) if loss_scale is None else loss_scale

    def _unscaled(self, grads: Any, loss_scale: Any, pending: Any) -> Any:
        unscaled = unscale_by(grads, loss_scale)
        for leaf, grad in zip(tf.nest.flatten(unscaled), tf.nest.flatten(grads), strict=True):
            mark_origin(leaf, grad, loss_scale)
        pending.remember("get_unscaled_gradients", _leaves(unscaled))
        return unscaled

    def minimize(
        self,
        loss: Any,
        var_list: Any,
        tape: tf.GradientTape | None = None,
        *,
        grad_loss: Any = None,
        name: str | None = None,
    ) -> None:
        """Scale `loss`, differentiate it, unscale and apply: a whole step.

        `loss` is a callable, or a tensor computed under `tape`; `var_list` a variable, a list of them, or a callable
        that returns one. `grad_loss` is the gradient of the loss itself, where it is not 1.
        """
        if not callable(loss) and tape is None:
            raise ValueError("a loss that is a tensor needs the tape it was computed under; pass tape=, or a callable")
        if tape is not None and not isinstance(tape, tf.GradientTape):  # of an older signature, grad_loss came third
            tape, grad_loss = None, tape
        with tf.GradientTape() if tape is None else tape as tape:
            loss = loss() if callable(loss) else loss
            pending = self._traces.begin("get_scaled_loss")
            loss_scale = self._scale_for(loss, pending)
            scaled = scale_by(loss, loss_scale)
            pending.remember("get_scaled_loss", _leaves(scaled))
        variables = tf.nest.flatten(var_list() if callable(var_list) else var_list)
        grads = tape.gradient(scaled, variables, output_gradients=_like(grad_loss, scaled))
        pending.calls.add("get_unscaled_gradients")
        grads = self._unscaled(grads, loss_scale, pending)
        self.apply_gradients(zip(grads, variables, strict=True), name=name)

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        """Return the unscaled gradients of `loss`, a callable or a graph's tensor; `ValueError` where there is none."""
        require_no_session()
        pending = self._traces.begin("get_scaled_loss")
        pending.calls.add("get_unscaled_gradients")
        loss_scale = self.loss_scale
        with tf.GradientTape() as tape:
            scaled = scale_by(loss() if callable(loss) else loss, loss_scale)
        params = tf.nest.flatten(params)
        if callable(loss):
            grads = tape.gradient(scaled, params)
        elif tf.executing_eagerly():
            raise ValueError("an eager tensor has no graph to differentiate; pass a callable, or use a GradientTape")
        else:
            grads = tf.gradients(scaled, params)
        if missing := [param.name for param, grad in zip(params, grads, strict=True) if grad is None]:
            raise ValueError(f"the loss has no gradient with respect to {', '.join(missing)}")
        unscaled = unscale_by(grads, loss_scale)
        pending.remember("get_unscaled_gradients", _leaves(unscaled))
        return list(unscaled)

    @_unconverted
    def apply_gradients(self, grads_and_vars: Any, name: str | None = None, **aggregation: Any) -> None:
        """Apply (gradient, variable) pairs where every gradient is finite on every replica; else skip the step.

        Gradients are taken as unscaled, except where Keras scaled the loss itself (`fit`). They are summed over
        replicas first, unless `experimental_aggregate_gradients=False` or `skip_gradients_aggregation=True` says that
        they are. Raises `TypeError` for what is no list of pairs and `ValueError` where no variable has a gradient.
        """
        pairs = _pairs(grads_and_vars)
        is_summed = not _aggregates(aggregation)
        self._apply([grad for grad, _ in pairs], [variable for _, variable in pairs], is_summed)

    @_unconverted
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Apply gradients to the variables that the optimizer was built with, or to those given; Keras 3's own entry.

        Gradients of a scaled loss are unscaled here, unless `get_unscaled_gradients` did. Raises `CallOrderError` where
        no loss was scaled, since then it cannot be told whether the gradients are.
        """
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        self._apply(list(grads), variables, is_summed=False, may_be_scaled=True)

    def stateless_apply(self, *_: Any, **__: Any) -> Any:
        """Raise `NotImplementedError`: this is Keras's way to train on JAX."""
        raise NotImplementedError("stateless_apply is for Keras on JAX; lossscale_jax.loss_scaled wraps optax there")

    def build(self, variables: Any) -> None:
        """Create the inner optimizer's variables."""
        build(self.inner_optimizer, variables)
        object.__setattr__(self, "_is_initialised", False)  # Keras shall not make averages and accumulators here, too
        try:
            keras.optimizers.Optimizer.build(self, variables)
        finally:
            object.__setattr__(self, "_is_initialised", True)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Let the inner optimizer do what it does at the end of training, if anything."""
        if hasattr(self.inner_optimizer, "finalize_variable_values"):
            self.inner_optimizer.finalize_variable_values(var_list)

    @property
    def variables(self) -> list[Any]:
        """The wrapper's own variables, the state's among them, then the inner optimizer's.

        Around an optimizer of tf_keras the list can be called, as that one's can, and returns itself.
        """
        variables = [*self._variables, *self.weights]
        return variables if is_keras_3(self.inner_optimizer) else _CallableList(variables)

    def load_own_variables(self, store: Any) -> None:
        """Load what `save_own_variables` stored; nothing of it, with a warning, where it is another optimizer's."""
        shapes = [tuple(variable.shape) for variable in self.variables]
        stored = [tuple(store[str(n)].shape) for n in range(len(shapes)) if str(n) in store]
        if len(store.keys()) == len(shapes) and stored != shapes:
            warnings.warn(
                f"the saved optimizer's variables have other shapes than those of '{self.name}', so none is loaded; "
                "it is another optimizer's, and this one begins anew",
                stacklevel=2,
            )
            return
        super().load_own_variables(store)

    @property
    def weights(self) -> list[Any]:
        """The inner optimizer's variables, in the order in which they were made."""
        inner = self.inner_optimizer
        return list(inner.weights if hasattr(inner, "_create_slots") else inner.variables)

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
        if is_keras_3(inner):
            slot = inner.add_variable_from_reference(var, slot_name, initializer=initializer)
        else:
            value = keras.initializers.get(initializer)(var.shape, var.dtype)
            slot = inner.add_variable_from_reference(var, slot_name, initial_value=value)
        self._slots.add(var, slot_name, slot)
        return slot

    def get_slot_names(self) -> list[str]:
        """Return the names of the inner optimizer's slots."""
        if hasattr(self.inner_optimizer, "get_slot_names"):
            return list(self.inner_optimizer.get_slot_names())
        return list(dict.fromkeys(name for _, name in self._slots.find(self.weights, self._trainable_variables)))

    def get_slot(self, var: Any, slot_name: str) -> Any:
        """Return the inner optimizer's slot for `var`, or None."""
        if not hasattr(self.inner_optimizer, "get_slot"):
            return self._slots.find(self.weights, self._trainable_variables).get((id(var), slot_name))
        try:
            return self.inner_optimizer.get_slot(var, slot_name)
        except KeyError:  # tf_keras's way to say that there is none
            return None

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        """Tell the inner optimizer which variables not to decay."""
        self.inner_optimizer.exclude_from_weight_decay(*args, **kwargs)

    def _saved_like_inner(self) -> SavedLikeInner:
        share_deferred_restorations(self, self.inner_optimizer)
        return SavedLikeInner(self.inner_optimizer, self._scale_state, self.dynamic, self._begin)

    def _begin(self) -> None:
        self._has_begun = True

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        if self._saved is None or save_type != "checkpoint":
            children: dict[str, Any] = super()._trackable_children(save_type, **kwargs)
            return children
        return self._saved.children(save_type, **kwargs)

    def _checkpoint_adapter(self, path: str) -> Any:
        if self._saved is not None:
            self._saved.look_at(path)
        return super()._checkpoint_adapter(path)

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        own = super()._lookup_dependency
        if self._saved is None or cached_dependencies is None:  # without these it is asked by whoever tracks attributes
            return own(name, cached_dependencies)
        return self._saved.lookup(name, lambda: own(name))

    @property
    def _create_or_restore_slot_variable(self) -> Any:
        """The inner optimizer's, if it has slots of TensorFlow's own kind."""
        return self.inner_optimizer._create_or_restore_slot_variable

    def _build(self, variables: list[Any]) -> None:
        with nullcontext() if have_no_values_yet(variables) else tf.init_scope(), keras.name_scope(self.name):
            self.build(variables)
        self.built = True

    def _look_back(self) -> None:
        with tf.init_scope():  # from within a trace, to where variables have values
            if tf.executing_eagerly():
                self._warn_of_lost_state(self.iterations)

    def _scaled(self, loss: Any, pending: Any) -> Any:
        """Return the loss scaled; whatever multiplies it divides its gradients, too, wherever that is."""
        scaled = self._scaled_losses.scale(loss, self._scale_for(loss, pending))
        pending.remember("get_scaled_loss", _leaves(scaled))
        return scaled

    def _scale_for(self, loss: Any, pending: Any) -> tf.Tensor:
        """Return the scale to multiply this loss by, and leave it for gradients that are unscaled in another trace."""
        require_no_session()
        if pending.returned("get_scaled_loss", _leaves(loss)):
            raise CallOrderError("this loss is scaled already; scale it once a step, or leave it to minimize")
        loss_scale = self.loss_scale
        self._used_scale.assign(loss_scale)
        return loss_scale

    def _apply(self, grads: list[Any], variables: list[Any], is_summed: bool, may_be_scaled: bool = False) -> None:
        require_no_session()
        if tf.distribute.in_cross_replica_context():
            raise ValueError("gradients are applied in a replica context; call this inside strategy.run")
        present = [(_as_gradient(grad), each) for grad, each in zip(grads, variables, strict=True) if grad is not None]
        if not present:
            raise ValueError(f"none of the variables {[v.name for v in variables]} has a gradient")
        if not self.built:
            outside_of_replicas(lambda: self._build(variables))
        if missing := [v.name for grad, v in zip(grads, variables, strict=True) if grad is None]:
            warnings.warn(f"no gradient exists for {', '.join(missing)}; they keep their values", stacklevel=4)
        if not self._has_begun:
            outside_of_replicas(self._look_back)
        pending = self._traces.apply(variables)
        gradients, variables = [grad for grad, _ in present], [variable for _, variable in present]
        if pending.scaled_by_keras or (may_be_scaled and self._are_scaled(pending)):
            loss_scale = self._scale_of(gradients)
        else:
            self._warn_of_missing_calls(pending)
            gradients, loss_scale = origins(gradients)
        if loss_scale is None and "get_unscaled_gradients" in pending.calls:
            gradients = [_as_overwriting(g, v, self._used_scale) for g, v in zip(gradients, variables, strict=True)]
        if not is_summed:
            gradients, loss_scale = self._summed(gradients, variables, loss_scale)
        self._take_step(gradients, variables, loss_scale)

    def _summed(self, grads: list[Any], variables: list[Any], loss_scale: Any) -> tuple[list[Any], Any]:
        """Return gradients summed over replicas, and their scale; a function of the user's sums unscaled ones."""
        unscaled = grads if loss_scale is None else unscale_by(grads, loss_scale)
        summed = summed_by_its_own_function(self.inner_optimizer, unscaled, variables)
        return (summed_over_replicas(grads), loss_scale) if summed is None else (summed, None)

    def _are_scaled(self, pending: Any) -> bool:
        """Return whether the gradients given to Keras 3's entry are of a scaled loss."""
        if not BaseScaling.of(self._policy).scales_losses:
            return False
        scaled, unscaled = (
            not self._traces.missing(pending, [call]) for call in ("get_scaled_loss", "get_unscaled_gradients")
        )
        if not scaled and not unscaled:
            raise CallOrderError(
                "apply was given gradients, but this optimizer scaled no loss for them, so that it cannot be told "
                "whether they are scaled; scale the loss by scale_loss, or pass unscaled gradients to apply_gradients"
            )
        return not unscaled

    def _take_step(self, grads: list[Any], variables: list[Any], loss_scale: Any) -> None:
        """Take a step by gradients that were scaled by `loss_scale`, or that are unscaled where there is none."""
        pairs = list(zip(grads, variables, strict=True))
        finite, factor = self._check([grad for grad, variable in pairs if not _is_overwritten(variable)], loss_scale)
        finite &= finite_when_unscaled([grad for grad, variable in pairs if _is_overwritten(variable)])
        finite &= finite_when_unscaled(
            [_fitted(grad, each, factor) for grad, each in pairs if _narrows(grad, each, factor)]
        )

        def apply(*grads: Any) -> None:
            if self._compiled_updates is None:
                self._update(grads, factor, variables)
            else:
                self._compiled_updates.run(self._update, grads, factor, variables)

        decide_together(finite, grads, apply, self._apply_or_skip)

    def _update(self, grads: Any, factor: Any, variables: list[Any]) -> None:
        """Apply gradients times `factor`, if there is one, in the variables' dtypes."""
        apply_summed(
            self.inner_optimizer, [_fitted(g, v, factor) for g, v in zip(grads, variables, strict=True)], variables
        )

    def _apply_or_skip(self, finite: tf.Tensor, apply: Callable[[], Any]) -> None:
        """Apply where `finite`, and update the state; eagerly the flag is read, and the update is the host's."""

        def apply_all() -> tf.Tensor:
            with without_summing(self.inner_optimizer):
                apply()
            return tf.constant(True)

        if not tf.executing_eagerly():
            self._is_traced = True
            self._scaled_losses.updated_in_graph()
            before = self._scale_state.read()
            tf.cond(finite, apply_all, lambda: tf.constant(False))
            self._scale_state.assign(self._policy.update(before, finite, xp=tf))
            return
        is_finite = bool(finite)
        with self._one_at_a_time:
            if is_finite:
                apply_all()
            self._update_on_host(is_finite)

    def _warn_of_missing_calls(self, pending: Any) -> None:
        """Count a step of one's own loop that misses scaling or unscaling, and say so once."""
        if pending.scaled_by_keras or not BaseScaling.of(self._policy).scales_losses:
            return
        missing = self._traces.missing(pending, ["get_scaled_loss", "get_unscaled_gradients"])
        if not missing:
            return
        self._missing_calls.add()
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{' and '.join(missing)} not called before apply_gradients; call get_scaled_loss before the tape's "
                "gradient and get_unscaled_gradients after it, each once a step, or use minimize",
                stacklevel=5,  # past AutoGraph's wrapper of the public method
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
                warnings.warn(
                    f"{name} is set on the LossScaleOptimizer, where nothing reads it; set it on inner_optimizer "
                    "instead",
                    stacklevel=2,
                )
            super().__setattr__(name, value)

    def _is_hyperparameter(self, name: str) -> bool:
        own = vars(self.inner_optimizer).get("_hyper", ())  # of a legacy optimizer, a user's own among them
        return name in HYPERPARAMETERS or (name in own and not hasattr(type(self), name))

    def _set_hyperparameter(self, name: str, value: Any) -> None:
        inner = self.inner_optimizer
        if not hasattr(inner, name):
            raise AttributeError(f"'{type(inner).__name__}' object has no attribute '{name}'")
        setattr(inner, name, value)
        if self._compiled_updates is not None:
            self._compiled_updates = CompiledUpdates()  # those that are compiled hold the old value

    def __dir__(self) -> list[str]:
        inner = dir(self.inner_optimizer)
        hyperparameters = HYPERPARAMETERS.union(vars(self.inner_optimizer).get("_hyper", ()))
        names = {*super().__dir__(), *(name for name in hyperparameters if _spelled(name) in inner)}
        # TensorFlow's checkpoints look for untracked slots in whatever lists this name; those of Keras 3 are tracked.
        return sorted(names if "get_slot_names" in inner else names - {"get_slot_names"})

    def get_config(self) -> dict[str, Any]:
        """Return what `from_config` needs, without the running state."""
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "policy": policy_to_dict(self._policy),
            "global_clipnorm": self._max_norm,
            "jit_compile": self._compiled_updates is not None,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "LossScaleOptimizer":
        """Return an optimizer from a config: ours, Keras 3's, or one of `tf.keras.mixed_precision`'s two.

        `config` is left as it is.
        """
        config = copy.deepcopy(config)
        config.pop("learning_rate", None)  # of the wrapper, which has none
        inner = config.pop("inner_optimizer", None) or config.pop("optimizer")
        if isinstance(inner, dict):
            inner = deserialized(inner, custom_objects)
        loss_scale = config.pop("loss_scale", None)
        if isinstance(loss_scale, dict) and "class_name" in loss_scale:  # of the experimental API
            loss_scale = policy_of_loss_scale(loss_scale)
        if config.get("policy") is not None:
            config["policy"] = policy_from_dict(config["policy"])
        elif loss_scale is not None:
            config["policy"] = as_policy(loss_scale)
        return cls(inner, **config)


def _read_through(name: str, default: Any) -> property:
    """Return a property that reads the inner optimizer's setting; while Keras makes or builds it, the wrapper's."""

    def read(self: LossScaleOptimizer) -> Any:
        return getattr(self.inner_optimizer, name, default) if self._is_initialised else default

    def ignore(self: LossScaleOptimizer, _: Any) -> None:
        """Ignore what Keras's constructor sets; `__setattr__` has warned of anything else."""

    return property(read, ignore, doc=f"The inner optimizer's `{name}`.")


for _name in READ_THROUGH - {"global_clipnorm"}:
    setattr(LossScaleOptimizer, _name, _read_through(_name, False if _name == "use_ema" else None))
del _name


class _CallableList(list[Any]):
    """A list that returns itself when it is called, as `variables` of tf_keras's optimizers."""

    def __call__(self) -> "_CallableList":
        return self


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


def _leaves(tree: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(tree) if isinstance(leaf, tf.Tensor | tf.IndexedSlices)]


def _like(grad_loss: Any, scaled: Any) -> Any:
    """Return the gradient of a loss in the dtype of the scaled loss, which is wider than that of half losses."""
    if grad_loss is None:
        return None
    return tf.nest.map_structure(lambda grad, loss: tf.cast(grad, loss.dtype), grad_loss, scaled)


def _as_gradient(grad: Any) -> Any:
    tensor = grad if isinstance(grad, tf.IndexedSlices) else tf.convert_to_tensor(grad)
    if not is_gradient(tensor):
        raise TypeError(f"a gradient of dtype {tensor.dtype.name} cannot be applied; differentiate floats")
    return tensor


def _is_overwritten(variable: Any) -> bool:
    """Return whether gradients are the new values of a variable, as those of float8 scales are, and never scaled."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def _as_overwriting(grad: Any, variable: Any, loss_scale: Any) -> Any:
    """Return a new value of a variable as it was before it was divided by the loss scale, like a gradient."""
    return times(grad, loss_scale) if _is_overwritten(variable) else grad


def _fitted(grad: Any, variable: Any, factor: Any) -> Any:
    """Return a gradient times `factor`, in its variable's dtype; one that overwrites its variable is left alone."""
    return grad if _is_overwritten(variable) else fitted(grad, variable, factor)


def _narrows(grad: Any, variable: Any, factor: Any) -> bool:
    """Return whether a gradient becomes narrower on its way into its variable's dtype, and may become infinite."""
    lifted_to = 0 if factor is None else tf.float32.size
    return bool(tf.as_dtype(variable.dtype).size < max(grad.dtype.size, lifted_to))


def _variable_of_each_replica() -> tf.Variable:
    with tf.init_scope():
        return tf.Variable(
            1.0,
            trainable=False,
            name="used_loss_scale",
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
