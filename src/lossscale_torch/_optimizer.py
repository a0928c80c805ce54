"""`GradScaler`: torch's own interface around a policy, applying or skipping each optimizer's step as a whole."""

import functools
import inspect
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lossscale_core import (
    LARGEST_SCALE,
    StepInfo,
    as_policy,
    check_overflow_streak,
    diagnose,
    metrics,
    step_info,
    tree,
)
from lossscale_core.errors import CallOrderError, PolicyError
from lossscale_torch import _clip, _grads
from lossscale_torch._checkpoint import CheckpointedScaler, torch_policy
from lossscale_torch._records import READY, STEPPED, UNSCALED, OptimizerRecord, all_finite, known_on_host, new_record
from lossscale_torch._state import ScalerState

_TORCH_DEFAULTS = (2.0**16, 2.0, 0.5, 2000)
_LEGACY = (
    "GradScaler is going to stop passing itself as a keyword argument to the passed optimizer. In the near future "
    "GradScaler registers `grad_scale: Tensor` and `found_inf: Tensor` to the passed optimizer and let the optimizer "
    "use them directly."
)


class GradScaler(CheckpointedScaler):
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

    Without `policy` it is torch's dynamic rule under torch's arguments, with the scale kept between 2**-126 and
    2**126. `policy` is anything `lossscale_core.as_policy` takes. `process_group` combines the decision over its ranks
    before anyone acts on it; parameters sharded over a device mesh do so by themselves. With `joint_skip` an overflow
    in one optimizer skips all of them; call `unscale_` on each before the first `step`. With `half_gradients` float16
    gradients are unscaled in place, which may flush small ones to zero; otherwise they are refused.

    An ordinary optimizer costs one host synchronisation a step, in `step`; a fused one costs none.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        policy: Any = None,
        process_group: Any = None,
        joint_skip: bool = False,
        half_gradients: bool = False,
    ) -> None:
        self._device = device
        self._enabled = enabled and _is_available(device)
        self._follows_checkpoint = policy is None
        if not isinstance(device, str | torch.device):
            raise TypeError(f"device={device!r} must name a device type, such as 'cuda'; a policy goes to policy=")
        if policy is not None and (init_scale, growth_factor, backoff_factor, growth_interval) != _TORCH_DEFAULTS:
            raise PolicyError(
                "policy= says it all; leave out init_scale, growth_factor, backoff_factor, growth_interval"
            )
        if policy is None:
            policy = torch_policy(init_scale, growth_factor, backoff_factor, growth_interval, self._enabled)
        self._state = ScalerState(as_policy(policy))
        self._process_group = process_group
        self._joint_skip = joint_skip
        self._half_gradients = half_gradients
        self._placed_scale: Tensor | None = None
        self._used_scale: Tensor | None = None
        self._used_scale_on_host: Any = None
        self._inverse: Tensor | None = None
        self._clean_flag: Tensor | None = None
        self._may_be_below_one = False
        self._is_captured = False
        self._updated_optimizers: set[int] = set()
        self._unscaled: dict[int, OptimizerRecord] = {}
        self._joint: list[OptimizerRecord] = []
        self._had_no_gradients = False
        self._last_step: StepInfo | None = None
        self._per_optimizer_states: dict[int, Any] = defaultdict(new_record)

    @torch.compiler.disable
    def scale(self, outputs: Any) -> Any:
        """Return `outputs` times the loss scale: a tensor, or a nested structure or iterable of them.

        Half losses of any shape are lifted to float32. The scale is captured: it unscales every gradient until `scale`
        is called again, also when `update` is called in between. Does not synchronise.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            if not self._is_captured:
                self._capture_scale(outputs.device)
            return _grads.scaled(outputs, self._used_scale)
        if isinstance(outputs, dict | list | tuple):
            return tree.map_leaves(self.scale, outputs)
        if isinstance(outputs, Iterable) and not isinstance(outputs, str | bytes):
            return map(self.scale, outputs)
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")

    @torch.compiler.disable
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the loss scale, in place, and note whether they are finite.

        At most once an optimizer between two updates, else `RuntimeError`. Does not synchronise.
        """
        if self._enabled:
            self._unscale(optimizer, self._record_to_unscale(optimizer, "unscale_"))

    @torch.compiler.disable
    def unscale_and_clip_(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Unscale an optimizer's gradients and clip their total norm, with one read and one multiply; return the norm.

        In place of `unscale_` and `torch.nn.utils.clip_grad_norm_`. The norm, of shape `()`, is that of the unscaled
        gradients before clipping. The read that yields it proves them finite; where they are not, neither is the norm,
        the gradients stay as they are and the step will be skipped (with `error_if_nonfinite`: `RuntimeError`). A fused
        optimizer takes over the multiply. Disabled, it clips. Synchronises with the host once for an ordinary
        optimizer, for a fused one only if `error_if_nonfinite`.
        """
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if not self._enabled:
            return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
        record = self._record_to_unscale(optimizer, "unscale_and_clip_")
        norm_type = float(norm_type)
        on_host = not _is_fused(optimizer) or self._device_of_scale.type == "cpu"
        if self._needs_torchs_clipping(optimizer, norm_type, on_host):
            self._unscale(optimizer, record)
            return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
        buckets = self._buckets(optimizer, self._half_gradients)
        clip = self._clip_on_host if on_host else self._clip_on_device
        norm = clip(optimizer, record, buckets, max_norm, norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
                "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
                "`error_if_nonfinite=False`"
            )
        return norm

    @torch.compiler.disable
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call `optimizer.step(*args, **kwargs)` where the gradients are finite on every rank; else skip it.

        Unscales first where nobody has. Returns what the optimizer returned, or None. A fused optimizer is always
        called, with the flag, and skips by itself; an optimizer without gradients has nothing to skip. Synchronises
        with the host once, for a fused optimizer not at all. Raises `RuntimeError` for a closure, or when called twice
        between two updates.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or (args and args[0] is not None):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        record = self._record_of(optimizer, "step")
        if record["stage"] is STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if not self._has_begun:
            self._begin(optimizer)
        if _is_fused(optimizer):
            result = self._step_fused(optimizer, record, *args, **kwargs)
        else:
            if record["stage"] is READY:
                self._unscale(optimizer, record)
            finite = all(map(known_on_host, self._deciding(record))) if self._joint_skip else known_on_host(record)
            result = optimizer.step(*args, **kwargs) if finite else None
            if finite and len(self._per_optimizer_states) == 1:
                self._clean_flag = next(iter(record["found_inf_per_device"].values()), None)  # known to be 0.0 still
        record["stage"] = STEPPED
        return result

    @torch.compiler.disable
    def update(self, new_scale: float | Tensor | None = None) -> StepInfo:
        """Update the loss scale by what the steps since the last update found, and return what happened.

        `applied` is True where every optimizer's gradients were finite, fused or not; it and the other fields stay on
        their device until they are read, so this does not synchronise. Optimizers that are updated one by one after one
        loss count as one step. `new_scale` sets the scale instead. Raises `AssertionError` where no step came first,
        and `OverflowStreakError` when the policy's `max_overflow_streak` is reached and the host knows.
        """
        self._last_step = self._update(new_scale) if self._enabled else StepInfo(True, 1.0, 1.0, 0)
        return self._last_step

    @property
    def last_step(self) -> StepInfo | None:
        """What the last `update` returned, for code whose framework called it; None before the first."""
        return self._last_step

    def metrics(self) -> dict[str, Any]:
        """Return the state's numbers under stable names; see `lossscale_core.metrics`. Does not synchronise."""
        return metrics(self._state.current)

    def diagnose(self) -> str:
        """Say in a sentence or two how loss scaling is doing; see `lossscale_core.diagnose`. Synchronises."""
        if not self._enabled:
            return "disabled: losses and gradients are left alone."
        answer = diagnose(self.policy, self._state.read())
        if self._had_no_gradients:
            answer += (
                " The last step had no gradients to check: parameters are frozen or unused, or the loss was detached."
            )
        return answer

    def _capture_scale(self, device: torch.device) -> None:
        """Begin a step: what is scaled from now on is unscaled by this scale, whatever `update` does meanwhile."""
        if self._placed_scale is None:
            self._lazy_init_scale_growth_tracker(device)
        self._adopt_scale_written_in_place()
        if self._used_scale is not self._placed_scale:
            self._used_scale, self._inverse = self._placed_scale, None
            self._used_scale_on_host = self._scale_on_host
        self._may_be_below_one = self._state.may_be_below_one()
        self._state.begin_step()
        self._updated_optimizers.clear()
        self._unscaled.clear()
        self._is_captured = True

    def _update(self, new_scale: float | Tensor | None) -> StepInfo:
        self._require_scale("update")
        records, self._per_optimizer_states = self._per_optimizer_states, defaultdict(new_record)
        self._is_captured, self._joint = False, []
        if new_scale is not None:
            self._used_scale = None
            return self._set_scale(new_scale)
        stepped = {key for key, record in records.items() if record["stage"] is STEPPED}
        if len(stepped) != len(records):  # who is unscaled already may step after this update, too
            self._unscaled = {key: record for key, record in records.items() if key not in stepped}
        checked = [record for record in records.values() if record["found_inf_per_device"]]
        self._had_no_gradients = not checked
        if not checked:
            if all(record["stage"] is READY for record in records.values()):
                raise AssertionError("No inf checks were recorded prior to update.")
            return step_info(self._state.current, self._state.current)
        if not self._updated_optimizers.isdisjoint(stepped):
            self._state.begin_step()
        self._updated_optimizers.update(stepped)
        info = self._state.update(all_finite(checked, self._placed_scale))
        if not self._state.is_on_host:
            self._place_scale()
            return info
        if info.loss_scale_after != self._scale_on_host:
            self._place_scale()
        check_overflow_streak(self.policy, self._state.current)
        return info

    @property
    def _device_of_scale(self) -> torch.device:
        return self._require_scale("step").device

    def _require_scale(self, caller: str) -> Tensor:
        if self._placed_scale is None:
            self._check_scale_growth_tracker(caller)  # raises in torch's words
        return self._placed_scale  # type: ignore[return-value]

    def _record_of(self, optimizer: torch.optim.Optimizer, caller: str) -> OptimizerRecord:
        """Return an optimizer's record; if it was updated since the last loss, its gradients are a new step's."""
        if self._used_scale is None or id(optimizer) in self._updated_optimizers:
            self._capture_scale(self._require_scale(caller).device)
        if id(optimizer) in self._unscaled:
            self._per_optimizer_states[id(optimizer)] = self._unscaled.pop(id(optimizer))
        return self._per_optimizer_states[id(optimizer)]

    def _record_to_unscale(self, optimizer: torch.optim.Optimizer, caller: str) -> OptimizerRecord:
        record = self._record_of(optimizer, caller)
        if record["stage"] is UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if record["stage"] is STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        return record

    def _inverse_scale(self) -> Tensor:
        if self._inverse is None:
            self._inverse = self._used_scale.reciprocal()  # type: ignore[union-attr]
        return self._inverse

    def _buckets(self, optimizer: torch.optim.Optimizer, allow_half: bool) -> list[list[Tensor]]:
        buckets = _grads.buckets_of(optimizer)
        if not allow_half and torch.float16 in [bucket[0].dtype for bucket in buckets]:
            raise ValueError(_grads.half_gradients_message(optimizer))
        return buckets

    def _needs_torchs_clipping(self, optimizer: torch.optim.Optimizer, norm_type: float, on_host: bool) -> bool:
        """Return whether gradients are sharded or complex, or one read for the norm would not prove them finite."""
        if _grads.mesh_groups(optimizer) or not norm_type > 0.0:
            return True
        grads = _grads.grads_of(optimizer)
        if norm_type != 2.0 and any(grad.is_complex() for grad in grads):
            return True
        return not on_host and (self._may_be_below_one or not _clip.is_exact_on_device(grads, norm_type))

    def _clip_on_host(
        self, optimizer: Any, record: OptimizerRecord, buckets: list[list[Tensor]], max_norm: float, norm_type: float
    ) -> Tensor:
        scale = float(self._used_scale_on_host)
        norm = _clip.unscaled_norm(buckets, scale, norm_type)
        self._note_found(optimizer, record, {}, not math.isfinite(norm))
        if math.isfinite(norm):
            clip = min(1.0, max_norm / (norm + 1e-6))
            if _is_fused(optimizer) and clip * LARGEST_SCALE > scale:
                record.grad_scale = torch.full((), scale / clip, device=self._device_of_scale)
            else:
                _clip.multiply_(buckets, clip / scale)
        return torch.tensor(norm, dtype=torch.float32, device=self._device_of_scale)

    def _clip_on_device(
        self, optimizer: Any, record: OptimizerRecord, buckets: list[list[Tensor]], max_norm: float, norm_type: float
    ) -> Tensor:
        scale: Any = self._used_scale
        norm = _clip.norm_on_device(buckets, norm_type, scale.device) / scale
        finite = torch.isfinite(norm)
        self._note_found(optimizer, record, {scale.device: (~finite).float()})
        clip = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        record.grad_scale = torch.where(finite, scale / clip, 1.0).float()  # infinite where clipped to nothing
        return norm.float()

    def _unscale(self, optimizer: torch.optim.Optimizer, record: OptimizerRecord) -> None:
        inverse = self._inverse_scale()
        found, self._clean_flag = self._clean_flag, None
        if found is None or found.get_device() != inverse.get_device():
            found = torch.zeros((), dtype=torch.float32, device=inverse.device)
        per_device = self._unscale_grads_(optimizer, inverse, found, self._half_gradients)
        self._note_found(optimizer, record, per_device)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = {}
        check_again = inv_scale is self._inverse and self._may_be_below_one
        for bucket in self._buckets(optimizer, allow_fp16):
            device = bucket[0].device
            flag = found.get(device)
            if flag is None:
                flag = found[device] = found_inf if device == found_inf.device else found_inf.to(device, copy=True)
            factor = inv_scale if flag is found_inf else _grads.moved(inv_scale, device)
            _grads.check_and_multiply_(bucket, flag, factor)
            if check_again:  # below a scale of 1 a finite gradient may overflow by being unscaled
                _grads.check_and_multiply_(bucket, flag, torch.ones_like(flag))
        return found

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        """Note whether the gradients are finite and will be when a fused optimizer unscales them; leave them alone."""
        scale = self._require_scale("_check_inf_per_device")
        if self._used_scale is None:
            self._capture_scale(scale.device)
        record = self._per_optimizer_states[id(optimizer)]
        inverse = self._inverse_scale() if self._may_be_below_one else None
        found: dict[torch.device, Tensor] = {}
        for bucket in self._buckets(optimizer, allow_half=True):
            device = bucket[0].device
            flag = _grads.found_inf_in(bucket, None if inverse is None else _grads.moved(inverse, device))
            found[device] = torch.maximum(found[device], flag) if device in found else flag
        stage = record["stage"]
        self._note_found(optimizer, record, found)
        record["stage"] = stage
        return record["found_inf_per_device"]

    def _note_found(
        self,
        optimizer: torch.optim.Optimizer,
        record: OptimizerRecord,
        found: dict[Any, Tensor],
        known: bool | None = None,
    ) -> None:
        """Record the flags of an optimizer, combined over the ranks that must decide alike."""
        groups = _grads.mesh_groups(optimizer)
        if self._process_group is not None:
            groups = (*groups, self._process_group)
        if known is not None:
            found = {self._device_of_scale: torch.full((), float(known), device=self._device_of_scale)}
            record.finite = None if groups else not known
        if groups:
            device = self._device_of_scale
            flags = [_grads.moved(flag, device) for flag in found.values()] or [
                torch.zeros((), dtype=torch.float32, device=device)
            ]
            combined = torch.stack(flags).amax()
            _grads.reduce_max(combined, groups)
            found = {device: combined}
        record["found_inf_per_device"] = found
        record["stage"] = UNSCALED

    def _deciding(self, record: OptimizerRecord) -> list[OptimizerRecord]:
        """Return the records whose flags decide on this optimizer's step: its own, or with `joint_skip` all."""
        if not self._joint_skip:
            return [record]
        records = list(self._per_optimizer_states.values())
        late = any(each["stage"] is STEPPED and each is not record for each in records)
        if late and not any(each is record for each in self._joint):
            raise CallOrderError(
                "with joint_skip another optimizer has stepped before this one was unscaled; "
                "call unscale_() on every optimizer before the first step()"
            )
        self._joint = records
        return records

    def _step_fused(self, optimizer: Any, record: OptimizerRecord, *args: Any, **kwargs: Any) -> Any:
        if _takes_scaler(type(optimizer).step):
            warnings.warn(_LEGACY, FutureWarning, stacklevel=4)
            return optimizer.step(*args, **kwargs, grad_scaler=self)
        if record["stage"] is READY:
            self._check_inf_per_device(optimizer)
            record.grad_scale = self._used_scale
        device = self._device_of_scale
        flags = [flag for each in self._deciding(record) for flag in each["found_inf_per_device"].values()]
        flags = [_grads.moved(flag, device) for flag in flags] or [torch.zeros((), dtype=torch.float32, device=device)]
        preset = getattr(optimizer, "grad_scale", None)
        factors = [factor for factor in (record.grad_scale, preset) if factor is not None]
        optimizer.grad_scale = math.prod(factors[1:], start=factors[0]) if factors else None
        optimizer.found_inf = (torch.stack(flags) != 0.0).any().float()  # kernels take 1.0 alone for an overflow
        known_states = len(optimizer.state)
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            if len(optimizer.state) > known_states:
                _grads.zero_unwritten_momentum(list(optimizer.state.values())[known_states:], optimizer.found_inf)
            del optimizer.grad_scale, optimizer.found_inf


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer takes the flag and the factor itself, on its device."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


@functools.cache
def _takes_scaler(step: Callable[..., Any]) -> bool:
    return "grad_scaler" in inspect.signature(step).parameters


def _is_available(device: str) -> bool:
    if device != "cuda" or torch.cuda.is_available() or not torch.cuda.amp.common.amp_definitely_not_available():
        return True
    warnings.warn(
        "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.", UserWarning, stacklevel=3
    )
    return False
