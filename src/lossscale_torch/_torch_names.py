"""torch's getters, setters and semi-private names, which other packages read and write: delegation only."""

import dataclasses
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from lossscale_core import BaseScaling
from lossscale_core.dialects import from_peer
from lossscale_core.errors import PolicyError
from lossscale_torch._decision import OptimizerRecord
from lossscale_torch._state import ScalerState, scale_bounds

_ADVICE = "This may indicate your script did not use scaler.scale(loss or outputs) earlier in the iteration."


class TorchNames(torch.amp.GradScaler):
    """torch's names over a `ScalerState`. It owns no rule: a setter replaces the policy.

    torch's own constructor is not called: its attributes are properties here, and it would disable a scaler for devices
    that only torch's kernels lack.
    """

    _device: str
    _enabled: bool
    _state: ScalerState
    _records: defaultdict[int, Any]
    _are_flags_shared: bool
    _begun_with: tuple[float, int]
    _interval_as_given: Any = None

    @property
    def policy(self) -> Any:
        """The scaling policy, frozen; the setters replace it."""
        return self._state.policy

    def is_enabled(self) -> bool:
        """Return whether the scaler does anything."""
        return self._enabled

    def get_scale(self) -> float:
        """Return the loss scale of the next step as a Python float (1.0 when disabled). Synchronises if on a device."""
        return self._state.read_loss_scale() if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        """Return the policy's growth factor; 1.0 for a policy that never grows."""
        return BaseScaling.of(self.policy).growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Replace the policy by one with this growth factor."""
        self._change_policy(growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """Return the policy's backoff factor; 1.0 for a policy that never backs off."""
        return BaseScaling.of(self.policy).backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Replace the policy by one with this backoff factor."""
        self._change_policy(backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """Return the growth interval as it was given; the largest int32 for a policy that never grows."""
        if self._interval_as_given is not None:
            return self._interval_as_given  # torch keeps a fraction, too
        return BaseScaling.of(self.policy).growth_interval

    def set_growth_interval(self, new_interval: float) -> None:
        """Replace the policy by one with this growth interval; it works below the present count, too.

        0, a negative number, a fraction and one beyond int32 mean what they mean in torch: the scale never grows.
        """
        self._change_policy(growth_interval=reachable_interval(new_interval))
        self._interval_as_given = given_interval(new_interval)

    def _change_policy(self, **settings: Any) -> None:
        if not settings.keys() <= BaseScaling.of(self.policy).settings().keys():
            raise PolicyError(f"{self.policy!r} has no {next(iter(settings))}; make the scaler with another policy")
        self._state.policy = dataclasses.replace(self.policy, **settings)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        scale = self._require_scale(funcname)
        self._state.hand_out()
        return scale, self._state.growth_tracker  # type: ignore[return-value]

    def _require_scale(self, caller: str) -> Tensor:
        """Return the persistent loss scale, or raise torch's error where no loss was scaled yet."""
        scale = self._state.loss_scale
        if scale is None:
            raise AssertionError(f"Attempted {caller} but _scale is None.  {_ADVICE}")
        return scale

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str) -> None:
        self._begun_with = (self._init_scale, self._init_growth_tracker)
        self._state.place(dev)

    @property
    def _scale(self) -> Tensor | None:
        self._state.hand_out()
        return self._state.loss_scale

    @_scale.setter
    def _scale(self, value: Tensor | None) -> None:
        self._state.replace_loss_scale(value)

    @property
    def _growth_tracker(self) -> Any:
        self._state.hand_out()
        return self._state.growth_tracker

    @_growth_tracker.setter
    def _growth_tracker(self, value: Any) -> None:
        if value is not None:
            self._state.set(growth_tracker=int(value))

    def _get_growth_tracker(self) -> int:
        return int(self._state.read().growth_tracker) if self._enabled else 0

    def _get_scale_async(self) -> Tensor | None:
        return self._scale

    @property
    def _init_scale(self) -> float:
        """The loss scale that `scale` begins with; afterwards, the one that it began with."""
        return self._begun_with[0] if self._state.loss_scale is not None else self._state.read_loss_scale()

    @_init_scale.setter
    def _init_scale(self, value: float) -> None:
        if self._state.loss_scale is None:
            self._state.set(loss_scale=within_bounds(value, self.policy))
        else:
            self._begun_with = (value, self._begun_with[1])

    @property
    def _init_growth_tracker(self) -> int:
        """The growth tracker that `scale` begins with; afterwards, the one that it began with."""
        return self._begun_with[1] if self._state.loss_scale is not None else self._get_growth_tracker()

    @_init_growth_tracker.setter
    def _init_growth_tracker(self, value: int) -> None:
        if self._state.loss_scale is None:
            self._state.set(growth_tracker=value)
        else:
            self._begun_with = (self._begun_with[0], value)

    @property
    def _per_optimizer_states(self) -> Any:
        self._are_flags_shared = True  # a flag may be raised through it, and no version would tell
        return self._records

    @_per_optimizer_states.setter
    def _per_optimizer_states(self, value: Any) -> None:
        self._records = value

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> Any:
        self._are_flags_shared = True
        record = self._records.get(id(optimizer))
        return {} if record is None else record["found_inf_per_device"]

    _growth_factor = property(get_growth_factor, set_growth_factor)
    _backoff_factor = property(get_backoff_factor, set_backoff_factor)
    _growth_interval = property(get_growth_interval, set_growth_interval)


def new_records() -> defaultdict[int, Any]:
    """Return the records of no optimizer yet."""
    return defaultdict(OptimizerRecord.fresh)


def within_bounds(scale: float, policy: Any) -> float:
    """Return `scale` brought within the policy's bounds, if it has any."""
    low, high = scale_bounds(policy)
    return min(max(float(scale), low), high)


def reachable_interval(interval: float) -> int:
    """Return a growth interval that a policy takes: what torch's scaler never reaches is the largest int32."""
    return BaseScaling.of(from_peer("torch", {"growth_interval": interval}, warn=False)).growth_interval


def given_interval(interval: float) -> float | None:
    """Return a growth interval that the policy cannot hold as it was given, or None where it can."""
    return None if reachable_interval(interval) == interval else interval
