"""`LossScaleOptimizer`: a wrapper for any of `mlx.optimizers` that applies or skips each step as a whole."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import MultiOptimizer, Optimizer
from mlx.utils import tree_map

import lossscale_core as core
from lossscale_core import adapters
from lossscale_core.adapters import explain_arguments, shown, shown_names, tree
from lossscale_core.errors import CheckpointError, CheckpointWarning, PolicyError
from lossscale_mlx._norm import check_and_measure, clip
from lossscale_mlx._restore import Snapshot, read
from lossscale_mlx._verbs import all_finite, as_arrays, init_state, lift, scale, select, unscale


class LossScaleOptimizer(Optimizer):
    """An optimizer of MLX that takes the gradients of a scaled loss, and skips the steps that overflow.

    ```python
    optimizer = LossScaleOptimizer(mlx.optimizers.Adam(1e-3), "dynamic")
    state = [model.state, optimizer.state, mx.random.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def step(x, y):
        loss, grads = optimizer.value_and_grad(model, loss_fn)(model, x, y)
        optimizer.update(model, grads)
        return loss
    ```

    A skipped step leaves the parameters and the state of the wrapped optimizer as they were, bit for bit, its step
    count and scheduled learning rate included. A step evaluates nothing and does not synchronise with the host.

    Args:
        inner: An optimizer of `mlx.optimizers`, or one that derives from its `Optimizer`.
        policy: Anything that `lossscale_core.as_policy` accepts.
        max_norm: The global norm to which unscaled gradients are clipped. The same read checks whether they are finite.
        guard: A `SpikeGuard`, which skips a step if its norm is far above the norms before it, and then leaves the loss
            scale and its counters unchanged. The norm is that of the unscaled gradients before clipping.
        keep_dtypes: Whether `inner` gets float16 and bfloat16 parameters as they are, with gradients in the dtype in
            which they came, unscaled in float32 first. This halves the memory of its state, but values that are too
            small for float16 become zero, and Adam divides by them. By default `inner` computes in float32 and has its
            state in float32, and only the new parameters are cast back.

    Raises:
        TypeError: `inner` is not an optimizer of MLX.
        PolicyError: `inner` is wrapped already, `policy` is not a policy, or a setting breaks its rule.
    """

    # The constructor of the base class is not called: it makes a state, and the state is that of `inner`.
    @explain_arguments
    def __init__(
        self,
        inner: Optimizer,
        policy: core.PolicyLike = "dynamic",
        *,
        max_norm: float | None = None,
        guard: core.SpikeGuard | None = None,
        keep_dtypes: bool = False,
    ) -> None:
        if not isinstance(inner, Optimizer):
            raise TypeError(f"inner={shown(inner)} must be an optimizer of MLX; pass mlx.optimizers.Adam(1e-3), say")
        if any(isinstance(each, LossScaleOptimizer) for each in _optimizers(inner)):
            raise PolicyError("inner is a LossScaleOptimizer already, or holds one; wrap the optimizer once")
        if not isinstance(keep_dtypes, bool):
            raise PolicyError(f"keep_dtypes={shown(keep_dtypes)} must be True or False; leave it out for False")
        adapters.check_guard(guard)
        self.inner = inner
        """The wrapped optimizer."""
        self.policy = core.as_policy(policy)
        """The scaling policy, frozen."""
        self.max_norm: float | None = None if max_norm is None else adapters.check_setting("max_norm", max_norm)
        """The norm to which gradients are clipped; None without clipping."""
        self.guard = guard
        """The spike guard, frozen; None without one."""
        self.keep_dtypes = keep_dtypes
        """Whether the wrapped optimizer gets float16 and bfloat16 as they are."""
        state = init_state(self.policy)
        self._state_type: Callable[..., core.ScaleState[mx.array]] = type(state)
        no = mx.array(False)
        # The dicts are never replaced, since `mx.compile` reads and writes what they hold.
        self._own: dict[str, dict[str, mx.array]] = {
            "scale_state": state._asdict(),
            "last_step": {"applied": no, "loss_scale_used": state.loss_scale, "overflowed": no, "spiked": no},
        }
        if guard is not None:
            self._own["guard_state"] = as_arrays(guard.init_state())._asdict()
        if guard is not None or max_norm is not None:
            self._own["last_step"]["norm"] = mx.array(0.0)
        self._initialized = False

    @property
    def state(self) -> dict[str, Any]:
        """The state for `mx.compile` and for saving: a dict of dicts, which a step writes in place.

        `inner_state` is that of the wrapped optimizer, `scale_state` the policy's, `guard_state` the guard's if there
        is one, and `last_step` the outcome of the last step.

        Assign a saved state before `mx.compile` gets this one: a function that is compiled already keeps the moments
        that it had. Its numbers are restored as `load_state_dict` does it, with the same warnings and errors, which
        synchronises with the host.
        """
        return {"inner_state": self.inner.state, **self._own}

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        given = state if isinstance(state, Mapping) else {}
        missing = [
            key for key in ("inner_state", "scale_state", "last_step") if not isinstance(given.get(key), Mapping)
        ]
        settings = [name for name in ("step", "learning_rate", "states") if name in self.inner.state]
        missing += [] if missing else [f"inner_state.{each}" for each in settings if each not in given["inner_state"]]
        if missing:
            raise CheckpointError(
                f"the state has no {shown_names(missing)}, but {shown_names(given) or shown(state)}; assign the state "
                "of a LossScaleOptimizer, or assign that of the wrapped optimizer to inner.state"
            )
        self.load_state_dict({"version": 1, **given["scale_state"], "guard": given.get("guard_state")})
        last = self._own["last_step"]
        last.update((name, mx.array(value)) for name, value in given["last_step"].items() if name in last)
        self.inner.state, self._initialized = tree_map(lambda leaf: leaf, given["inner_state"]), False

    @property
    def step(self) -> mx.array:
        """The number of steps that the wrapped optimizer has taken; a skipped step does not count.

        Of a `MultiOptimizer` it is the number of its first optimizer, as the learning rate is.
        """
        return _optimizers(self.inner)[0].step

    @property
    def learning_rate(self) -> mx.array:
        """The learning rate of the wrapped optimizer, which may be set; a schedule follows applied steps only."""
        return self.inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: float | mx.array) -> None:
        self.inner.learning_rate = learning_rate

    @property
    def scale_state(self) -> core.ScaleState[mx.array]:
        """The policy's state, as arrays of shape `()`."""
        return self._state_type(**self._own["scale_state"])

    @property
    def guard_state(self) -> core.GuardState[mx.array] | None:
        """The spike guard's state, as arrays of shape `()`; None without a guard."""
        return None if self.guard is None else core.GuardState(**self._own["guard_state"])

    @property
    def last_step(self) -> core.StepInfo[mx.array]:
        """The outcome of the last step, as arrays of shape `()`; before the first step, `applied` is False.

        Within a compiled function it is the outcome of the step that is being traced.
        """
        now, last = self.scale_state, {key: each for key, each in self._own["last_step"].items() if key != "norm"}
        return core.StepInfo(loss_scale_after=now.loss_scale, overflow_streak=now.overflow_streak, **last)

    @property
    def last_norm(self) -> mx.array | None:
        """The global norm of the last step's unscaled gradients before clipping: float32 or wider, shape `()`.

        Infinity if they overflowed; None without `max_norm` and `guard`.
        """
        return self._own["last_step"].get("norm")

    def init(self, parameters: Any) -> None:
        """Initialise the state of the wrapped optimizer; otherwise the first step does this.

        Args:
            parameters: The tree of parameters, such as `model.trainable_parameters()`.
        """
        self.inner.init(parameters if self.keep_dtypes else tree_map(lift, parameters))
        self._initialized = True

    def scale(self, loss: Any) -> Any:
        """Multiply `loss` by the loss scale: differentiate the result, and pass the gradients to `update`.

        Args:
            loss: An array of any shape and numeric dtype, a Python number, or a tree of them.

        Returns:
            The scaled loss, in float32 or wider.
        """
        return scale(loss, self.scale_state)

    def value_and_grad(self, model: nn.Module, fn: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
        """Do as `mlx.nn.value_and_grad` does, with the gradients of the scaled loss.

        Args:
            model: The module to differentiate for, by its trainable parameters.
            fn: Returns the loss without scaling it, an array of shape `()`, or a tuple that begins with it.

        Returns:
            A function with the arguments of `fn`, which returns what `fn` returns, unchanged, and the scaled
            gradients: pass these to `update`.
        """

        def scaled(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            value = fn(*args, **kwargs)
            return self.scale(value[0] if isinstance(value, tuple | list) else value), value

        def value_and_scaled_grad(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            (_, value), grads = nn.value_and_grad(model, scaled)(*args, **kwargs)
            return value, grads

        return value_and_scaled_grad

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        """Take or skip a step, and return the parameters after it; `update(model, gradients)` also writes them.

        The gradients are unscaled, checked, clipped and passed to the wrapped optimizer. Both outcomes are computed,
        and `mx.where` chooses between them, because MLX has no conditional. Does not synchronise with the host.

        Args:
            gradients: A tree of gradients of the scaled loss, or a sum or mean of several at the same scale.
            parameters: A tree of parameters that holds those of the gradients, or a model.

        Returns:
            The parameters in the structure of the gradients, in their own dtypes.

        Raises:
            TypeError: A gradient is not an array of MLX.
            ValueError: A gradient is None, or has another shape than its parameter.
            CallOrderError: In a function that `mx.compile` traces, the wrapped optimizer changes the structure of its
                state, or a shape or dtype in it. Elsewhere such a step synchronises with the host.
        """
        old: Any = tree_map(lambda _, parameter: parameter, gradients, parameters)
        tree.map_leaves(lambda grad, parameter: None, gradients, old)  # requires that their shapes are the same
        before = self.scale_state
        grads: Any = unscale(gradients, before)
        outcome = {}
        if "norm" in self._own["last_step"]:
            finite, outcome["norm"], unit, root = check_and_measure(gradients, before.loss_scale)
            grads = grads if self.max_norm is None else clip(grads, unit, root, self.max_norm)
        else:
            finite = all_finite(grads)
        if self.keep_dtypes:  # a value that is finite in float32 may be infinite in the dtype of the gradient
            grads = tree_map(lambda grad, as_given: grad.astype(as_given.dtype), grads, gradients)
            finite = finite & all_finite(grads)
        spiked = mx.array(False)
        if self.guard is not None and self.guard_state is not None:
            # Infinity leaves the guard as it is.
            finite_norm = mx.where(finite, outcome["norm"], float("inf")).astype(mx.float32)
            accepted, guard_state = self.guard.check(self.guard_state, finite_norm, xp=mx)
            spiked = finite & ~accepted
            self._own["guard_state"].update(guard_state._asdict())
        applied = finite & ~spiked

        given = old if self.keep_dtypes else tree_map(lift, old)
        if not self._initialized:
            self.init(given)
        state_before = Snapshot(self.inner.state)
        new = self.inner.apply_gradients(grads, given)
        state_before.restore_unless(applied)

        after = self.policy.update(before, finite, xp=mx)
        if self.guard is not None:  # a spike is not a step of the policy
            after = select(spiked, before, after)
        self._own["scale_state"].update(after._asdict())
        outcome |= {"applied": applied, "loss_scale_used": before.loss_scale, "overflowed": ~finite, "spiked": spiked}
        self._own["last_step"].update(outcome)
        return tree_map(lambda a, b: mx.where(applied, a.astype(b.dtype), b), new, old)

    def minimize(self, model: nn.Module, loss_fn: Callable[[], Any], *, retries: int = 0) -> core.StepInfo[mx.array]:
        """Take a whole step: scale the loss, differentiate and update; with `retries`, repeat while it overflows.

        After a skipped try all arrays, dicts, lists and tuples of the model are as before, running averages included,
        and a retry draws the same random numbers. So the applied step is that of a run at the lower scale. Each try is
        one update of the policy; a policy that does not adapt never retries. Without `retries` it evaluates nothing,
        and `mx.compile` can trace it, as long as the forward pass keeps the structure of the model. With `retries` it
        synchronises with the host once for each try.

        Args:
            model: The model to train.
            loss_fn: Returns the loss without scaling it, an array of shape `()`, or a tuple that begins with it.
            retries: The largest number of further tries, each at the lowered scale.

        Returns:
            The outcome of the last try.

        Raises:
            CallOrderError: In a function that `mx.compile` traces, `retries` is not 0, or a step changes the structure
                of the model, or a shape or dtype of an array that is not trained. The message names it.
            OverflowStreakError: With `retries`, the last try reaches the policy's `max_overflow_streak`.
            SpikeStreakError: With `retries`, the last try reaches the guard's `max_streak`.
            PolicyError: `retries` is not a whole number from 0.
        """
        retries = adapters.check_setting("retries", retries)
        before, differentiate = Snapshot(model), self.value_and_grad(model, loss_fn)
        for left in range(retries if core.BaseScaling.of(self.policy).adapts else 0, -1, -1):
            key = mx.random.state[0]  # type: ignore[index]  # MLX says object
            _, grads = differentiate()
            model.update(self.apply_gradients(grads, model))
            info = self.last_step
            before.restore_unless(info.applied, retries=retries)
            if not left or not info.overflowed.item():
                break
            # The state is a list in some versions of MLX, and in others an object that only `seed` changes.
            mx.random.seed(key[0].item() << 32 | key[1].item())
        if retries:
            self.check_overflow_streak()
        return info

    def metrics(self) -> dict[str, mx.array]:
        """Return the state's numbers under stable names; see `lossscale_core.metrics`. Does not synchronise."""
        return core.metrics(self.scale_state, guard=self.guard_state)

    def diagnose(self) -> str:
        """Describe the condition of loss scaling in one or two sentences; see `lossscale_core.diagnose`. Synchronises.

        Returns:
            The text.
        """
        return core.diagnose(self.policy, self.scale_state, guard=self.guard_state)

    def check_overflow_streak(self) -> None:
        """Raise an error if the run has reached the policy's `max_overflow_streak` or the guard's `max_streak`.

        No step does this by itself, because it would have to wait. Synchronises with the host.

        Raises:
            CallOrderError: The call is within a function that `mx.compile` traces, where arrays have no values.
            OverflowStreakError: As many steps in a row as the policy's `max_overflow_streak` overflowed.
            SpikeStreakError: As many steps in a row as the guard's `max_streak` were spikes.
        """
        read(self.scale_state.overflow_streak, "check_overflow_streak()")
        adapters.check_overflow_streak(self.policy, self.scale_state)
        if self.guard is not None and self.guard_state is not None:
            adapters.check_spike_streak(self.guard, self.guard_state, self.last_norm)

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale's state, the guard's and the policy as plain numbers, which other frameworks restore.

        The state of the wrapped optimizer is not in it. Synchronises with the host.
        """
        return core.state_to_dict(self.scale_state, self.policy, guard=self.guard_state)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a saved state, with the policy and the guard of this optimizer.

        A `CheckpointWarning` names each difference from the saved policy, and a state of the guard that is missing or
        that has no guard here. A function that is compiled already continues from the saved state, too.

        Args:
            saved: The result of `state_dict`, or of `lossscale_core.state_to_dict` in any framework.

        Raises:
            CheckpointError: `saved` is not a saved state, or is one of a newer version.
        """
        state = core.state_from_dict(saved, self.policy)
        if self.guard is not None:
            self._own["guard_state"].update(as_arrays(adapters.guard_state_from_dict(saved))._asdict())
        elif saved.get("guard") is not None:
            warnings.warn("the saved guard is dropped; pass guard=SpikeGuard()", CheckpointWarning, stacklevel=2)
        self._own["scale_state"].update(as_arrays(state)._asdict())


def _optimizers(inner: Optimizer) -> list[Optimizer]:
    """Return the optimizers within a `MultiOptimizer`, or a list of the optimizer itself."""
    parts = inner.optimizers if isinstance(inner, MultiOptimizer) else []
    return [each for part in parts for each in _optimizers(part)] or [inner]
