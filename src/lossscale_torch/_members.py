"""The optimizers of a scaler: a `Member` for each until it is deleted, and a `Record` for each of its steps."""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from lossscale_torch._gradients import grads_of, moved
from lossscale_torch._state import LossScale, is_being_recorded, is_readable

READY, UNSCALED, STEPPED = OptState  # access to an enum's members by name is slow

SPIKE = "spike"
"""The key under which `found_inf_per_device` holds whether a guard refuses the norm.

Code that sums all flags then skips the step, too.
"""

_FUSED = "_step_supports_amp_scaling"
_LEGACY = (
    "GradScaler is going to stop passing itself as a keyword argument to the passed optimizer. In the near future "
    "GradScaler registers `grad_scale: Tensor` and `found_inf: Tensor` to the passed optimizer and let the optimizer "
    "use them directly."
)


class Record(dict[str, Any]):
    """One step of one optimizer: torch's two keys, which other packages read and write, and the decision.

    `stage` is one of torch's three stages. `found_inf_per_device` holds flags, float32 of shape `()`: any value but 0.0
    is an overflow on that device; under `SPIKE`, a spike.
    """

    scale: LossScale | None = None
    """The scale of its gradients; determined again while the stage is ready."""
    waited: bool = False
    """Whether its gradients belong to losses that were counted by an earlier update."""
    is_kept: bool = False
    """Whether it was unscaled before an earlier update, so that it may be unscaled again, by 1."""
    is_left_scaled: bool = False
    """Whether a clip is known on the host to have changed nothing, since the norm is not finite."""
    had_none: bool = False
    """Whether there were no gradients to check on this rank."""
    has_checked_norm: bool = False
    """Whether a guard has checked the norm of its gradients."""
    finite: bool | None = None
    """Whether it may step; None until this is known on the host."""
    spiked: bool = False
    """Whether it is known on the host that only a spike forbids the step."""
    applied: bool | Tensor | None = None
    """Whether the step was applied, or a tensor that holds 0.0 if it was; None before the decision."""
    recorded_gradients: "RecordedGradients | None" = None
    """The unscaled gradients when a further loss was scaled, or the loss scale was read."""

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Record":
        """Return `record`, or, if torch's own factory made it, a `Record` with its keys."""
        return record if type(record) is cls else cls(record)

    @classmethod
    def fresh(cls) -> "Record":
        """Return the record of an optimizer that was not touched since the last update."""
        return cls(stage=READY, found_inf_per_device={})

    def take(self, found: dict[Any, Tensor], finite: bool | None = None) -> None:
        """Set the stage to unscaled with these flags; an empty `found` means that there were no gradients."""
        if self["stage"] is not READY or self.has_checked_norm or self.had_none:  # the result of an earlier check
            self.spiked, self.recorded_gradients = False, None
            self.is_kept = self.has_checked_norm = self.is_left_scaled = self.had_none = False
        self["found_inf_per_device"], self["stage"] = found, UNSCALED if found else READY
        self.finite = finite

    @property
    def flags(self) -> list[Tensor]:
        """All flags."""
        return list(self["found_inf_per_device"].values())

    @property
    def overflow_flags(self) -> list[Tensor]:
        """The flags of overflows, one for each device."""
        return [flag for key, flag in self["found_inf_per_device"].items() if key is not SPIKE]

    def has_changed(self, optimizer: Any) -> bool:
        """Return whether gradients that were unscaled have changed since they were noted."""
        return self.recorded_gradients is not None and not self.recorded_gradients.is_unchanged(optimizer)

    def outcome(self) -> bool | Tensor:
        """Return whether the step was applied: a bool if known on the host, or a tensor that holds 0.0 if it was."""
        if type(self.applied) is bool:
            return self.applied
        if self.applied is None:  # other code has stepped the optimizer and set the stage
            return self.may_step()
        if isinstance(self.applied, Tensor) and is_readable(self.applied) and not is_being_recorded():
            return self.applied.item() == 0.0
        return self.applied

    def discard_decision(self) -> None:
        """Discard the decision, so that the flags are read again, since other code may have set one."""
        self.finite, self.spiked = None, False

    def may_step(self) -> bool:
        """Return whether no flag is set; waits for the device unless this is known on the host."""
        if self.finite is None:
            overflowed = spiked = False
            for key, flag in self["found_inf_per_device"].items():
                if flag.item() != 0.0:  # NaN, too; Ctrl-C may come while this waits
                    overflowed, spiked = overflowed or key is not SPIKE, spiked or key is SPIKE
            self.finite, self.spiked = not (overflowed or spiked), spiked and not overflowed
        return self.finite


class RecordedGradients:
    """The identity and version of an optimizer's gradients at one time."""

    def __init__(self, optimizer: Any) -> None:
        self._versions = {id(grad): (ref(grad), grad._version) for grad in grads_of(optimizer)}

    def is_unchanged(self, optimizer: Any) -> bool:
        """Return whether the optimizer has no new gradients, and none was written to since."""
        for grad in grads_of(optimizer):
            reference, version = self._versions.get(id(grad), (None, 0))
            if reference is None or reference() is not grad or grad._version != version:
                return False
        return True


class Member:
    """The facts about an optimizer that outlive a step."""

    def __init__(self, optimizer: Any, scaler: Any) -> None:
        self.optimizer: Callable[[], Any]
        """Returns the optimizer, or None after its deletion; then the scaler drops this member."""
        # The callback must not reference its owner: garbage cycles with such callbacks have crashed CPython 3.11.
        try:
            self.optimizer = ref(optimizer, functools.partial(_forget, ref(scaler), id(optimizer)))
        except TypeError:  # a class with `__slots__` may have no room for a weak reference
            self.optimizer = lambda: optimizer
        self.losses = -1
        """The number of losses scaled before the optimizer's last step; -1 before its first step."""
        self.kept: Record | None = None
        """The record of gradients that were unscaled and not stepped before the last update."""
        self.recorded_gradients: RecordedGradients | None = None
        """Its waiting gradients when the loss scale was read."""
        self.place: int | None = None
        """The index of its state in the guard."""


def _forget(scaler: Callable[[], Any], key: int, _: Any) -> None:
    alive = scaler()
    if alive is not None:
        alive._members.pop(key, None)


class Plain:
    """An ordinary optimizer: the scaler calls its `step` or skips it."""

    check = "unscale_"
    """The scaler's method that checks unchecked gradients."""

    @staticmethod
    def apply(scaler: Any, optimizer: Any, record: Record, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Step if no flag is set; waits for the device."""
        return scaler._maybe_opt_step(optimizer, record, *args, **kwargs)


class Fused:
    """A fused optimizer: its kernel divides by a factor, and skips the step itself if a flag is 1.0."""

    check = "_check_fused"

    @staticmethod
    def apply(scaler: Any, optimizer: Any, record: Record, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Step with the factor and the flag as attributes of the optimizer, as torch's own scaler does.

        A factor that the user has set before is multiplied in.
        """
        grad_scale = None
        if record["stage"] is READY and record.scale is not None:
            grad_scale = record.scale.tensor.clone()  # an optimizer may write to it
        # An interrupted step leaves its flag set, and perhaps a factor, which is then not the user's.
        preset = getattr(optimizer, "grad_scale", None) if getattr(optimizer, "found_inf", None) is None else None
        if preset is not None:
            grad_scale = preset if grad_scale is None else grad_scale * preset
        record.applied = found_inf = scaler._flag_for_kernel(record)
        states = getattr(optimizer, "state", {})
        known_states = len(states)
        optimizer.found_inf = found_inf  # set first and deleted last: an interrupted step always leaves it
        optimizer.grad_scale = grad_scale
        try:
            result = optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale
            del optimizer.found_inf
        if len(states) > known_states:
            _zero_unwritten_momentum(list(states.values())[known_states:], found_inf)
        return result


class Legacy:
    """An optimizer of torch's older contract: `step` receives the scaler and calls its methods."""

    check = ""  # the optimizer checks

    @staticmethod
    def apply(scaler: Any, optimizer: Any, record: Record, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Step with the scaler as an argument."""
        warnings.warn(_LEGACY, FutureWarning, stacklevel=3)  # at the line that called `GradScaler.step`
        record.applied = True
        return optimizer.step(*args, **kwargs, grad_scaler=scaler)


def takes_factor(optimizer: Any) -> bool:
    """Return whether an optimizer's kernel divides its gradients by a factor that it is given."""
    return kind_of(optimizer) is Fused


def found_inf(flags: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return 1.0 if a flag is set, else 0.0: float32, shape `()`, on `device`.

    Any value but 0.0 counts, NaN included; a fused kernel treats only 1.0 as an overflow.
    """
    found = [moved(flag, device).reshape(()) for flag in flags]
    if not found:
        return torch.zeros((), dtype=torch.float32, device=device)
    return (torch.stack(found) != 0.0).any().float()


def kind_of(optimizer: Any) -> type[Plain] | type[Fused] | type[Legacy]:
    """Return the class that steps an optimizer.

    A wrapper that only forwards attribute reads is not fused: the flag and the factor would be set on the wrapper, and
    the inner optimizer would not receive them.
    """
    if not getattr(optimizer, _FUSED, False):
        return Plain
    if _FUSED not in getattr(optimizer, "__dict__", ()) and not hasattr(type(optimizer), _FUSED):
        return Plain
    return Legacy if _takes_scaler(type(optimizer).step) else Fused


@functools.lru_cache(maxsize=64)
def _takes_scaler(step: Callable[..., Any]) -> bool:
    return "grad_scaler" in inspect.signature(step).parameters


def _zero_unwritten_momentum(new_states: list[dict[str, Any]], found_inf: Tensor) -> None:
    """Zero the momentum that a parameter's first step, if skipped, has left uninitialised; does not wait for the flag.

    torch's fused SGD allocates its momentum before its kernel decides to skip, and would then use it uninitialised.
    """
    for state in new_states:
        momentum = state.get("momentum_buffer") if isinstance(state, dict) else None
        if momentum is not None:
            momentum.copy_(torch.where(moved(found_inf, momentum.device) == 0.0, momentum, 0.0))
