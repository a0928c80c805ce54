"""Check, multiply and measure the gradients of optimizers, with one kernel call for each device and dtype."""

import functools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors
from torch.optim import Optimizer

FLOAT64_DEVICES = ("cpu", "cuda")
"""The device types that support float64; MPS and Intel Arc do not."""
_WITHOUT_BFLOAT16 = ("cuda",)
"""The device types on which torch's checking kernel does not support bfloat16: https://github.com/pytorch/pytorch/issues/127176."""

Bucket = list[Tensor]

_SMALLEST_DOT = 4096
"""The smallest size of a tensor for a `torch.dot` of its own; copying a smaller one takes no longer than the call."""
_SMALLEST_FLOAT32_NORM = 2.0**-40
"""The smallest norm that float32 computes reliably; below it, squares may flush to zero."""
MAX_EXACT_ORDER = 6.0
"""The largest order of a norm for which float64 holds the power of every finite float32 number."""


class Gradients:
    """The gradients of some optimizers in buckets: lists of real, dense, local tensors of one device and dtype.

    The tensors in the buckets share memory with the gradients. Foreach kernels cannot change every gradient in place. A
    sparse gradient with duplicates and a DTensor with partial sums are therefore first replaced in `.grad`. A float16
    gradient raises `ValueError` with torch's message, unless `allow_half`.
    """

    __slots__ = ("_grads", "_values", "buckets")

    def __init__(self, optimizers: Sequence[Optimizer], allow_half: bool = True) -> None:
        self._grads = self._values = grads = _grads_of(optimizers)
        if grads and _is_one_bucket(grads):
            self.buckets = [grads]
        else:
            params = dict.fromkeys(param for optimizer in optimizers for param in params_of(optimizer))
            self._grads = [_make_writable(param) for param in params if param.grad is not None]
            self._values = [values_of(grad) for grad in self._grads]
            self.buckets = to_buckets(self._values)
        for bucket in self.buckets:
            if bucket[0].dtype is torch.float16 and not allow_half:
                raise ValueError(_float16_message(optimizers))

    def check_and_multiply_(self, factor: Tensor, found_inf: Tensor, is_one: bool = False) -> dict[Any, Tensor]:
        """Multiply the gradients in place; return a flag for each device, 1.0 if a gradient was not finite, else 0.0.

        `found_inf` is the flag for the device of `factor`, 0.0 at first; other devices get copies. With
        `is_one`, the factor is 1, and the gradients keep their values.
        """
        flags: dict[Any, Tensor] = {}
        for bucket in self.buckets:
            device = bucket[0].device
            is_here = device == found_inf.device
            if device not in flags:
                flags[device] = found_inf if is_here else to_device(found_inf.clone(), device)
            check_and_multiply_(bucket, factor if is_here else to_device(factor, device), flags[device], is_one)
        return flags

    def norm_dtype(self, device: torch.device) -> torch.dtype:
        """Return the dtype of a norm: float64 if a gradient is float64 and the device supports it, else float32."""
        for bucket in self.buckets:
            if bucket[0].dtype is torch.float64 and device.type in FLOAT64_DEVICES:
                return torch.float64
        return torch.float32

    def norm(
        self,
        order: float,
        unit: Tensor,
        groups: Sequence[Any] = (),
        norm_group: Any = None,
        to_host: Callable[[Tensor], float] | None = None,
        left_out: bool = False,
    ) -> tuple[Any, Any]:
        """Return the norm of all elements on all ranks, and whether all elements are finite.

        The norm is infinite if the powers of finite elements overflow its dtype. Each rank calls one all-reduce for
        each group; a rank without gradients contributes 0.

        Args:
            order: The order of the norm, above 0.
            unit: 1.0 in float32. Its device is the device of the all-reduce and of the results.
            groups: The groups over which parameters are sharded or replicated, the same on all ranks of a group. A
                group that does not shard a parameter is assumed to hold copies of it.
            norm_group: The member of `groups` whose ranks hold different parameters.
            to_host: A function that waits for a tensor and returns its value. With it, and without groups, a 2-norm is
                computed in the dtype of the gradients, and again in float64 only if it is infinite or tiny.
            left_out: Whether this rank has left out the last step. If only some ranks of `groups` have left it out,
                the norm is -1, and the flag is False.

        Returns:
            The norm and a bool. Both are tensors of shape `()`, the norm in float64 if the device supports it; or both
            are Python values, if `to_host` returned the norm.
        """
        device = unit.device
        if to_host is not None and order == 2.0 and not groups and self._values:
            value = to_host(self._two_norm(device))
            if _SMALLEST_FLOAT32_NORM <= value < math.inf or math.isnan(value):  # a sum of finite squares is not NaN
                return value, not math.isnan(value)
        dtype = torch.float64 if device.type in FLOAT64_DEVICES else torch.float32
        norms, is_conclusive = self._norms(order, dtype, groups, norm_group)
        norms = [to_device(norm.to(dtype), device) for norm in norms] or [torch.zeros(1, dtype=dtype, device=device)]
        total = torch.linalg.vector_norm(norms[0] if len(norms) == 1 else torch.cat(norms), order)
        if is_conclusive:
            is_finite = total < math.inf  # False for NaN, too; `isfinite` would launch four kernels instead of one
        else:
            flags = self.check_and_multiply_(unit, torch.zeros_like(unit), is_one=True).values()
            is_finite = functools.reduce(torch.maximum, [to_device(flag, device) for flag in flags]) == 0.0
        if groups:
            is_max = order == math.inf
            power = total if is_max else total**order
            skips = torch.full_like(power, left_out)
            bad = torch.where(is_finite, 0.0, unit).to(dtype)
            row = torch.stack([torch.where(is_finite, power, 0.0), bad, skips, 1.0 - skips])
            operation = torch.distributed.ReduceOp.MAX if is_max else torch.distributed.ReduceOp.SUM
            for group in groups:
                torch.distributed.all_reduce(row, op=operation, group=group)
            is_finite = row[1] == 0.0
            total = torch.where(is_finite, row[0] if is_max else row[0] ** (1.0 / order), math.nan)
            all_agree = row[2] * row[3] == 0.0
            return torch.where(all_agree, total, -1.0), is_finite & all_agree
        return total, is_finite

    def _norms(
        self, order: float, dtype: torch.dtype, groups: Sequence[Any], norm_group: Any
    ) -> tuple[list[Tensor], bool]:
        """Return the norms of the gradients, one vector for each bucket, and whether these norms are conclusive.

        Norms are conclusive if, in `dtype`, they are finite if and only if all elements are finite. If n ranks hold
        copies of a gradient, its norm is divided, so that the all-reduce over the n copies counts the gradient once.
        """
        by_count: dict[int, list[Tensor]] = {}
        counts: dict[Any, int] = {}
        norms: list[Tensor] = []
        is_conclusive = True
        grad: Any
        for grad, values in zip(self._grads, self._values, strict=True):
            if values.numel():  # the infinity norm of an empty tensor is undefined
                layout = (grad.device_mesh, grad.placements) if is_dtensor(grad) else None
                if layout not in counts:
                    counts[layout] = _count_copies(layout, [group for group in groups if group is not norm_group])
                if grad.is_complex() and order != 2.0:
                    values, is_conclusive = torch.view_as_complex(values).abs(), False
                by_count.setdefault(counts[layout], []).append(values)
        for count, tensors in by_count.items():
            for bucket in to_buckets(tensors):
                is_float64 = bucket[0].dtype is torch.float64
                supports_float64 = bucket[0].device.type in FLOAT64_DEVICES
                fits = (supports_float64 and dtype is torch.float64) or (order == math.inf and not is_float64)
                is_conclusive &= fits and (order == math.inf or (not is_float64 and order <= MAX_EXACT_ORDER))
                norm_dtype = torch.float64 if supports_float64 else torch.float32
                norm = torch.stack(torch._foreach_norm(bucket, order, dtype=norm_dtype))
                norms.append(norm / count ** (1.0 / order) if count > 1 else norm)
        return norms, is_conclusive

    def _two_norm(self, device: torch.device) -> Tensor:
        """Return the 2-norm in the dtype of the gradients, at least float32; squares may overflow that dtype."""
        norms = []
        for bucket in self.buckets:
            if bucket[0].dtype is torch.float32 and bucket[0].is_cpu:
                norm = _two_norm_by_dots(bucket)
            else:
                dtype = torch.float32 if bucket[0].dtype.itemsize < 4 else None  # float16 is infinite from 65520 on
                norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(bucket, 2.0, dtype=dtype)))
            norm = norm.to(self.norm_dtype(device)) if norm.dtype is torch.float64 else norm
            norms.append(to_device(norm, device))
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))

    def multiply_(self, factor: float | Tensor) -> None:
        """Multiply the gradients, which must be finite, in place by a number or by a tensor of shape `()`."""
        for bucket in self.buckets:
            is_float64 = bucket[0].dtype is torch.float64
            if isinstance(factor, Tensor):
                torch._foreach_mul_(bucket, to_device(factor if is_float64 else factor.float(), bucket[0].device))
            elif is_float64 or (bucket[0].dtype is torch.bfloat16 and bucket[0].device.type in _WITHOUT_BFLOAT16):
                torch._foreach_mul_(bucket, factor)
            else:  # for small tensors, the kernel that also checks takes a fifth of the time of `_foreach_mul_`
                flag = torch.zeros((), dtype=torch.float32, device=bucket[0].device)
                check_and_multiply_(bucket, torch.full_like(flag, factor), flag)


def check_and_multiply_(bucket: Bucket, factor: Tensor, found_inf: Tensor, is_one: bool = False) -> None:
    """Set `found_inf` to 1.0 if an element is not finite; multiply in place unless the factor `is_one`."""
    if bucket[0].dtype is torch.bfloat16 and bucket[0].device.type in _WITHOUT_BFLOAT16:
        if nonempty := [values for values in bucket if values.numel()]:  # an empty tensor has no infinity norm
            largest = torch.stack(torch._foreach_norm(nonempty, math.inf)).amax()
            found_inf.copy_(torch.maximum(found_inf, (~torch.isfinite(largest)).float()))
        if not is_one:
            torch._foreach_mul_(bucket, factor)
    else:  # this kernel keeps the values if the factor is 1
        torch._amp_foreach_non_finite_check_and_unscale_(bucket, found_inf, factor)


def reduce_max(flags: Tensor, groups: Iterable[Any]) -> Tensor:
    """Replace flags by their maximum over the ranks of each group, and return them. Every rank must make this call."""
    for group in groups:
        torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX, group=group)
    return flags


def params_of(optimizer: Optimizer) -> list[Any]:
    """Return an optimizer's parameters, in order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def names_of(optimizer: Optimizer) -> list[str]:
    """Return a name for each parameter: the name that the optimizer knows, or a place and a shape."""
    return [
        names[place] if place < len(names) else f"parameter {place} of group {number} (shape {tuple(param.shape)})"
        for number, group in enumerate(optimizer.param_groups)
        for names in [group.get("param_names") or []]  # a parameter that was added later has no name
        for place, param in enumerate(group["params"])
    ]


def has_gradients(optimizer: Optimizer) -> bool:
    """Return whether a parameter of an optimizer has a gradient."""
    return any(param.grad is not None for group in optimizer.param_groups for param in group["params"])


def values_of(grad: Tensor) -> Tensor:
    """Return the values of a gradient on this rank as a real, dense tensor. Do not write into it."""
    if is_dtensor(grad):
        grad = grad.to_local()  # type: ignore[attr-defined]
    if grad.is_sparse:
        grad = grad.coalesce().values()
    return torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad


def to_buckets(tensors: Iterable[Tensor]) -> list[Bucket]:
    """Group tensors into one list for each device and dtype."""
    by_kind: dict[tuple[torch.device, torch.dtype], Bucket] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(by_kind.values())


def at_least_float32(tensor: Tensor) -> Tensor:
    """Convert float16, bfloat16 and float8 tensors to float32, and return any other tensor unchanged."""
    return tensor.float() if tensor.dtype.itemsize < 4 and tensor.is_floating_point() else tensor


def has_meshes() -> bool:
    """Return whether parameters may lie on a device mesh, which needs DTensor and several processes."""
    return "torch.distributed.tensor" in sys.modules and torch.distributed.is_initialized()


def is_dtensor(tensor: Any) -> bool:
    """Return whether `tensor` is a DTensor. Does not import DTensor, because that import is slow."""
    return type(tensor) is not Tensor and hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy `tensor` to `device` if it is on another device. Only a copy to the host synchronises.

    A non-blocking copy to the host could be read before the device has written it:
    https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
    """
    return tensor if tensor.device == device else tensor.to(device, non_blocking=device.type != "cpu")


def _grads_of(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Return the gradients of all parameters, in order."""
    params: list[Any] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            params += group["params"]
    params = params if len(optimizers) == 1 else list(dict.fromkeys(params))  # optimizers may share parameters
    return [grad for param in params if (grad := param.grad) is not None]


def _is_one_bucket(grads: list[Tensor]) -> bool:
    """Return whether all gradients are plain, dense, real tensors of one device and dtype."""
    dtype, is_cpu, index = grads[0].dtype, grads[0].is_cpu, grads[0].get_device()
    if dtype.is_complex or dtype.itemsize < 2 or (index < 0 and not is_cpu):  # a device type without indices
        return False
    for grad in grads:  # `all` over a generator takes twice as long
        if (
            type(grad) is not Tensor
            or grad.dtype is not dtype
            or grad.layout is not torch.strided
            or not (grad.is_cpu if is_cpu else grad.get_device() == index)  # a CPU tensor has the index -1
        ):
            return False
    return True


def _make_writable(param: Tensor) -> Any:
    """Replace `param.grad` by a tensor that kernels can change in place, if necessary, and return it."""
    grad: Any = param.grad
    if is_dtensor(grad):
        if any(placement.is_partial() for placement in grad.placements):  # the sum of finite parts may be infinite
            from torch.distributed.tensor import Replicate

            placements = [Replicate() if placement.is_partial() else placement for placement in grad.placements]
            param.grad = grad.redistribute(placements=placements)
    elif grad.is_conj():
        param.grad = grad.resolve_conj()
    elif grad.is_sparse and not grad.is_coalesced():
        param.grad = grad.coalesce()  # sums the duplicates; the sums must be finite
    elif grad.layout not in (torch.strided, torch.sparse_coo):
        raise TypeError(
            f"a gradient of shape {tuple(grad.shape)} has the layout {grad.layout}; torch's kernels check dense and "
            "torch.sparse_coo gradients only; convert its parameter to one of these layouts"
        )
    return param.grad


def _count_copies(layout: Any, groups: list[Any]) -> int:
    """Return how often a sum over all groups counts a gradient. `layout` is its mesh and placements, or None."""
    sharded = []
    if layout is not None:
        mesh, placements = layout
        sharded = [mesh.get_group(dim) for dim, placement in enumerate(placements) if not placement.is_replicate()]
    return math.prod(torch.distributed.get_world_size(group) for group in groups if group not in sharded)


def _two_norm_by_dots(bucket: Bucket) -> Tensor:
    """Return the 2-norm as the root of dot products, which run at memory speed on a CPU."""
    vectors: list[Tensor] = []
    small: list[Tensor] = []
    for values in bucket:
        if values.numel() < _SMALLEST_DOT:
            small.append(values)
        else:
            vectors.append(values.reshape(-1))
    if small:
        vectors.append(_flatten_dense_tensors(small))
    dots = [*map(torch.dot, vectors, vectors)]
    return (dots[0] if len(dots) == 1 else torch.stack(dots).sum()).sqrt()


def _float16_message(optimizers: Sequence[Optimizer]) -> str:
    """Return the error message for float16 gradients: torch's sentence, the parameters, and what to do."""
    named = [
        name
        for optimizer in optimizers
        for name, param in zip(names_of(optimizer), params_of(optimizer), strict=True)
        if param.grad is not None and param.grad.dtype is torch.float16
    ]
    listed = "; ".join(named[:5]) + (f"; and {len(named) - 5} more" if len(named) > 5 else "")
    return (
        f"Attempting to unscale FP16 gradients. They belong to {listed}. Keep the parameters in float32 and run the "
        "forward pass under torch.autocast, or pass half_gradients=True to unscale them in float16."
    )
