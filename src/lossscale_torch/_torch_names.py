"""torch's own names: getters, setters, state dicts, copies, and names that other packages use."""

import dataclasses
import warnings
from collections import defaultdict
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from lossscale_core import BaseScaling, ScalingPolicy, state_to_dict
from lossscale_core.errors import PolicyError
from lossscale_torch import _checkpoint
from lossscale_torch._checkpoint import given_interval, reachable_interval
from lossscale_torch._guard import Guards
from lossscale_torch._members import Member, Record
from lossscale_torch._ranks import Ranks
from lossscale_torch._state import HostState, number, within_bounds
from lossscale_torch._waiting import Waiting
from lossscale_torch._watch import Watch

_ADVICE = "This may indicate your script did not use scaler.scale(loss or outputs) earlier in the iteration."


class TorchNames(torch.amp.GradScaler):
    """torch's names over the state and the records of a scaler; a setter replaces the policy.

    torch's own constructor is not called: its attributes are properties here, and it would disable a scaler for devices
    that only torch's kernels lack.
    """

    # A subclass of torch's scaler, since trainers such as Lightning declare that class for the scaler that they accept:
    # https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.6/src/lightning/pytorch/plugins/precision/amp.py#L44
    _device: str
    _enabled: bool
    _state: Any
    _members: dict[int, Member]
    _records: Any
    _flags_are_shared: bool
    _waiting: Waiting
    _ranks: Ranks
    _guards: Guards
    _watch: Watch
    _has_begun: bool
    _follows_checkpoint: bool
    _begun_with: tuple[float, int]
    _interval_as_given: Any = None
    _lost_losses: int = 0  # attached ones without a backward pass since the last update

    @property
    def policy(self) -> ScalingPolicy:
        """The scaling policy, frozen; the setters replace it."""
        return self._state.policy

    def is_enabled(self) -> bool:
        """Return whether the scaler does anything."""
        return self._enabled

    def get_scale(self) -> float:
        """Return the loss scale of the next step as a Python float (1.0 when disabled). Synchronises if on a device."""
        if not self._enabled:
            return 1.0
        self._record_gradients()
        scale = float(self._state.read().loss_scale)
        self._watch.after_read(self)
        return scale

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

        With 0, a negative number, a fraction or a number beyond int32 the scale never grows, as in torch.
        """
        self._change_policy(growth_interval=reachable_interval(new_interval))
        self._interval_as_given = given_interval(new_interval, self.policy)

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state as plain values: torch's five keys and those of `state_to_dict`.

        Loads into torch's own scaler and, through `lossscale_core.state_from_dict`, into every other framework. Under a
        policy of your own torch's keys are left out, since its scaler would continue by another rule. Empty when
        disabled. Synchronises with the host.
        """
        if not self._enabled:
            return {}
        self._record_gradients()
        state = self._state.read()
        self._watch.after_read(self)
        torchs = {
            "scale": float(state.loss_scale),
            "growth_factor": self.get_growth_factor(),
            "backoff_factor": self.get_backoff_factor(),
            "growth_interval": self.get_growth_interval(),
            "_growth_tracker": int(state.growth_tracker),
        }
        ours = state_to_dict(state, self.policy)  # without a policy that has no kind of its own, such as a subclass
        is_own = ours.get("policy", {}).get("kind") not in _checkpoint.LIBRARY_KINDS
        return {**({} if is_own else torchs), **ours, **self._guards.saved(state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`: this scaler's, torch's own (its five keys suffice), or another framework's state.

        A scaler without `policy=` takes over the checkpoint's factors and interval, as torch does. A scaler with
        `policy=` keeps its policy, and a `CheckpointWarning` names each difference.

        Raises:
            RuntimeError: torch's, for an empty dict.
            KeyError: For a missing key.
            CheckpointError: For a newer version, and for a value that no state can hold.

        """
        if not self._enabled:
            return
        saved, policy = _checkpoint.plain_state(state_dict), self.policy
        if self._follows_checkpoint:
            policy = _checkpoint.saved_policy(saved, policy)
        state = _checkpoint.saved_state(saved, policy)
        self._guards.restore(saved)
        self._waiting.scale_changes(self._members, self._records, number(self._state.snapshot().loss_scale))
        self._state = self._state.restore(policy, state)
        if self._follows_checkpoint:
            interval = saved.get("growth_interval")
            self._interval_as_given = None if interval is None else given_interval(interval, policy)
        self._begun_with = (float(state.loss_scale), int(state.growth_tracker))
        self._has_begun = True

    def __getstate__(self) -> dict[str, Any]:
        if self._records:
            raise AssertionError(
                "A GradScaler instance may only be pickled at the beginning "
                "of an iteration, or at the end after scaler.update()."
            )
        members: dict[int, Member] = {}
        return {
            **self.__dict__,
            "_state": HostState(self.policy, self._state.read()),
            "_members": members,
            "_records": defaultdict(Record.fresh),
            "_waiting": Waiting(),
            "_ranks": Ranks(),
            "_guards": self._guards.copied(members),
            "_watch": deepcopy(self._watch),
            "_observers": deepcopy(self._observers),  # type: ignore[attr-defined]
            "_lost_losses": 0,  # this scaler warns of them
        }

    def __copy__(self) -> "TorchNames":
        other = type(self).__new__(type(self))
        other.__setstate__(self.__getstate__())
        other._ranks.process_group = self._ranks.process_group  # a group is shared, not copied
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> "TorchNames":
        return self.__copy__()

    def _change_policy(self, **settings: Any) -> None:
        if not settings.keys() <= BaseScaling.of(self.policy).settings().keys():
            raise PolicyError(f"{self.policy!r} has no {next(iter(settings))}; make the scaler with another policy")
        policy = dataclasses.replace(self.policy, **settings)  # type: ignore[type-var]  # it has settings
        self._state = self._state.with_policy(policy)

    def _record_gradients(self, for_good: bool = False) -> None:
        """Record the waiting gradients, before other code receives the loss scale and can compute others with it."""
        self._waiting.record_gradients(self._members, self._records, for_good)

    def _require_placed(self, caller: str) -> Tensor:
        """Return the persistent loss scale, or raise torch's error if no loss was scaled yet."""
        if self._state.tensors is None:
            raise AssertionError(f"Attempted {caller} but _scale is None.  {_ADVICE}")
        scale: Tensor = self._state.tensors.loss_scale
        return scale

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        return self._require_placed(funcname), self._growth_tracker

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str) -> None:
        self._begun_with = (self._init_scale, self._init_growth_tracker)
        self._state.place(dev)

    @property
    def _scale(self) -> Tensor | None:
        self._record_gradients(for_good=True)
        self._state.hand_out()
        return None if self._state.tensors is None else self._state.tensors.loss_scale

    @_scale.setter
    def _scale(self, value: Tensor | None) -> None:
        if value is None and not self._state.is_on_host:
            self._state = HostState(self.policy, self._state.read())
        self._state.replace_loss_scale(value)

    @property
    def _growth_tracker(self) -> Any:
        self._state.hand_out()
        return None if self._state.tensors is None else self._state.tensors.growth_tracker

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
        """The loss scale of the first scaled loss, before and after it was scaled."""
        return self._begun_with[0] if self._state.tensors is not None else float(self._state.read().loss_scale)

    @_init_scale.setter
    def _init_scale(self, value: float) -> None:
        if self._state.tensors is None:
            self._state.set(loss_scale=within_bounds(value, self.policy))
        else:
            self._begun_with = (value, self._begun_with[1])

    @property
    def _init_growth_tracker(self) -> int:
        """The growth tracker at the first scaled loss, before and after it was scaled."""
        return self._begun_with[1] if self._state.tensors is not None else self._get_growth_tracker()

    @_init_growth_tracker.setter
    def _init_growth_tracker(self, value: int) -> None:
        if self._state.tensors is None:
            self._state.set(growth_tracker=value)
        else:
            self._begun_with = (self._begun_with[0], value)

    @property
    def _per_optimizer_states(self) -> Any:
        self._share_flags()
        return self._records

    @_per_optimizer_states.setter
    def _per_optimizer_states(self, value: Any) -> None:
        if isinstance(value, defaultdict):
            value.default_factory = Record.fresh  # so that other code gets the records that the scaler uses
        self._records = value
        self._share_flags()

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> Any:
        self._share_flags()
        record = self._records.get(id(optimizer))
        return {} if record is None else record["found_inf_per_device"]

    def _share_flags(self) -> None:
        """Record that other code may set a flag from now on, without a trace in its version; keep earlier decisions."""
        self._flags_are_shared = True
        for record in self._records.values():
            if type(record) is Record and isinstance(record.applied, Tensor):
                record.applied = record.applied.clone()

    _growth_factor = property(get_growth_factor, set_growth_factor)
    _backoff_factor = property(get_backoff_factor, set_backoff_factor)
    _growth_interval = property(get_growth_interval, set_growth_interval)


def device_type_of(device: Any, enabled: bool) -> tuple[Any, bool]:
    """Return the device type of a scaler and whether it is enabled; without CUDA torch disables one for it."""
    if not isinstance(device, str | torch.device):
        raise TypeError(f"device={device!r} must name a device type, such as 'cuda'; a policy goes to policy=")
    try:
        torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device={device!r} is not a device type of torch; it takes the type of the device that computes the loss; "
            "pass 'cuda', 'cpu', 'mps' or 'xpu'"
        ) from error
    if not enabled or str(device) != "cuda" or torch.cuda.is_available():
        return device, enabled
    if not torch.cuda.amp.common.amp_definitely_not_available():
        return device, True
    warnings.warn(
        "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.", UserWarning, stacklevel=3
    )
    return device, False
