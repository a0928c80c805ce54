"""`GradScaler`: torch's own interface around a policy, applying or skipping each optimizer's step as a whole."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lossscale_core import OnFloor, PolicyLike, SpikeGuard, diagnose, metrics, state_to_dict, tree
from lossscale_torch._checkpoint import given_interval, policy_of, require_same_on_ranks
from lossscale_torch._clip import clipping
from lossscale_torch._compiling import not_compiled
from lossscale_torch._decision import Ranks, require_member
from lossscale_torch._gradients import Gradients
from lossscale_torch._guard import Guards
from lossscale_torch._lookahead import plain
from lossscale_torch._minimize import Minimization
from lossscale_torch._protect import protection_of
from lossscale_torch._records import OptimizerRecords
from lossscale_torch._state import ScalerState
from lossscale_torch._step_info import StepInfo
from lossscale_torch._steps import HOOKS, Steps
from lossscale_torch._torch_names import TorchNames
from lossscale_torch._types import Tree
from lossscale_torch._unscaling import check_again
from lossscale_torch._voice import Voice


class GradScaler(TorchNames):
    """A drop-in for `torch.amp.GradScaler` that takes any policy and says what each step did.

    ```python
    scaler = GradScaler("cuda", policy="dynamic")
    scaler.scale(loss).backward()
    scaler.unscale_and_clip_(optimizer, max_norm=1.0)  # if you clip
    scaler.step(optimizer)
    info = scaler.update()
    if info.applied:
        scheduler.step()
    ```

    An ordinary optimizer costs one host synchronisation a step, in `step`; a fused one costs none.

    Args:
        device: The device type of the loss scale, such as `"cuda"`; it is placed where the first scaled loss lives.
        init_scale: torch's dynamic rule without `policy`: the first loss scale, kept between 2**-126 and 2**126.
        growth_factor: Multiplies the loss scale after `growth_interval` finite steps in a row.
        backoff_factor: Multiplies it after an overflow.
        growth_interval: The finite steps in a row before it grows; 0 never grows, as in torch.
        enabled: False makes every call do what it would do without a scaler.
        policy: Anything `lossscale_core.as_policy` takes, in the place of the four settings.
        process_group: Combines the decision over its ranks before anyone acts on it. Parameters sharded over a device
            mesh do so by themselves.
        joint_skip: An overflow in one optimizer skips all of them; call `unscale_` on each before the first `step`.
        half_gradients: Unscale float16 gradients in place, which may flush small ones to zero; otherwise they are
            refused.
        guard: A `SpikeGuard` that skips the step of an optimizer whose norm is far above its norms before, which the
            clip, or `unscale_` or `step` without one, measures. A spike leaves the loss scale and its counters alone.
        on_floor: What an overflow does that brings the loss scale down to the policy's `min_scale`: `"warn"` logs a
            warning, `"raise"` makes `update` raise a `ScaleFloorError` (after a fused optimizer, whose flag stays on
            its device, `get_scale`), and `"ignore"` says nothing while the scale is there.
        protect: Modules whose buffers a skipped step leaves as they were, such as BatchNorm's statistics. For a
            `torch.optim.swa_utils.AveragedModel`, `update_parameters` does nothing after a skipped step. The hooks end
            with the scaler; a copy or a pickle of it protects nothing.

    Raises:
        PolicyError: For `policy` beside torch's settings, and for settings that no policy takes.
        TypeError: For a `device` that is not one.

    """

    _replaced: frozenset[str] = frozenset()
    """The methods among `HOOKS` that a subclass has replaced."""

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        policy: PolicyLike | None = None,
        process_group: Any = None,
        joint_skip: bool = False,
        half_gradients: bool = False,
        guard: SpikeGuard | None = None,
        on_floor: OnFloor = "warn",
        protect: Iterable[torch.nn.Module] = (),
    ) -> None:
        self._device = device
        self._enabled = enabled and _is_available(device)
        self._follows_checkpoint = policy is None
        if not isinstance(device, str | torch.device):
            raise TypeError(f"device={device!r} must name a device type, such as 'cuda'; a policy goes to policy=")
        torchs = (init_scale, growth_factor, backoff_factor, growth_interval)
        self._state = ScalerState(policy_of(policy, torchs, self._enabled))
        if policy is None:
            self._interval_as_given = given_interval(growth_interval, self._state.policy)
        self._begun_with = (self._state.read_loss_scale(), 0)
        self._records = OptimizerRecords(self._state, Ranks(process_group), joint_skip, Guards(guard))
        protection = protection_of(protect if self._enabled else ())
        self._steps = Steps(self._records, self._enabled, half_gradients, Voice(on_floor), protection)

    @not_compiled
    def scale(self, outputs: Tree) -> Tree:
        """Return `outputs` times the loss scale: a tensor, or a nested structure or iterable of them.

        float16 and bfloat16 losses of any shape are lifted to float32. Call `backward` before the next `update`.
        Does not synchronise.

        Raises:
            RuntimeError: From `backward` after the next `update`, as with torch's own scaler.
            ValueError: For what is neither a tensor nor an iterable.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            if self._state.loss_scale is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            return self._records.losses.scale(outputs)  # type: ignore[return-value]  # cast() costs a call
        if isinstance(outputs, dict | list | tuple):
            return cast(Tree, tree.map_leaves(self.scale, outputs))
        if isinstance(outputs, Iterable) and not isinstance(outputs, str | bytes):
            return cast(Tree, map(self.scale, outputs))  # lazily, as torch's own scaler does
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")

    @not_compiled
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the loss scale, in place, and note whether they are finite.

        An optimizer without gradients stays as it is. Does not synchronise.

        Raises:
            RuntimeError: When called twice for an optimizer between two updates, or after its `step`.
            ValueError: For float16 gradients without `half_gradients`, expanded and float8 gradients.

        """
        if self._enabled:
            self._state.require_placed("unscale_")
            self._steps.unscale(self, optimizer, self._records.to_unscale(optimizer, "unscale_"), self._hooks())

    @not_compiled
    def unscale_and_clip_(
        self,
        optimizer: torch.optim.Optimizer | list[Any] | tuple[Any, ...],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Unscale an optimizer's gradients and clip their total norm, with one read and one multiply.

        In place of `unscale_` and `torch.nn.utils.clip_grad_norm_`. The read that yields the norm proves the gradients
        finite; where they are not, neither is the norm, the gradients stay as they are and the step will be skipped.
        Synchronises with the host once for an ordinary optimizer, for a fused one on a CUDA device only if
        `error_if_nonfinite`. The norm of parameters on device meshes is that of all ranks; norm and decision take one
        collective for each mesh, and every rank of it must call. Disabled, it clips.

        Args:
            optimizer: One, or several to clip by the norm of all their gradients together; then an overflow in one of
                them skips all of them.
            max_norm: The largest norm to leave, in units of the unscaled gradients.
            norm_type: The order of the norm.
            error_if_nonfinite: Raise `RuntimeError` for a norm that is not finite.

        Returns:
            The norm of the unscaled gradients before clipping: shape `()`, float32, or float64 where a gradient is.

        Raises:
            ValueError: For a `max_norm` that is not a number from 0, and for an empty list.

        """
        optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        if not optimizers:
            raise ValueError("an empty list of optimizers has no gradients to clip; pass an optimizer, or several")
        how = clipping(max_norm, norm_type, error_if_nonfinite)
        if not self._enabled:
            return how.apply_torchs(optimizers)
        return self._steps.clip(self, optimizers, how, "unscale_and_clip_", self._hooks())

    @not_compiled
    def clip_and_step(self, optimizer: torch.optim.Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Unscale an optimizer's gradients, clip their total norm and step; return the norm before clipping.

        As `unscale_and_clip_` and `step`, and cheaper for a fused optimizer: its kernel multiplies the gradients while
        it reads them. Call `update` afterwards. Synchronises with the host once for an ordinary optimizer, for a fused
        one on a CUDA device not at all.
        """
        how = clipping(max_norm, norm_type)
        if not self._enabled:
            norm = how.apply_torchs([optimizer])
        else:
            norm = self._steps.clip(self, [optimizer], how, "clip_and_step", self._hooks(), may_defer=True)
        self.step(optimizer)
        return norm

    @not_compiled
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call `optimizer.step(*args, **kwargs)` where the gradients are finite on every rank; else skip it.

        Unscales first if `unscale_` was not called. A fused optimizer is always called, with the flag, and skips by
        itself; an optimizer without gradients has nothing to skip. Synchronises with the host once, for a fused
        optimizer not at all.

        Returns:
            What the optimizer returned; None where the step was skipped.

        Raises:
            RuntimeError: For a closure, and when called twice between two updates.
            CallOrderError: Where nothing tells which loss scale the gradients were made with.

        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or (args and args[0] is not None):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        return self._steps.step(self, optimizer, self._hooks(), args, kwargs)

    @not_compiled
    def skip(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave an optimizer's step out, for reasons of your own, in the place of `step`.

        `update` then ends the step: the gradients are forgotten, and `applied` is False. The loss scale follows what
        was found of them: a check that `unscale_` made counts as ever; without one nothing is counted. Does not
        synchronise. Raises `RuntimeError` after `step`.
        """
        self._steps.skip(optimizer)

    @not_compiled
    def update(self, new_scale: float | Tensor | None = None) -> StepInfo:  # type: ignore[override]  # torch's says None
        """Update the loss scale by what the steps since the last update found, and return what happened.

        Optimizers that are updated one by one after one loss count as one step. After a fused optimizer the fields of
        the result stay on their device until they are read, so this does not synchronise.

        Args:
            new_scale: Set the loss scale to this instead: a positive number, or a float32 tensor of one element.

        Returns:
            A `StepInfo`: `applied` is True where every optimizer's step was applied; `applied_of(optimizer)` tells
            them apart.

        Raises:
            AssertionError: Where no step came first.
            OverflowStreakError: When the policy's `max_overflow_streak` is reached and the host knows.
            SpikeStreakError: When the guard's `max_streak` is reached and the host knows.
            ScaleFloorError: With `on_floor="raise"`, when an overflow leaves the scale at its floor and the host knows.

        """
        info = self._steps.update(new_scale, self._device)
        self._steps.require_no_streak(info)
        return info

    @not_compiled
    def minimize(
        self,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[], Tensor] | Sequence[Callable[[], Tensor]],
        *,
        retries: int = 0,
        max_norm: float | None = None,
    ) -> StepInfo:
        """Take a whole step: scale the loss, differentiate, unscale, clip, step and update; retry an overflow.

        An overflow lowers the loss scale by the policy and runs `loss_fn` again, with the random state of torch and the
        buffers of modules as they were, so that what is applied is what a run at that scale would have applied. Each
        try is one update of the policy. A policy that does not adapt never retries. Where the step is not applied,
        parameters, optimizer and buffers are as before. Synchronises with the host as `step` does, and with `retries`
        once for each try, a fused optimizer's too.

        Args:
            optimizer: Any optimizer; one whose `step` needs a closure, such as LBFGS, is handed the unscaled loss. The
                gradients of its parameters are made anew: those from before the call are dropped.
            loss_fn: Returns the loss, a tensor with one element, without scaling it. Or a list of such functions, one
                for each micro-batch, whose gradients are added up; one that overflows is retried alone.
            retries: How often at most to run a loss again.
            max_norm: The largest norm of the unscaled gradients, as in `unscale_and_clip_`; None does not clip.

        Returns:
            A `StepInfo` of the last try, as from `update`.

        Raises:
            CallOrderError: Where the optimizer was unscaled or stepped since the last update.
            SyncError: For a retry under `no_sync()` without `process_group`.
            OverflowStreakError: When the last try reaches the policy's `max_overflow_streak` and the host knows.
            ScaleFloorError: With `on_floor="raise"`, as from `update`.
            TypeError: For a `loss_fn` that is not a function or a list of them, or does not return a tensor.
            ValueError: For negative `retries`, and for a `max_norm` that is not a number from 0.

        """
        info = Minimization(self, self._steps, optimizer, loss_fn, retries, max_norm).run()
        self._steps.require_no_streak(info)
        return info

    @property
    def last_step(self) -> StepInfo | None:
        """The `StepInfo` that the last `update` returned, for code whose framework called it; None before the first."""
        return self._steps.last

    def place_on(self, device: torch.device | str) -> None:
        """Put the loss scale on a device without scaling a loss; the first `scale` does it otherwise.

        For a process that steps and updates but never scales a loss, such as a stage of a pipeline whose gradients come
        from the last one's loss.
        """
        if self._enabled and self._state.loss_scale is None:
            self._lazy_init_scale_growth_tracker(device)

    def metrics(self) -> dict[str, Any]:
        """Return the state's numbers under stable names; see `lossscale_core.metrics`.

        Plain Python numbers where the host knows them, else tensors of shape `()`. Does not synchronise.
        """
        return {
            name: plain(number)
            for name, number in metrics(self._state.snapshot(), guard=self._records.guards.first()).items()
        }

    def diagnose(self) -> str:
        """Say in a sentence or two how loss scaling is doing; see `lossscale_core.diagnose`. Synchronises."""
        if not self._enabled:
            return "disabled: losses and gradients are left alone."
        state = self._state.read()
        self._steps.voice.was_read(self.policy, state)
        answer = diagnose(self.policy, state, guard=self._records.guards.worst())
        if self._steps.had_no_gradients:
            answer += (
                " The last step had no gradients to check: parameters are frozen or unused, or the loss was detached."
            )
        return answer

    def check_sync(self) -> None:
        """Raise `SyncError` naming the ranks whose state differs from rank 0's; every rank of the group must call.

        Compares over `process_group`, or over all ranks. Call it once after loading: a rank that kept another loss
        scale takes other steps from then on. `SyncError`, too, for a rank that is not in `process_group`. Synchronises
        with the host.
        """
        group = self._records.ranks.process_group
        if group is not None:
            require_member(group)
        state = self._state.read()
        guards = self._records.guards.saved(state) if group is None else {}  # ranks of a group have norms of their own
        require_same_on_ranks({**state_to_dict(state, self.policy), **guards}, group)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._replaced = frozenset(name for name in HOOKS if getattr(cls, name) is not getattr(GradScaler, name))

    def _hooks(self) -> frozenset[str]:
        """Return the methods among `HOOKS` that a subclass, or an assignment to this scaler, has replaced."""
        if HOOKS.isdisjoint(self.__dict__):
            return self._replaced
        return self._replaced | (HOOKS & self.__dict__.keys())

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = False
    ) -> dict[torch.device, Tensor]:
        return Gradients.to_unscale([optimizer], allow_fp16).unscale_(inv_scale, found_inf)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        self._state.require_placed("_check_inf_per_device")
        return check_again(self._records, optimizer)

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs) if self._records.may_step(optimizer_state) else None


def _is_available(device: str) -> bool:
    if device != "cuda" or torch.cuda.is_available() or not torch.cuda.amp.common.amp_definitely_not_available():
        return True
    warnings.warn(
        "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.", UserWarning, stacklevel=3
    )
    return False
