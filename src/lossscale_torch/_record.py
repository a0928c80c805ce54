"""`OptimizerStep`, the record of one optimizer between two updates, and the flags in it.

A flag is 0.0 if the step may be applied; 1.0, or NaN, skips it. A flag that the host knows is a tensor on the CPU.
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
"""The names under which the flags of the guard and of other hooks are stored."""

_FUSED = "_step_supports_amp_scaling"
_IS_CPU = operator.attrgetter("is_cpu")


class Kind(Enum):
    """How an optimizer is stepped."""

    PLAIN = "the scaler reads the flags, and calls the optimizer's `step` or skips it"
    FUSED = "the optimizer's kernel reads the flag, divides by a factor, and skips the step itself"
    LEGACY = "the optimizer's `step` receives the scaler, as in torch's older contract, and decides"


# Access to the members of an enum by name is slow.
READY, UNSCALED, STEPPED = OptState
PLAIN, FUSED, LEGACY = Kind


class OptimizerStep(dict[str, Any]):
    """The record of one optimizer between two updates.

    Its entries are those of torch's record, `"stage"` and `"found_inf_per_device"`, which other packages read, write
    and replace. The facts that only this library needs are attributes.
    """

    optimizer: Optimizer = None  # type: ignore[assignment]
    """The optimizer; None only in a record that another package has put in the place of the scaler's."""
    kind: Kind | None = None
    """How `step` has called the optimizer; None before the call."""
    applied: bool | None = None
    """Whether the scaler decided to step the optimizer; None before, and if a kernel or a subclass decides."""
    norm: Tensor | None = None
    """The norm of the unscaled gradients: shape `()`; None if nothing has computed it.

    It is the 2-norm, or after a clip the norm by which the gradients were clipped.
    """
    divisor: Tensor | None = None
    """The divisor that clips, which is left to the kernel of a guarded optimizer."""
    has_divided: bool = False
    """Whether this rank has divided gradients, and scaled no loss since the step."""
    combined_over: "Sequence[ProcessGroup]" = ()
    """The groups of ranks over which a clip has combined the flags."""
    has_dropped: bool = False
    """Whether the divided gradients were set to None before another loss was scaled."""
    is_done: bool = False
    """Whether an earlier attempt of `attempts` has applied the step, so that this attempt leaves it alone."""

    def __init__(self, entries: Mapping[str, Any] | None = None) -> None:
        self["stage"], self["found_inf_per_device"] = READY, {}
        self.update(entries or ())

    @property
    def flags(self) -> dict[torch.device | str, Tensor]:
        """The flags: of the gradients under their devices, and vetoes of hooks under the names of the hooks."""
        flags: dict[torch.device | str, Tensor] = self["found_inf_per_device"]
        return flags

    def store_veto(self, veto: object, hook: "Hook") -> None:
        """Store the answer of a hook, unless it allows the step, as a flag under the name of the hook.

        Subclasses of other packages add up the flags, so that the veto must be one of them.
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
        """Return whether no flag is set: a bool of shape `()` on `device`."""
        return combine(self.flags.values(), device) == 0.0

    @property
    def had_gradients(self) -> bool:
        """Whether a step can have changed parameters: only those with gradients."""
        return self.is_done or self.kind is LEGACY or bool(flags_of([self], vetoes=False))

    @property
    def may_have_moved(self) -> bool:
        """Whether gradients were applied, or the optimizer was called with them and decided by itself."""
        return self.had_gradients and (self.kind is not None if self.applied is None else self.applied)


class OptimizerSteps(defaultdict[int, OptimizerStep]):
    """The records of a scaler by the ids of the optimizers. Records of torch's form become an `OptimizerStep`."""

    _owners: "dict[Tensor, OptimizerStep] | None" = None
    """The record by which the gradient of a parameter is divided, once several optimizers take part."""

    def __setitem__(self, key: int, record: dict[str, Any]) -> None:
        super().__setitem__(key, record if isinstance(record, OptimizerStep) else OptimizerStep(record))

    def claim_gradients(self, step: OptimizerStep, policy: ScalingPolicy) -> None:
        """Note whose the gradients of an optimizer are; raise an error if another one of this step has divided them."""
        # The claims of earlier records are noted first, since a single optimizer needs none.
        claims = [step] if self._owners else sorted(self.values(), key=lambda other: other is step)
        owners = self._owners = self._owners or {}
        for claim in claims:
            params = [] if claim.optimizer is None else params_of(claim.optimizer)
            for param in owners.keys() & {*params}:
                owner, optimizer = owners[param], owners[param].optimizer
                is_divided = owner.has_divided and param.grad is not None
                is_wrapped = optimizer.param_groups is claim.optimizer.param_groups
                if owner is not claim and (is_wrapped or (is_divided and BaseScaling.of(policy).scales_losses)):
                    name = dict(zip(params, names_of(claim.optimizer), strict=True))[param]
                    raise CallOrderError(
                        f"{name} belongs to two optimizers of this step, a {type(optimizer).__name__} and a "
                        f"{type(claim.optimizer).__name__}, and its gradient would be divided twice; pass an optimizer "
                        "as the same object to each call, or unscale optimizers that share parameters together, before "
                        "the first step: scaler.unscale_and_clip_([first, second], max_norm), with float('inf') to not "
                        "clip"
                    )
            owners.update(dict.fromkeys(params, claim))


Decision = tuple[bool, bool, bool, bool]
"""The flags of a step that the host knows: had gradients, overflowed, vetoed, and vetoed by the guard alone."""


def decision_on_host(steps: Iterable[OptimizerStep]) -> Decision | None:
    """Return what the flags of the steps say together, or None if one of the flags is on a device."""
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
    """Return the vetoes of hooks, or else the flags of gradients."""
    return [flag for step in steps for key, flag in step.flags.items() if (type(key) is str) is vetoes]


def combine(flags: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the largest flag, which may be NaN: float32, shape `()`, on `device`; 0.0 if there is none."""
    on_device = [to_device(flag, device) for flag in flags]
    if len(on_device) == 1:
        return on_device[0]
    if not on_device:
        return torch.zeros((), dtype=torch.float32, device=device)
    return functools.reduce(torch.maximum, [flag.reshape(()) for flag in on_device])


def read_numbers(tensors: Sequence[Tensor], device: torch.device) -> list[float]:
    """Return the numbers of tensors of shape `()`. Waits for all devices together, once."""
    if all(map(_IS_CPU, tensors)):
        return [*map(Tensor.item, tensors)]
    dtype = torch.float64 if any(tensor.dtype is torch.float64 for tensor in tensors) else torch.float32
    numbers: list[float] = torch.stack([to_device(each, device).to(dtype).reshape(()) for each in tensors]).tolist()
    return numbers


def kind_of(optimizer: Optimizer) -> Kind:
    """Return how an optimizer is stepped.

    A wrapper that only forwards attribute reads is not fused: the flag and the factor would be set on the wrapper, and
    the inner optimizer would not receive them.
    """
    is_own = _FUSED in getattr(optimizer, "__dict__", ()) or hasattr(type(optimizer), _FUSED)
    if not (is_own and getattr(optimizer, _FUSED)):
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
