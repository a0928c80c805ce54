"""What a scaler saves and restores, and how the ranks of a job compare it."""

import warnings
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from lossscale_core import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    DynamicScaling,
    ScalingPolicy,
    as_policy,
    state_from_dict,
    state_to_dict,
)
from lossscale_core.errors import CheckpointError, CheckpointWarning, SyncError
from lossscale_torch._compat import TorchSurface, within_bounds
from lossscale_torch._state import ScalerState


class CheckpointedScaler(TorchSurface):
    """torch's checkpoints and pickles, with the core's state beside torch's five keys."""

    _follows_checkpoint: bool
    _has_begun = False
    _process_group: Any

    def check_sync(self) -> None:
        """Raise `SyncError` naming the ranks whose state differs from rank 0's; every rank of the group must call.

        Compares over `process_group`, or over all ranks. Synchronises with the host.
        """
        distributed = torch.distributed
        mine = state_to_dict(self._state.read(), self.policy)
        theirs: list[Any] = [None] * distributed.get_world_size(self._process_group)
        distributed.all_gather_object(theirs, mine, group=self._process_group)
        different = [rank for rank, state in enumerate(theirs) if state != theirs[0]]
        if different:
            scales = ", ".join(f"rank {rank}: {theirs[rank]['loss_scale']:g}" for rank in [0, *different])
            raise SyncError(
                f"the scalers of ranks {different} differ from rank 0's (loss scales: {scales}); "
                "pass process_group= so that ranks decide together, and load the same checkpoint everywhere"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state as plain values: torch's five keys, and beside them those of `state_to_dict`.

        Loads into torch's own scaler and, through `lossscale_core.state_from_dict`, into every other framework. Empty
        when disabled. Synchronises with the host.
        """
        if not self._enabled:
            return {}
        state = self._state.read()
        return {
            "scale": float(state.loss_scale),
            "growth_factor": self.get_growth_factor(),
            "backoff_factor": self.get_backoff_factor(),
            "growth_interval": self.get_growth_interval(),
            "_growth_tracker": int(state.growth_tracker),
            **state_to_dict(state, self.policy),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`: this scaler's, torch's own (its five keys suffice), or another framework's state.

        A scaler made without `policy` takes over the checkpoint's factors and interval, as torch does; one made with a
        policy keeps it, and a `CheckpointWarning` names each difference. Raises torch's `RuntimeError` for an empty
        dict, `KeyError` for a missing key and `CheckpointError` for a newer version or a value no state can hold.
        """
        if not self._enabled:
            return
        if not isinstance(state_dict, Mapping):
            raise CheckpointError(f"{state_dict!r} is no saved state; pass a dict that state_dict() made")
        if len(state_dict) == 0:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
            )
        policy = _checkpoint_policy(state_dict, self.policy) if self._follows_checkpoint else self.policy
        if "version" in state_dict:
            state = state_from_dict(state_dict, policy)
        else:
            state = policy.init_state()
            scale = within_bounds(state_dict["scale"], policy)
            fields = {"loss_scale": scale, "growth_tracker": state_dict["_growth_tracker"]}
            state = state_from_dict({**state_to_dict(state), **fields}, policy)
        self._state = ScalerState(policy, state)
        self._has_begun = True
        self._place_scale()
        self._is_captured = False

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn where an optimizer goes on and its scaler does not; called before the first step of a fresh scaler."""
        self._has_begun = True
        if self._state.is_on_host and self._state.current.steps == 0 and _has_stepped(optimizer):
            warnings.warn(
                "the optimizer has taken steps before, but its scaler begins anew with a loss scale of "
                f"{self._state.current.loss_scale:g}; to go on from a checkpoint, save scaler.state_dict() in it and "
                "pass it to scaler.load_state_dict()",
                CheckpointWarning,
                stacklevel=4,
            )

    def __getstate__(self) -> dict[str, Any]:
        if self._per_optimizer_states:
            raise AssertionError(
                "A GradScaler instance may only be pickled at the beginning "
                "of an iteration, or at the end after scaler.update()."
            )
        self._state.read()
        fresh = dict.fromkeys(("_placed_scale", "_used_scale", "_inverse", "_clean_flag", "_last_step"))
        fresh.update(_is_captured=False, _process_group=None, _updated_optimizers=set(), _unscaled={}, _joint=[])
        return {**self.__dict__, **fresh}

    def __deepcopy__(self, memo: dict[int, Any]) -> "CheckpointedScaler":
        copy = type(self).__new__(type(self))
        copy.__setstate__({**self.__getstate__(), "_state": ScalerState(self.policy, self._state.current)})
        copy._per_optimizer_states = defaultdict(copy._per_optimizer_states.default_factory)
        copy._process_group = self._process_group  # a group is shared, not copied
        return copy


def _has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer remembers a step; a count that lives on a device is not waited for."""
    for memory in optimizer.state.values():
        count = memory.get("step")
        is_on_host = not isinstance(count, torch.Tensor) or count.is_cpu
        if count is None or not is_on_host or count > 0:
            return True
    return False


def torch_policy(
    init_scale: float, growth_factor: float, backoff_factor: float, growth_interval: int, enabled: bool
) -> ScalingPolicy:
    """Return torch's dynamic rule; what torch asserts is asserted in its words, and every positive scale is taken."""
    if enabled and growth_factor <= 1.0:
        raise AssertionError("The growth factor must be > 1.0.")
    if enabled and backoff_factor >= 1.0:
        raise AssertionError("The backoff factor must be < 1.0.")
    if not enabled:
        return DynamicScaling()
    return DynamicScaling(
        init_scale=min(max(init_scale, SMALLEST_SCALE), LARGEST_SCALE) if init_scale > 0 else init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=min(growth_interval, 2**31 - 1),  # torch's "never" may be any number
        min_scale=SMALLEST_SCALE,
        max_scale=LARGEST_SCALE,
    )


def _checkpoint_policy(state_dict: dict[str, Any], policy: ScalingPolicy) -> ScalingPolicy:
    """Return the policy a checkpoint was saved with: ours where it names one, else torch's under its three settings."""
    if "policy" in state_dict:
        return as_policy(state_dict["policy"])
    if "version" in state_dict:
        return policy
    growth = max(state_dict["growth_factor"], 1.0 + 2.0**-23)  # torch's setters take a factor of 1
    backoff = min(state_dict["backoff_factor"], 1.0 - 2.0**-24)
    return torch_policy(2.0**16, growth, backoff, state_dict["growth_interval"], enabled=True)
