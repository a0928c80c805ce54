"""`LossScaleOptimizer`: a wrapper around a Keras optimizer that applies or skips each step as a whole."""

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import keras
import numpy as np
from keras import ops

import lossscale_core as core
from lossscale_core import adapters
from lossscale_core.adapters import describe
from lossscale_core.errors import CallOrderError, CheckpointWarning
from lossscale_keras._backend import BACKEND, is_compiling, is_traced, native, require_training, returns_gradients, xp
from lossscale_keras._losses import Losses, ScaledLoss
from lossscale_keras._step import EAGER, HOST, TRACED, CheckResult, States, Traced, check, divide_grads, place_of
from lossscale_keras._stored import LastStep, NoState, StateVariables
from lossscale_keras._verbs import Tree, dense, is_overwritten, scale
from lossscale_keras.forwarding import forwarded


# A subclass of Keras's wrapper: under mixed_float16, Keras's `compile` wraps any other optimizer in its own wrapper:
# https://github.com/keras-team/keras/blob/v3.15.1/keras/src/trainers/trainer.py
@keras.saving.register_keras_serializable("lossscale_keras")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """A Keras optimizer that scales the loss, unscales the gradients, and skips steps that overflow.

    ```python
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(), "dynamic")
    model.compile(optimizer, loss)            # fit scales the loss
    ```

    It wraps a Keras 3 optimizer on JAX, PyTorch or TensorFlow. On TensorFlow it also works under a strategy of
    `tf.distribute`. In a loop of your own, call `scale_loss`, differentiate, and pass the scaled gradients to `apply`,
    or to `stateless_apply` under `jax.jit`.

    A skipped step does not change the variables, the optimizer's slots (such as Adam's moments), averages of the
    weights or `iterations`. The state of the policy is in Keras variables. `fit` therefore updates it under `jit`, too,
    and Keras's files contain it.

    Under `jit` and in a `tf.function` nothing synchronises with the host. Otherwise `apply` reads one bool per step, as
    Keras's own wrapper does. It reads a second bool after an overflow, and one more with a guard. On TensorFlow, an
    eager step also reads the state.

    Args:
        inner_optimizer: A Keras 3 optimizer. You can read and set its settings on the wrapper.
        policy: Anything that `as_policy` accepts.
        guard: A `SpikeGuard`, which skips a step if its gradient norm is far above the norms before it. The step then
            does not change the loss scale or its counters. The norm is computed from the unscaled gradients, before
            clipping.
        global_clipnorm: The norm to which unscaled gradients are clipped. The check of the gradients computes their
            norm, so that clipping does not read them again.
        name: The name of the optimizer.

    Raises:
        TypeError: `inner_optimizer` is not a Keras 3 optimizer, or it scales the loss already.
        ValueError: `global_clipnorm` is set although the inner optimizer has one or accumulates gradients; or the inner
            optimizer has a `loss_scale_factor`, or is in another wrapper.
        PolicyError: Another argument is not valid.
    """

    def __init__(
        self,
        inner_optimizer: Any,
        policy: core.PolicyLike = "dynamic",
        *,
        guard: core.SpikeGuard | None = None,
        global_clipnorm: float | None = None,
        name: str | None = None,
    ) -> None:
        require_training()
        policy = core.as_policy(policy)
        adapters.check_guard(guard)
        self._require_optimizer(inner_optimizer)
        _require_single_clip(inner_optimizer, global_clipnorm)
        _require_single_wrapper(self, inner_optimizer)
        # The constructor of Keras's wrapper is not called: it would set an attribute for each setting of Keras's rule.
        keras.optimizers.Optimizer.__init__(self, learning_rate=0.0, name=name)
        self.inner_optimizer = inner_optimizer
        self.policy: core.ScalingPolicy = policy
        self.guard = guard
        self._max_norm = None if global_clipnorm is None else float(global_clipnorm)
        self._watch = core.ScaleWatch()
        start = policy.init_state()
        with keras.name_scope(self.name, caller=self):
            self._state = StateVariables(start)
            self._guard_state = StateVariables(NoState() if guard is None else guard.init_state(), "guard_")
            self._last = StateVariables(LastStep(), "last_")
        self._losses = Losses(self._state, float(start.loss_scale))
        # An attribute, because Keras tracks the variables in lists that are attributes.
        self._stored_variables = [*self._state.variables, *self._last.variables, *self._guard_state.variables]

    def build(self, var_list: list[Any]) -> None:
        """Create the inner optimizer's variables.

        Args:
            var_list: The variables to train.
        """
        self._build_inner(self.inner_optimizer, var_list)
        # `Optimizer.build` is not called: it would create averages and accumulators for the wrapper.
        # `__dict__` avoids Keras's tracking of attributes.
        self.__dict__["_trainable_variables"] = list(var_list)
        self.built = True

    @native.unconverted
    def scale_loss(self, loss: Tree) -> Tree:
        """Multiply a loss by the loss scale, in float32 or wider. Keras calls this method in `fit`.

        Args:
            loss: An array of any shape and dtype, or a nested structure of them.

        Returns:
            The scaled loss. Differentiate it, and pass the gradients to `apply`. Does not synchronise with the host.

        Raises:
            CallOrderError: The loss is scaled already.
        """
        return self._scaled(loss, by_keras=True)

    def _scaled(self, loss: Tree, by_keras: bool) -> Tree:
        self._require_unscaled(loss)
        state = self._state.read(1)
        scaled = scale(loss, state)
        mark = self._losses.scale(ops.copy(state.loss_scale) if BACKEND == "torch" else state.loss_scale, by_keras)
        if mark is not None:
            for leaf in adapters.tree.leaves(scaled):
                if leaf is not None and not returns_gradients(leaf):  # tracers take no attributes
                    leaf._loss_scaling = mark
        return scaled

    def _require_unscaled(self, loss: Any) -> None:
        if any(self._losses.mark_of(leaf) is not None for leaf in adapters.tree.leaves(loss)):
            raise CallOrderError("this loss is scaled already; scale it once a step, or leave it to minimize")

    @native.unconverted
    def apply(self, grads: Iterable[Any], trainable_variables: Any = None, *, loss: Any = None) -> None:
        """Apply gradients of a scaled loss, or skip the step and change only the state of the policy.

        The gradients are divided by the scale of the last loss that was scaled. If no loss was scaled, they are divided
        by the current scale, and a warning says so once.

        Args:
            grads: A scaled gradient or None for each variable: an array in the shape of the variable.
            trainable_variables: The variables. If left out, the variables that the optimizer was built with.
            loss: The scaled loss of these gradients, if you scaled another loss after it.

        Raises:
            RuntimeError: The gradients are traced by JAX.
            ValueError: The numbers of gradients and variables differ, `loss` is not a loss that `scale_loss` returned,
                or the caller is in a strategy, but not in one of its replicas.
            OverflowStreakError: The step reaches a limit, as in `check_limits`, and does not run in a graph. If there
                is a limit, each eager step reads the state.
        """
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        gradients = list(grads)
        self._require_same_number(gradients, variables)
        if is_compiling():  # torch.compile would break its graph where the record is read
            loss_scale = self._state.read(1).loss_scale
        else:
            self._check_loss()
            loss_scale = self._losses.last() if loss is None else self._named(loss).loss_scale
        self._take(gradients, variables, loss_scale)

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> Any:
        """Call `apply`, and return the count of applied steps.

        Args:
            grads_and_vars: The (gradient, variable) pairs of a scaled loss.
        """
        self.apply(*zip(*grads_and_vars, strict=True))
        return self.inner_optimizer.iterations

    def _named(self, loss: Any) -> ScaledLoss:
        """Return the mark of the scaled loss that the caller passes as `loss`."""
        mark = self._losses.mark_of(next(adapters.tree.leaves(loss), None))
        if mark is None:
            raise ValueError(
                f"loss={describe(loss)} was not scaled by this optimizer; pass what scale_loss or get_scaled_loss "
                "returned"
            )
        return mark

    def _check_loss(self) -> None:
        """Warn if no loss was scaled before this step, or if the caller may have divided the gradients."""
        if not self._losses.is_scaled:
            self._warn_once(
                "scale_loss was not called before this step, but the step divides the gradients by the loss scale; "
                "differentiate optimizer.scale_loss(loss)"
            )
        self._warn_if_divided(takes_scaled=True)

    def _warn_if_divided(self, takes_scaled: bool) -> None:
        if self._losses.may_be_divided(takes_scaled):
            self._warn_once(
                "the loss scale was read between scale_loss and apply, but apply divides the gradients by it; do not "
                "divide them yourself, and if you read the scale for a log, read it after apply"
            )

    def _warn_once(self, message: str) -> None:
        if not self._losses.has_warned and core.BaseScaling.of(self.policy).scales_losses:
            self._losses.has_warned = True
            adapters.warn_caller(message)

    def _take(self, grads: list[Any], variables: list[Any], loss_scale: Any, is_summed: bool = False) -> None:
        """Take or skip a step. `loss_scale` is the scale of the gradients, or None if they are unscaled."""
        native.require_replica()
        place = place_of(grads)
        if place is TRACED and BACKEND == "jax":
            raise RuntimeError("apply reads a flag, which has no value under jax.jit; call stateless_apply there")
        if not self.built:
            native.call_once(lambda: self._build_for(variables))
        grads = grads if is_summed else native.sum_over_replicas(grads)
        merges, max_norm = native.merges_replicas(), self._find_max_norm()
        place_of_check = EAGER if place is HOST and merges else place  # a merge call accepts arrays only
        result, divisor = self._check(grads, variables, loss_scale, max_norm, place_of_check)

        def step(result: CheckResult, apply: Callable[[], None]) -> None:
            with place.lock(self):
                applies, before, after = self._decide(result, place)
                place.cond(applies, apply, lambda: None)
                self._assign(after, before, place)
            if place is HOST:
                self._check_and_log(after)

        def update(*grads: Any) -> None:
            arrays = grads if max_norm is None else [None if grad is None else dense(grad) for grad in grads]
            self._apply_inner(divide_grads(list(arrays), variables, divisor), variables)

        result = native.agree(result)
        if merges:
            native.merge(step, result, update, grads)
        else:
            step(result, lambda: update(*grads))
        if place is EAGER and self._has_limits():
            self.check_limits()

    @staticmethod
    def _require_same_number(grads: list[Any], variables: list[Any]) -> None:
        if len(grads) != len(variables):
            raise ValueError(
                f"{len(grads)} gradients came for {len(variables)} variables; pass one gradient or None for each, and "
                "call optimizer.build(model.trainable_variables) first, or compile the model again with a new optimizer"
            )

    # `lossscale_tf` overrides the next two methods and `_apply_inner`, because tf_keras's optimizers are different.
    @staticmethod
    def _require_optimizer(inner: Any) -> None:
        if not isinstance(inner, keras.optimizers.Optimizer):
            raise TypeError(
                f"inner_optimizer={describe(inner)} is not a Keras optimizer; pass one, such as keras.optimizers.Adam()"
            )
        if isinstance(inner, keras.optimizers.LossScaleOptimizer):
            raise TypeError(f"inner_optimizer is a {type(inner).__name__}, which scales the loss already; wrap it once")
        if inner.loss_scale_factor is not None:
            raise ValueError(
                f"inner_optimizer has loss_scale_factor={inner.loss_scale_factor!r}, which divides its gradients "
                "again; make the optimizer without it, and pass this scale to the wrapper as its policy"
            )

    _build_inner = staticmethod(lambda inner, variables: inner.build(variables))
    _is_overwritten = staticmethod(is_overwritten)

    def _build_for(self, variables: list[Any]) -> None:
        with keras.name_scope(self.name, caller=self), native.outside_traces(variables):
            self.build(variables)

    def _apply_inner(self, grads: list[Any], variables: list[Any]) -> None:
        self._call_inner(self.inner_optimizer.apply, grads, variables)

    def _call_inner(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the inner optimizer without its sum over replicas and its clipping, which are done."""
        # `apply` has no argument to turn these off. Eagerly the sum takes a tenth of a step, even with one replica:
        # https://github.com/keras-team/keras/blob/v3.15.1/keras/src/backend/tensorflow/optimizer.py
        methods = {"_all_reduce_sum_gradients": list} if BACKEND == "tensorflow" else {}
        if self._max_norm is None and self._find_max_norm() is not None:
            methods["_clip_gradients"] = list
        attributes = vars(self.inner_optimizer)  # avoids Keras's tracking of attributes
        attributes.update(methods)
        try:
            return function(*args)
        finally:
            for name in methods:
                attributes.pop(name, None)  # another replica may have removed it before

    def stateless_apply(
        self, optimizer_variables: list[Any], grads: list[Any], trainable_variables: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return the variables after a step that is applied or skipped. A pure function, for `jax.jit`.

        Args:
            optimizer_variables: The values of `variables`, in their order.
            grads: A scaled gradient or None for each variable that the optimizer was built with.
            trainable_variables: The values of these variables.

        Returns:
            The new values of the trainable variables, and the new values of `variables`. Does not synchronise with the
                host under `jit`.

        Raises:
            ValueError: The optimizer is not built, or was built with another number of variables.
        """
        if not self.built:
            raise ValueError("the optimizer has no variables yet; call optimizer.build(model.trainable_variables)")
        self._require_same_number(grads, self._trainable_variables)
        self._check_loss()
        place = TRACED if is_traced([*grads, *optimizer_variables]) else EAGER
        if place is TRACED:
            self._losses.apply_traced()
        own = len(self._variables)
        mapping = zip(self._variables, optimizer_variables[:own], strict=True)
        with keras.StatelessScope(state_mapping=list(mapping)) as scope:
            loss_scale, max_norm = self._state.read(1).loss_scale, self._find_max_norm()
            result, divisor = self._check(grads, self._trainable_variables, loss_scale, max_norm, place)
            applies, states_before, states_after = self._decide(result, place)
            self._assign(states_after, states_before, place)
        state = [scope.get_current_value(variable) for variable in self._variables]
        before = list(trainable_variables), list(optimizer_variables[own:])

        def step() -> tuple[list[Any], list[Any]]:
            unscaled_grads = divide_grads(grads, self._trainable_variables, divisor)
            return self._call_inner(self.inner_optimizer.stateless_apply, before[1], unscaled_grads, before[0])

        new_trainable_variables, inner_variables = place.cond(applies, step, lambda: before)
        return new_trainable_variables, state + inner_variables

    def _check(
        self, grads: list[Any], variables: list[Any], loss_scale: Any, max_norm: float | None, place: Traced
    ) -> tuple[CheckResult, Any]:
        """Return the result of the check, and the divisor that unscales and clips; None if it is 1."""
        result = check(grads, variables, loss_scale, self.guard is not None or max_norm is not None, place)
        if max_norm is None or (place is HOST and float(result.norm) <= max_norm):
            return result, loss_scale
        norm = ops.convert_to_tensor(result.norm) if place is HOST else result.norm
        clip = adapters.clip_divisor(norm, max_norm, xp=xp)
        return result._replace(norm=norm), clip if loss_scale is None else clip * ops.cast(loss_scale, clip.dtype)

    def _decide(self, result: CheckResult, place: Traced) -> tuple[Any, States, States]:
        """Record the step, and return whether it is applied, and the states before and after it."""
        before, (finite, norm) = self._read(place), place.decision(*result)
        applies, *after = adapters.decide(self.policy, self.guard, *before, finite, norm, xp=place.xp)
        outcome = place.where(applies, 1, place.where(finite, 3, 2))
        # Before `_assign`: if TorchInductor 2.13 wrote both in one graph, it would record the new scale.
        place.assign(self._last, LastStep(outcome, before.scale.loss_scale, norm))
        applies = result.flag if self.guard is None else applies  # the host may know this flag already
        return applies, before, States(*after)

    def _read(self, place: Traced = HOST) -> States:
        """Return the states, by default as host scalars."""
        return States(place.read(self._state), place.read(self._guard_state))

    def _assign(self, states: States, before: States, place: Traced) -> None:
        place.assign(self._state, states.scale, before.scale)
        place.assign(self._guard_state, states.guard, before.guard)

    def _find_max_norm(self) -> float | None:
        """Return the norm to which this wrapper clips: its own setting, or the setting of a Keras 3 optimizer.

        An inner optimizer that accumulates gradients clips their mean itself.
        """
        inner = self.inner_optimizer
        if self._max_norm is not None or not isinstance(inner, keras.optimizers.Optimizer):
            return self._max_norm
        return None if inner.gradient_accumulation_steps or inner.clipnorm else inner.global_clipnorm

    @property
    def global_clipnorm(self) -> float | None:
        """The norm to which unscaled gradients are clipped, by this wrapper or by the inner optimizer.

        Setting it does not change a step that is traced already.
        """
        inner = vars(self).get("inner_optimizer")
        return getattr(inner, "global_clipnorm", None) if self._max_norm is None else self._max_norm

    @global_clipnorm.setter
    def global_clipnorm(self, norm: float | None) -> None:
        inner: Any = vars(self).get("inner_optimizer")  # None when Keras's constructor sets its default
        if norm is not None:
            adapters.check_setting("global_clipnorm", norm)
        if _clips_itself(inner):
            inner.global_clipnorm = norm
        else:
            self._max_norm = norm

    clipnorm, clipvalue, weight_decay = (forwarded(name, None) for name in ("clipnorm", "clipvalue", "weight_decay"))
    use_ema, ema_momentum = forwarded("use_ema", False), forwarded("ema_momentum", None)
    ema_overwrite_frequency = forwarded("ema_overwrite_frequency", None)
    gradient_accumulation_steps = forwarded("gradient_accumulation_steps", None)
    add_variable, add_optimizer_variables = forwarded("add_variable"), forwarded("add_optimizer_variables")
    add_variable_from_reference = forwarded("add_variable_from_reference")
    assign, assign_add, assign_sub = forwarded("assign"), forwarded("assign_add"), forwarded("assign_sub")
    exclude_from_weight_decay, update_step = forwarded("exclude_from_weight_decay"), forwarded("update_step")

    @property
    def loss_scale_factor(self) -> None:
        """Always None, because the policy scales the loss."""
        return None

    @loss_scale_factor.setter
    def loss_scale_factor(self, factor: float | None) -> None:
        if factor is not None:
            raise AttributeError(
                f"loss_scale_factor={factor!r} cannot be set, since the policy scales the loss; make the optimizer "
                "with another policy"
            )

    @property
    def loss_scale(self) -> Any:
        """The current loss scale: float32, of shape `()`."""
        self._losses.read_scale()
        return ops.copy(self._state.variables[0])

    @loss_scale.setter
    def loss_scale(self, loss_scale: float) -> None:
        raise AttributeError(
            f"loss_scale={describe(loss_scale)} cannot be set, since the policy changes the scale; make the optimizer "
            "with another policy, or pass load_state_dict a state_dict() with another loss_scale"
        )

    @property
    def dynamic_scale(self) -> Any:
        """The variable of the loss scale. Keras's wrapper uses this name."""
        self._losses.is_read = True
        return self._state.variables[0]

    @property
    def scale_state(self) -> core.ScaleState:
        """The policy's state, as arrays of shape `()`."""
        self._losses.is_read = True
        return self._state.copy()

    @property
    def guard_state(self) -> core.GuardState | None:
        """The spike guard's state, as arrays of shape `()`; None without a guard."""
        return None if self.guard is None else self._guard_state.copy()

    @property
    def last_step(self) -> core.StepInfo:
        """The outcome of the last step, as arrays of shape `()`. Before the first step, a step that was not applied.

        Does not synchronise with the host. In a traced `train_step` it is the outcome of the traced step. In a callback
        for batches on JAX, call `model.jax_state_sync()` first.
        """
        last, state = self._last.copy(), self._state.copy()
        applied, overflowed, spiked = (last.outcome == code for code in (1, 2, 3))
        return core.StepInfo(applied, last.loss_scale, state.loss_scale, state.overflow_streak, overflowed, spiked)

    def metrics(self) -> dict[str, Any]:
        """Return the state's numbers under stable names; see `lossscale_core.metrics`. Does not synchronise.

        Returns:
            Arrays of shape `()`, by the names of `lossscale_core.metrics`.
        """
        return core.metrics(self._state.copy(), guard=self.guard_state)

    def diagnose(self) -> str:
        """Describe the condition of loss scaling in one or two sentences; see `lossscale_core.diagnose`.

        Synchronises with the host.
        """
        states = self._read()
        return self._watch.diagnose(self.policy, states.scale, guard=states.guard or None)

    def check_limits(self) -> None:
        """Log events, and raise an error if a limit is reached. Synchronises with the host.

        `LossScaleLogger` calls this method at the end of each epoch. If your own loop takes its steps in a graph or
        under `jit`, call it yourself.

        Raises:
            OverflowStreakError: The policy's `max_overflow_streak` or the guard's `max_streak` is reached.
        """
        self._check_and_log(self._read())

    def _check_and_log(self, states: States) -> None:
        core.check_limits(self.policy, states.scale, guard=self.guard, guard_state=states.guard)
        self._watch.log(self.policy, states.scale)

    def set_weights(self, weights: list[Any]) -> None:
        """Set the values of `variables`.

        Args:
            weights: An array for each variable, in their order and shapes.

        Raises:
            ValueError: There are more or fewer arrays than variables, or a shape differs.
        """
        for variable, value in zip(self.variables, weights, strict=True):
            variable.assign(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the states and the policy as plain numbers, which other frameworks can load.

        Keras's files contain the state without this method. Synchronises with the host.
        """
        states = self._read_and_log()
        return core.state_to_dict(states.scale, self.policy, guard=states.guard or None)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a saved state, with the policy and the guard of this optimizer.

        A `CheckpointWarning` names each setting that differs from the saved policy. It also says if the saved state
        lacks the state of the guard, or if this optimizer has no guard for it.

        Args:
            saved: The result of `state_dict`, or of `lossscale_core.state_to_dict` in any framework.

        Raises:
            CheckpointError: `saved` is not a saved state, or a newer version of this package wrote it.
        """
        state = core.state_from_dict(saved, self.policy)
        self._state.assign(state)
        self._guard_state.assign(NoState() if self.guard is None else adapters.guard_state_from_dict(saved))
        if self.guard is None and saved.get("guard"):
            adapters.warn_caller("the saved guard is dropped; pass guard=SpikeGuard()", CheckpointWarning)
        self._last.assign(LastStep())
        self._watch = core.ScaleWatch()

    def get_config(self) -> dict[str, Any]:
        """Return the config for `from_config`, without the running state: strings, numbers and dicts of them.

        Raises:
            PolicyError: The policy has no `kind`, so that a config cannot describe it.
        """
        return {
            "name": self.name,
            "inner_optimizer": _for_every_backend(keras.saving.serialize_keras_object(self.inner_optimizer)),
            "policy": core.policy_to_dict(self.policy),
            "guard": None if self.guard is None else dataclasses.asdict(self.guard),
            "global_clipnorm": self._max_norm,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Self:
        """Make an optimizer from a config.

        Args:
            config: The result of `get_config`. This method does not change it.
            custom_objects: The user's classes that the inner optimizer's config names.

        Returns:
            The wrapper, around a new inner optimizer.
        """
        inner = keras.saving.deserialize_keras_object(config["inner_optimizer"], custom_objects=custom_objects)
        policy = core.policy_from_dict(config["policy"])  # as_policy would open a file that the config names
        guard = None if config["guard"] is None else core.SpikeGuard(**config["guard"])
        return cls(**{**config, "inner_optimizer": inner, "policy": policy, "guard": guard})

    def save_own_variables(self, store: Any) -> None:
        """Store the states by name. Keras itself stores the inner optimizer's variables.

        Args:
            store: A mapping of names to arrays, which Keras writes to a file.
        """
        numbers = self.state_dict()
        numbers.pop("policy", None)  # the config has the policy
        guard = {f"guard_{name}": number for name, number in numbers.pop("guard", {}).items()}
        for name, number in {**numbers, **guard}.items():
            store[name] = np.asarray(number)

    def load_own_variables(self, store: Any) -> None:
        """Load the states that `save_own_variables` stored on any backend.

        A `CheckpointWarning` says if the scale or the guard starts over, because the file does not contain its state.

        Args:
            store: A mapping of names to arrays.
        """
        # Keras's store has `keys`, but it is not a mapping.
        numbers = {name: np.asarray(store[name]) for name in store.keys()}  # noqa: SIM118
        if "loss_scale" not in numbers:
            adapters.warn_caller(
                "the file was saved without this wrapper, so that the loss scale starts over; to keep the inner "
                "optimizer's variables, load them without the wrapper, and wrap the loaded optimizer",
                CheckpointWarning,
            )
            return
        guard = {name.removeprefix("guard_"): numbers.pop(name) for name in list(numbers) if name.startswith("guard_")}
        self.load_state_dict({**numbers, "guard": guard or None})

    def _trackable_children(self, save_type: str = "checkpoint", **settings: Any) -> dict[str, Any]:
        """Return the objects that TensorFlow saves. A SavedModel must contain all variables that its functions use."""
        children: dict[str, Any] = super()._trackable_children(save_type, **settings)
        return {**children, **self._losses.variables()} if save_type == "savedmodel" else children

    def _has_limits(self) -> bool:
        """Return whether a limit may raise an error after a step. The step must then read the state."""
        limit = core.BaseScaling.of(self.policy).max_overflow_streak
        return limit is not None or (self.guard is not None and self.guard.max_streak is not None)

    def _read_and_log(self) -> States:
        """Return the states as host scalars, and log events of the loss scale."""
        states = self._read()
        self._watch.log(self.policy, states.scale)
        return states

    def __repr__(self) -> str:
        inner, guard = self.inner_optimizer, f", guard={self.guard}" if self.guard else ""
        return f"{type(self).__name__}({type(inner).__name__}, policy={self.policy}{guard})"

    def __getattr__(self, name: str) -> Any:
        hint = ""
        if name in ("get_scaled_loss", "get_unscaled_gradients", "minimize", "compute_gradients"):
            hint = "; lossscale_tf.LossScaleOptimizer has it, and this class has scale_loss and apply"
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'{hint}")


def _for_every_backend(config: Any) -> Any:
    """Replace the names of Keras's optimizer classes for torch by their public names, which work on each backend."""
    if isinstance(config, list):
        return [_for_every_backend(item) for item in config]
    if not isinstance(config, dict):
        return config
    is_for_torch = str(config.get("module")).startswith("keras.src.backend.torch.")
    public = {"module": "keras.optimizers", "registered_name": None} if is_for_torch else {}
    return {**{name: _for_every_backend(item) for name, item in config.items()}, **public}


_wrappers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""A weak reference to the wrapper of each inner optimizer."""


def _require_single_wrapper(wrapper: Any, inner: Any) -> None:
    """Raise `ValueError` if another wrapper has this optimizer. Files would have the same names for both wrappers."""
    other = _wrappers.get(inner, lambda: None)()
    if other is not None or getattr(inner, "_is_wrapped_by_loss_scale_optimizer", False):  # tf_keras sets it
        raise ValueError(
            '"inner_optimizer" is already wrapped by a LossScaleOptimizer. An optimizer can only be wrapped by a '
            f"single LossScaleOptimizer; make another {type(inner).__name__}, for example by from_config(get_config())"
        )
    _wrappers[inner] = weakref.ref(wrapper)


def _clips_itself(inner: Any) -> bool:
    """Return whether the inner optimizer has the setting `global_clipnorm`, or must have it because it accumulates."""
    has_norm = getattr(inner, "global_clipnorm", None) is not None
    return has_norm or bool(getattr(inner, "gradient_accumulation_steps", None))


def _require_single_clip(inner: Any, norm: float | None) -> None:
    """Raise an error if the norm is not valid, or if it must be set on the inner optimizer."""
    if norm is None:
        return
    adapters.check_setting("global_clipnorm", norm)
    if _clips_itself(inner):
        inner_norm, steps = (getattr(inner, name, None) for name in ("global_clipnorm", "gradient_accumulation_steps"))
        raise ValueError(
            f"global_clipnorm={norm!r}, and the inner optimizer has global_clipnorm={inner_norm!r} and "
            f"gradient_accumulation_steps={steps!r}; set global_clipnorm on the inner optimizer alone, which clips the "
            "mean of the micro-batches if it accumulates"
        )
