"""`OptimizerStep`: the record of an optimizer between two calls of `update`, with its stage and its flags.

The stage says which calls the optimizer has had: READY (none), UNSCALED (`unscale_`) or STEPPED (`step` or `skip`).
A flag is a float32 tensor of shape `()`: 0.0 allows the step; another value, also NaN, forbids it. A flag of gradients
is set by an overflow, and a veto is set by a hook. If the host knows a flag, the tensor is on the CPU.
"""

import functools
import inspect
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from lossscale_core import BaseScaling, ScalingPolicy
from lossscale_core.adapters import describe
from lossscale_core.errors import CallOrderError
from lossscale_torch._gradients import names_of, params_of, to_device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from lossscale_torch.hooks import Hook

SPIKE, VETO = "spike", "veto"
"""The keys of vetoes in a record: of the guard, and of other hooks."""

_FUSED = "_step_supports_amp_scaling"
_IS_CPU = operator.attrgetter("is_cpu")


class Kind(Enum):
    """How `GradScaler.step` calls an optimizer."""

    PLAIN = "the scaler reads the flags on the host, and calls the optimizer's `step` only if no flag is set"
    FUSED = "the optimizer's kernel reads the flag on the device, unscales the gradients, and may skip the step itself"
    LEGACY = "the optimizer's `step` receives the scaler as an argument, and decides itself"


# These names exist because access to the members of an enum is slow.
READY, UNSCALED, STEPPED = OptState
PLAIN, FUSED, LEGACY = Kind


class OptimizerStep(dict[str, Any]):
    """The record of an optimizer between two calls of `update`.

    The entries are the entries of torch's record, `"stage"` and `"found_inf_per_device"`. Other packages read, write
    and replace them. The attributes hold facts that only this library needs.
    """

    optimizer: Optimizer = None  # type: ignore[assignment]
    """The optimizer; None only if another package has stored a record of its own."""
    kind: Kind | None = None
    """How `step` has called the optimizer; None before the call."""
    applied: bool | None = None
    """Whether the scaler has stepped the optimizer; None before `step`, and if a kernel or a subclass decides."""
    norm: Tensor | None = None
    """The norm of the unscaled gradients: shape `()`; None if it was not computed.

    It is the 2-norm, or after a clip the norm of the order that the clip used.
    """
    divisor: Tensor | None = None
    """The number by which the kernel of a fused, guarded optimizer divides the gradients, to clip them."""
    has_divided: bool = False
    """Whether the gradients are unscaled: this rank has divided them, and no loss was scaled since the step."""
    combined_over: "Sequence[ProcessGroup]" = ()
    """The groups of ranks over which a clip has combined the flags."""
    has_dropped: bool = False
    """Whether the program set the unscaled gradients to None and then scaled another loss."""
    is_done: bool = False
    """Whether an earlier try of `attempts` has stepped the optimizer, so that this try does not step it."""

    def __init__(self, entries: Mapping[str, Any] | None = None) -> None:
        self["stage"], self["found_inf_per_device"] = READY, {}
        self.update(entries or ())

    @property
    def flags(self) -> dict[torch.device | str, Tensor]:
        """The flags of gradients by device, and the vetoes by the names of their hooks."""
        flags: dict[torch.device | str, Tensor] = self["found_inf_per_device"]
        return flags

    def store_veto(self, veto: object, hook: "Hook") -> None:
        """Store the answer of a hook as a flag under the name of the hook, unless the answer is None or False.

        A veto must be one of the flags, since subclasses in other packages decide by the sum of the flags.
        """
        if veto is None or veto is False:
            return
        try:
            flag = (veto if isinstance(veto, Tensor) else torch.tensor(veto)).float().reshape(())
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"{type(hook).__name__}.before_step returned {describe(veto)}; return True, or a tensor of one element "
                "that is not 0.0, to skip the step, and None or False to allow it"
            ) from error
        if (other := self.flags.get(hook.name)) is not None:
            flag = combine([other, flag], other.device if flag.is_cpu else flag.device)
        self.flags[hook.name] = flag

    def is_allowed(self, device: torch.device) -> Tensor:
        """Return whether all flags allow the step: a bool tensor of shape `()` on `device`. Does not synchronise."""
        return combine(self.flags.values(), device) == 0.0

    @property
    def has_begun(self) -> bool:
        """Whether the record has a flag, or a stage after READY, so that `update` must end its step."""
        return self["stage"] is not READY or bool(self["found_inf_per_device"])

    @property
    def had_gradients(self) -> bool:
        """Whether the optimizer had gradients; without them a step changes no parameters."""
        return self.is_done or self.kind is LEGACY or bool(flags_of([self], vetoes=False))

    @property
    def may_have_stepped(self) -> bool:
        """Whether the optimizer has applied gradients, or its kernel may have done so."""
        return self.had_gradients and (self.kind is not None if self.applied is None else self.applied)


class OptimizerSteps(defaultdict[int, OptimizerStep]):
    """The records of a scaler, by the ids of the optimizers. A plain dict that is stored becomes an `OptimizerStep`."""

    _owners: "dict[Tensor, OptimizerStep] | None" = None
    """For each parameter, the record of the optimizer that holds it; None while there is only one optimizer."""

    def __setitem__(self, key: int, record: dict[str, Any]) -> None:
        super().__setitem__(key, record if isinstance(record, OptimizerStep) else OptimizerStep(record))

    def claim_gradients(self, step: OptimizerStep, policy: ScalingPolicy) -> None:
        """Register the parameters of an optimizer; raise `CallOrderError` if another has unscaled their gradients."""
        # The first optimizer was not registered when it was the only one.
        claims = [step] if self._owners else sorted(self.values(), key=lambda other: other is step)
        owners = self._owners = self._owners or {}
        for claim in claims:
            params = [] if claim.optimizer is None else params_of(claim.optimizer)
            for param in owners.keys() & {*params}:
                owner, optimizer = owners[param], owners[param].optimizer
                is_divided = owner.has_divided and param.grad is not None
                shares_groups = optimizer.param_groups is claim.optimizer.param_groups
                if owner is not claim and (shares_groups or (is_divided and BaseScaling.of(policy).scales_losses)):
                    name = dict(zip(params, names_of(claim.optimizer), strict=True))[param]
                    raise CallOrderError(
                        f"{name} belongs to two optimizers of this step, a {type(optimizer).__name__} and a "
                        f"{type(claim.optimizer).__name__}, and its gradient would be divided twice; pass an optimizer "
                        "as the same object to each call, or, if two optimizers share parameters, unscale both in one "
                        "call before the first step: scaler.unscale_and_clip_([first, second], max_norm); "
                        "max_norm=float('inf') does not clip"
                    )
            owners.update(dict.fromkeys(params, claim))


Decision = tuple[bool, bool, bool, bool]
"""Whether a step had gradients, overflowed, was vetoed, and was vetoed by the guard without an overflow."""


def decision_on_host(steps: Iterable[OptimizerStep]) -> Decision | None:
    """Return the decision by the flags of all records together, or None if a flag is on a device."""
    had_gradients = overflowed = vetoed = spiked = False
    for step in steps:
        for key, flag in step["found_inf_per_device"].items():
            if not flag.is_cpu:
                return None
            is_set = flag.item() != 0.0  # True for NaN, too
            if type(key) is not str:
                had_gradients, overflowed = True, overflowed or is_set
            elif is_set:
                vetoed, spiked = True, spiked or key == SPIKE
    return had_gradients, overflowed, vetoed, spiked and not overflowed


def flags_of(steps: Iterable[OptimizerStep], *, vetoes: bool) -> list[Tensor]:
    """Return the vetoes of hooks, or the flags of gradients."""
    return [flag for step in steps for key, flag in step.flags.items() if (type(key) is str) is vetoes]


def combine(flags: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the largest flag, which may be NaN: float32, shape `()`, on `device`; 0.0 if there is none."""
    flags = [to_device(flag, device) for flag in flags]
    if len(flags) == 1:
        return flags[0]
    if not flags:
        return torch.zeros((), dtype=torch.float32, device=device)
    return functools.reduce(torch.maximum, [flag.reshape(()) for flag in flags])


def read_numbers(tensors: Sequence[Tensor], device: torch.device) -> list[float]:
    """Return the values of tensors of shape `()`. Waits once for all tensors that are not on the CPU."""
    if all(map(_IS_CPU, tensors)):
        return [*map(Tensor.item, tensors)]
    dtype = torch.float64 if any(tensor.dtype is torch.float64 for tensor in tensors) else torch.float32
    numbers: list[float] = torch.stack([to_device(tensor, device).to(dtype).reshape(()) for tensor in tensors]).tolist()
    return numbers


def kind_of(optimizer: Optimizer) -> Kind:
    """Return how `GradScaler.step` must call an optimizer.

    A wrapper that forwards attribute reads to a fused optimizer is PLAIN: the scaler would set the flag and the factor
    on the wrapper, and the inner optimizer would not receive them.
    """
    has_attribute = _FUSED in getattr(optimizer, "__dict__", ()) or hasattr(type(optimizer), _FUSED)
    if not (has_attribute and getattr(optimizer, _FUSED)):
        return PLAIN
    return LEGACY if _takes_scaler(getattr(optimizer.step, "__func__", optimizer.step)) else FUSED


@functools.lru_cache(maxsize=64)
def _takes_scaler(step: Any) -> bool:
    return "grad_scaler" in inspect.signature(step).parameters


def require_optimizer(optimizer: Optimizer, caller: str) -> None:
    """Raise `TypeError` for an object that is not an optimizer."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"{caller}() was given a {type(optimizer).__name__}, which has no param_groups; it takes an optimizer; "
            "pass the torch.optim.Optimizer of these parameters"
        )
