"""A device on a CPU: copies to the host arrive late unless a test waits for them; without float64, if not CUDA."""

from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lossscale_torch import _watch

_FACTORIES = {
    getattr(torch, name)
    for name in ("empty", "full", "ones", "rand", "randn", "tensor", "zeros", "as_tensor", "asarray", "arange")
}
_READS = {torch.Tensor.tolist, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__bool__, torch.Tensor.item}
"""Reads of a value, which wait for the device."""
_GUARDED = {torch.Tensor.__getitem__, torch.Tensor.__invert__, torch.Tensor.copy_, torch.where}
"""Functions that ask for the device before they dispatch."""
_SHARED_KERNELS = (
    "_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_", "_fused_adamw_", "_fused_sgd_", "_fused_adam_"
)  # fmt: skip
"""Kernels with an underscore that torch has on MPS and XPU, too."""


class OnDevice(torch.Tensor):
    """A tensor on an emulated device; its values are those of a tensor on the CPU."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, device: torch.device) -> "OnDevice":
        """Wrap `values`; autograd takes the tensor for one on `meta`, where backward needs no stream."""
        if device.type != "cuda" and values.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"{device.type} has no {values.dtype}")
        result = torch.Tensor._make_wrapper_subclass(
            cls, values.size(), values.stride(), values.storage_offset(), dtype=values.dtype, device="meta",
            dispatch_device=True,
        )  # fmt: skip
        result.values, result.its_device = values, device
        return result

    def __repr__(self) -> str:  # type: ignore[override]
        """Show the values, for which the host waits."""
        Emulated.reads += 1
        return f"OnDevice({self.values})"

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on the values, as the device would."""
        kwargs = dict(kwargs or {})
        (device,) = {each.its_device for each in _tensors((args, kwargs))}
        if operation is torch.ops.prim.device.default:
            return device
        Emulated.calls.append(operation)
        if operation is torch.ops.aten._to_copy.default:
            return _copy(args[0], kwargs)
        if operation is torch.ops.aten.copy_.default:
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            _require_waited(isinstance(args[0], OnDevice) or not non_blocking)
        elif operation.__name__.startswith("_local_scalar"):
            Emulated.reads += 1
        else:
            _require_one_place(operation, args, kwargs)
        if "device" in kwargs and kwargs["device"] is not None and torch.device(kwargs["device"]).type == device.type:
            kwargs["device"] = "cpu"
        result = operation(*_values(args), **_values(kwargs))
        changed = {id(each.values): each for each in _tensors((args, kwargs))}
        return tree_map_only(
            torch.Tensor, lambda each: changed.get(id(each)) if id(each) in changed else OnDevice(each, device), result
        )


class Emulated(TorchFunctionMode):
    """Lets torch make tensors on a device that this machine has not."""

    reads = 0
    """How often the host has waited for the device, in the last of these modes."""
    calls: ClassVar[list[Any]] = []
    """The functions that have run there, in the last of these modes."""

    def __init__(self, type_: str) -> None:
        super().__init__()
        self.device = torch.device(type_, 0)
        Emulated.reads, Emulated.calls = 0, []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function; what it makes on the device is made on the CPU, and wrapped."""
        kwargs = dict(kwargs or {})
        if function in _FACTORIES and self._is_meant(kwargs.get("device")) and not _tensors(args):
            requires_grad = kwargs.pop("requires_grad", False)
            Emulated.calls.append(function)
            made = OnDevice(function(*args, **{**kwargs, "device": "cpu"}), self.device)
            return made.requires_grad_(requires_grad)
        if function in _READS and isinstance(args[0], OnDevice):
            Emulated.reads += 1
            return function(args[0].values)
        if function in _GUARDED and isinstance(args[0], OnDevice):
            Emulated.calls.append(function)
            result = function(*_values(args), **_values(kwargs))
            return kwargs.get("out", OnDevice(result, self.device))
        if function is torch.Tensor.__setitem__ and isinstance(args[0], OnDevice):
            Emulated.calls.append(function)
            return function(*_values(args))
        if function in (torch.Tensor.to, torch.as_tensor) and isinstance(args[0], torch.Tensor):
            if not any(self._is_meant(each) for each in (*args[1:], *kwargs.values())):
                return function(*args, **kwargs)
            if isinstance(args[0], OnDevice):
                return args[0]
            Emulated.calls.append(function)
            return OnDevice(args[0].detach().clone(), self.device)
        return function(*args, **kwargs)

    def _is_meant(self, device: Any) -> bool:
        return isinstance(device, str | torch.device) and torch.device(device).type == self.device.type


def _copy(tensor: OnDevice, kwargs: dict[str, Any]) -> torch.Tensor:
    device, waits = kwargs.pop("device", None), not kwargs.pop("non_blocking", False)
    values = torch.ops.aten._to_copy.default(tensor.values, **kwargs)
    if device is None or torch.device(device).type == tensor.its_device.type:
        return OnDevice(values, tensor.its_device)
    _require_waited(waits)
    Emulated.reads += 1
    return values


def _require_waited(waits: bool) -> None:
    if not waits:
        raise RuntimeError("a non-blocking copy to the host may be read before the device has written it")


def _require_one_place(operation: Any, args: Any, kwargs: Any) -> None:
    name = operation.overloadpacket.__name__
    if name.startswith(("_fused", "_amp")) and name not in _SHARED_KERNELS:
        raise NotImplementedError(f"{name} is a kernel of CUDA's alone")
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    if any(each.dim() > 0 and not isinstance(each, OnDevice) for each in tensors):  # a host's number goes anywhere
        raise RuntimeError(f"{operation} was given tensors of two devices")


def _tensors(tree: Any) -> list[OnDevice]:
    return [each for each in tree_leaves(tree) if isinstance(each, OnDevice)]


def _values(tree: Any) -> Any:
    return tree_map_only(OnDevice, lambda each: each.values, tree)


class EmulatedCopy(_watch.LateCopy):
    """A copy from an emulated device that arrives at the second look."""

    DEVICES = ("mps",)

    def __init__(self, tensors):
        self.looks, self.values = 0, [number for each in tensors for number in each.values.reshape(-1).tolist()]

    def numbers(self):
        """Return the numbers if they have arrived."""
        self.looks += 1
        return self.values if self.looks > 1 else None
