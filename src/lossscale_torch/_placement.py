"""Where a scaler's state is: torch's own two tensors, and the rest of the policy's state on the host or on a device."""

import dataclasses
import operator
from collections.abc import Collection, Iterable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from lossscale_core import BaseScaling, ScalingPolicy
from lossscale_core.errors import PolicyError
from lossscale_torch import _state
from lossscale_torch._checkpoint import as_setting
from lossscale_torch._gradients import moved
from lossscale_torch._state import Found, OnDevice
from lossscale_torch._step_info import StepInfo


def _setting(name: str) -> Any:
    """Return torch's attribute of a setting: that of the policy, which is replaced by assignment."""

    def get(self: Any) -> Any:
        return getattr(BaseScaling.of(self.policy), name)

    def change(self: Any, value: Any) -> None:
        if "policy" in vars(self):  # torch's constructor sets what the policy says
            self._change_policy(name, value)

    return property(get, change)


class PlacedScaler(torch.amp.GradScaler):
    """torch's scaler with the state of any policy, which moves to a device if a fused optimizer has stepped there."""

    policy: ScalingPolicy
    """The scaling policy, frozen; torch's setters replace it."""
    _scale_tensor: Any = None
    _growth_tracker: Any = None
    _state: Any = None
    """The policy's state: host scalars, or `OnDevice`."""
    _known_scale: tuple[int, float] | None = None
    """The number of the scale's tensor that the host knows, and the tensor's version at that time."""
    _kept_one: Tensor | None = None
    _is_fused = False
    """Whether a kernel has decided about a step, or a replay may."""

    def _replace_scale(self, value: Any) -> None:
        self._scale_tensor = None if value is None else value.detach().float().reshape(())
        self._known_scale = self._kept_one = None

    @property
    def _one(self) -> Tensor:
        """1.0 beside the scale, which is only read and so made once, unless code is recorded."""
        one = torch.ones_like(self._scale) if self._kept_one is None else self._kept_one
        if not _state.is_being_recorded():
            self._kept_one = one
        return one

    # The loss scale in torch's own tensor: float32, shape `()`, or None before the first loss.
    _scale = property(operator.attrgetter("_scale_tensor"), _replace_scale)

    _growth_factor = _setting("growth_factor")
    _backoff_factor = _setting("backoff_factor")
    _growth_interval = _setting("growth_interval")

    def _change_policy(self, name: str, value: Any) -> None:
        if name not in BaseScaling.of(self.policy).settings():
            raise PolicyError(f"{self.policy!r} has no {name}; make the scaler with another policy")
        self.policy = dataclasses.replace(self.policy, **{name: as_setting(name, value)})  # type: ignore[type-var]  # it has settings
        self._keep_tracker_reachable()

    def _keep_tracker_reachable(self) -> None:
        """Keep the growth tracker on a device below the interval: torch's kernel compares the two with ==."""
        if isinstance(self._state, OnDevice):
            self._growth_tracker.clamp_(max=BaseScaling.of(self.policy).growth_interval - 1)

    def _scale_on_host(self) -> float | None:
        """Return the loss scale if the host knows it without a wait, else None."""
        scale = self._scale_tensor
        if scale is None:
            return self._init_scale
        if scale.is_cpu:
            return cast(float, scale.item())
        known = self._known_scale
        return known[1] if known is not None and known[0] == scale._version else None

    def _state_on_host(self) -> Any:
        """Return the policy's state as host scalars. Waits for a device whose numbers the host does not know."""
        state, tracker = self._state, self._growth_tracker  # another thread may replace them
        if isinstance(state, OnDevice):
            return _state.to_host(state.tensors(self._scale, tracker), self.policy)
        scale = self._scale_on_host()
        first = self._scale.item() if scale is None else scale
        count = self._init_growth_tracker if tracker is None else tracker.item()
        return state._make((np.float32(first), np.int32(count), *state[2:]))

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str) -> None:
        """Make the scale on a device, and the tracker on the host; later calls, as Accelerate's, do nothing."""
        if self._scale is None:
            with torch.inference_mode(False):  # they outlive a validation loop that may be running
                super()._lazy_init_scale_growth_tracker(dev)  # type: ignore[arg-type]  # torch.full takes a string
                self._known_scale = self._scale_tensor._version, self._init_scale
                self._growth_tracker = torch.tensor(self._init_growth_tracker, dtype=torch.int32)

    def _continue_at(self, state: Any) -> None:
        """Continue with a state of host scalars, in the tensors that exist."""
        self._init_scale, self._init_growth_tracker = state[0].item(), state[1].item()
        is_on_device = isinstance(self._state, OnDevice)
        self._state = self._state.assigned(state, self.policy) if is_on_device else state
        if self._scale is not None:
            _state.assign(self._scale, self._init_scale)
            _state.assign(self._growth_tracker, self._init_growth_tracker)
            self._known_scale = self._scale._version, self._init_scale
        self._keep_tracker_reachable()

    # A step.

    def _read(self, records: Iterable[dict[str, Any]], *numbers: Tensor) -> list[float]:
        """Wait once for the flags of records, the scale and other numbers, and return these numbers.

        The flags in the records are then tensors on the CPU. A state that only an unfinished step has put on the device
        comes back to the host.
        """
        flags = [(record["found_inf_per_device"], key) for record in records for key in record["found_inf_per_device"]]
        scale = self._scale
        values = _state.read([*numbers, scale, *(found[key] for found, key in flags)], scale.device)
        for (found, key), value in zip(flags, values[len(numbers) + 1 :], strict=True):
            found[key] = torch.tensor(value, dtype=torch.float32)
        self._known_scale = scale._version, values[len(numbers)]
        if isinstance(self._state, OnDevice) and not self._is_fused:
            self._state = self._state_on_host()
        return values[: len(numbers)]

    def _found(self, records: Collection[dict[str, Any]], may_read: bool = False) -> Found | None:
        """Return what the flags of records say, or None if the host does not know one and may not read it."""
        found = _state.found_on_host(records)
        if found is None and may_read:
            self._read(records)  # Ctrl-C may come while this waits
            found = _state.found_on_host(records)
        return found

    def _advance(self, records: Collection[dict[str, Any]], found: Found | None, is_counted: bool) -> StepInfo:
        """Let the policy move the state by the flags of a step, and return the outcome.

        On the host if it knows what was `found` and the scale, and then write to torch's tensors what has changed; else
        on the device.
        """
        if found is not None and isinstance(self._state, OnDevice) and not self._is_fused and self._scale.is_cpu:
            self._state = self._state_on_host()
        scale = None if found is None or isinstance(self._state, OnDevice) else self._scale_on_host()
        if found is None or scale is None:
            return self._advance_on_device(records, is_counted)
        before, tracker = self._state, self._growth_tracker
        if tracker is not None:
            if not tracker.is_cpu:
                self._growth_tracker = tracker = tracker.cpu()  # from here on the host counts
            count = tracker.item()
            if before[0] != scale or before[1] != count:  # other code has written to torch's tensors
                before = before._make((np.float32(scale), np.int32(count), *before[2:]))
        _, overflowed, vetoed, spiked = found
        is_applied = not (overflowed or vetoed)
        if not is_counted or (vetoed and not overflowed):
            self._state = before
            return StepInfo(is_applied, scale, scale, before.overflow_streak.item(), overflowed, spiked)
        self._state = after = self.policy.update(before, not overflowed)
        after_scale = after[0].item()
        if after[1] is not before[1]:
            tracker.fill_(after[1].item())
        if after_scale != scale:  # autograd then refuses a late backward pass
            self._scale.fill_(after_scale)
            self._known_scale = self._scale._version, after_scale
        return StepInfo(is_applied, scale, after_scale, after.overflow_streak.item(), overflowed)

    def _advance_on_device(self, records: Collection[dict[str, Any]], is_counted: bool) -> StepInfo:
        if not isinstance(self._state, OnDevice):
            self._state = OnDevice(self._state, self.policy, self._scale.device)
            self._growth_tracker = moved(self._growth_tracker, self._scale.device)
            self._keep_tracker_reachable()
        if self._is_fused and _state.is_being_recorded():
            self._state.is_recorded = True
        tensors = self._state.tensors(self._scale, self._growth_tracker)
        return _state.advance_on_device(self.policy, self._state, tensors, records, is_counted)

    def _set_scale(self, new_scale: float | Tensor) -> Any:
        """Set the scale within the policy's bounds, and return it where it is."""
        scale, members = self._scale, BaseScaling.of(self.policy)
        if isinstance(new_scale, Tensor):
            new = new_scale.detach().reshape(()).float()
            scale.copy_(torch.where(new > 0.0, new.clamp(members.min_scale, members.max_scale), scale))
        else:
            scale.fill_(new_scale)
            self._known_scale = scale._version, new_scale
        known = None if isinstance(self._state, OnDevice) else self._scale_on_host()
        return scale.clone() if known is None else known
