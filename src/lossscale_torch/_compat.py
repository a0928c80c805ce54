"""The rest of torch's surface: getters, setters, and the semi-private names that other packages read."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from lossscale_core import DynamicScaling, StepInfo
from lossscale_core.errors import PolicyError
from lossscale_torch._state import ScalerState

_ADVICE = "This may indicate your script did not use scaler.scale(loss or outputs) earlier in the iteration."
_NEW_SCALE = (
    "new_scale should be a float or a 1-element torch.cuda.FloatTensor or torch.FloatTensor with requires_grad=False."
)


class TorchSurface(torch.amp.GradScaler):
    """torch's names over a `ScalerState`. It owns no rule: a setter replaces the policy."""

    _device: str
    _enabled: bool
    _state: ScalerState
    _placed_scale: Tensor | None
    _scale_on_host: Any = None
    _placed_version = 0
    _is_captured: bool
    _per_optimizer_states: Any

    @property
    def policy(self) -> Any:
        """The scaling policy, frozen; the setters replace it."""
        return self._state.policy

    def is_enabled(self) -> bool:
        """Return whether the scaler does anything."""
        return self._enabled

    def get_scale(self) -> float:
        """Return the loss scale of the next step as a Python float (1.0 when disabled). Synchronises if on a device."""
        return float(self._state.read().loss_scale) if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        """Return the policy's growth factor; 1.0 for a policy that never grows."""
        return float(getattr(self.policy, "growth_factor", 1.0))

    def set_growth_factor(self, new_factor: float) -> None:
        """Replace the policy by one with this growth factor."""
        self._change_policy(growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """Return the policy's backoff factor; 1.0 for a policy that never backs off."""
        return float(getattr(self.policy, "backoff_factor", 1.0))

    def set_backoff_factor(self, new_factor: float) -> None:
        """Replace the policy by one with this backoff factor."""
        self._change_policy(backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """Return the policy's growth interval; the largest int32 for a policy that never grows."""
        return int(getattr(self.policy, "growth_interval", 2**31 - 1))

    def set_growth_interval(self, new_interval: int) -> None:
        """Replace the policy by one with this growth interval; it works below the present count, too."""
        self._change_policy(growth_interval=min(new_interval, 2**31 - 1))

    def _change_policy(self, **settings: Any) -> None:
        if not isinstance(self.policy, DynamicScaling) and not hasattr(self.policy, next(iter(settings))):
            raise PolicyError(f"{self.policy!r} has no {next(iter(settings))}; make the scaler with another policy")
        self._state.policy = dataclasses.replace(self.policy, **settings)

    def _set_scale(self, new_scale: Any) -> StepInfo:
        if isinstance(new_scale, Tensor):
            if new_scale.device.type != self._device or new_scale.numel() != 1 or new_scale.requires_grad:
                raise AssertionError(_NEW_SCALE)
            new_scale = new_scale.item()
        if isinstance(new_scale, bool) or not isinstance(new_scale, int | float) or not new_scale > 0:
            raise AssertionError(_NEW_SCALE)
        before = self._state.read().loss_scale
        self._state.set(loss_scale=within_bounds(new_scale, self.policy))
        self._place_scale()
        return StepInfo(True, before, self._state.current.loss_scale, self._state.current.overflow_streak)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        if self._placed_scale is None:
            raise AssertionError(f"Attempted {funcname} but _scale is None.  {_ADVICE}")
        return self._placed_scale, self._growth_tracker

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str) -> None:
        self._placed_scale = torch.empty((), device=dev)
        self._place_scale()

    def _place_scale(self) -> None:
        """Bring the tensor that multiplies losses up to date; never in place, since a graph may still need the old."""
        new = self._scale_on_host = self._state.current.loss_scale
        if isinstance(new, Tensor):
            self._placed_scale = new
        elif self._placed_scale is not None:
            self._placed_scale = torch.full((), float(new), device=self._placed_scale.device)
            self._placed_version = self._placed_scale._version

    def _adopt_scale_written_in_place(self) -> None:
        """Take over what somebody wrote into `_scale` itself."""
        if self._state.is_on_host and self._placed_scale._version != self._placed_version:  # type: ignore[union-attr]
            self._set_scale(self._placed_scale.item())  # type: ignore[union-attr]

    @property
    def _scale(self) -> Tensor | None:
        return self._placed_scale

    @_scale.setter
    def _scale(self, value: Tensor | None) -> None:
        self._placed_scale = value
        self._is_captured = False
        if value is not None:
            self._set_scale(value.item())

    @property
    def _growth_tracker(self) -> Any:
        tracker = self._state.current.growth_tracker
        if isinstance(tracker, Tensor) or self._placed_scale is None:
            return tracker if isinstance(tracker, Tensor) else None
        return torch.full((), int(tracker), dtype=torch.int32, device=self._placed_scale.device)

    @_growth_tracker.setter
    def _growth_tracker(self, value: Any) -> None:
        self._state.set(growth_tracker=int(value))

    def _get_growth_tracker(self) -> int:
        return int(self._state.read().growth_tracker) if self._enabled else 0

    def _get_scale_async(self) -> Tensor | None:
        return self._placed_scale

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> Any:
        record = self._per_optimizer_states.get(id(optimizer))
        return {} if record is None else record["found_inf_per_device"]

    _init_scale = property(lambda self: float(self._state.read().loss_scale))
    _init_growth_tracker = property(lambda self: int(self._state.read().growth_tracker))
    _growth_factor = property(get_growth_factor, set_growth_factor)
    _backoff_factor = property(get_backoff_factor, set_backoff_factor)
    _growth_interval = property(get_growth_interval, set_growth_interval)


def within_bounds(scale: float, policy: Any) -> float:
    """Return `scale` brought within the policy's bounds, if it has any."""
    low, high = getattr(policy, "min_scale", 2.0**-126), getattr(policy, "max_scale", 2.0**126)
    return min(max(float(scale), low), high)
