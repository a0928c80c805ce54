"""An optimizer's gradients as real, dense, local values that can be checked, multiplied and measured."""

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
"""The types of devices that have float64; MPS and Intel Arc have none."""

_WITHOUT_BFLOAT16 = ("cuda",)
"""The devices on which the kernel that checks has no bfloat16: https://github.com/pytorch/pytorch/issues/127176."""

Bucket = list[Tensor]

_JOIN_BELOW = 4096  # elements; calling `torch.dot` for fewer takes about as long as copying them does
_SMALL = 2.0**-40  # below it, squares that float32 flushes to zero may be a part of the norm
MAX_EXACT_ORDER = 6.0
"""The largest power to which float64 holds every float32."""


class Gradients:
    """The gradients of some optimizers, in buckets of one device and dtype each, for foreach kernels.

    The tensors in the buckets share memory with the gradients. A gradient that kernels cannot change in place (sparse
    with duplicates, partial sums over a device mesh) is first replaced in `.grad` by one that they can. `ValueError` is
    raised, with torch's message, for float16 unless `allow_half`.
    """

    __slots__ = ("_grads", "_values", "buckets")

    def __init__(self, optimizers: Sequence[Optimizer], allow_half: bool = True) -> None:
        self._grads = self._values = grads = _grads_of(optimizers)
        if grads and _is_one_bucket(grads):
            self.buckets = [grads]
        else:
            params = dict.fromkeys(param for each in optimizers for param in params_of(each) if param.grad is not None)
            self._grads = [_make_writable(param) for param in params]
            self._values = [values_of(grad) for grad in self._grads]
            self.buckets = to_buckets(self._values)
        for bucket in self.buckets:
            if bucket[0].dtype is torch.float16 and not allow_half:
                raise ValueError(_float16_message(optimizers))

    def check_and_multiply_(self, factor: Tensor, found_inf: Tensor, is_one: bool = False) -> dict[Any, Tensor]:
        """Multiply in place; return for each device 1.0 if a gradient was not finite, else 0.0.

        `found_inf` is the flag, 0.0, on the device of `factor`; other devices get copies. A factor that `is_one` writes
        nothing.
        """
        found: dict[Any, Tensor] = {}
        for bucket in self.buckets:
            device = bucket[0].device
            is_here = device == found_inf.device
            if device not in found:
                found[device] = found_inf if is_here else to_device(found_inf.clone(), device)
            check_and_multiply_(bucket, factor if is_here else to_device(factor, device), found[device], is_one)
        return found

    def norm_dtype(self, device: torch.device) -> torch.dtype:
        """Return the dtype of a norm on a device: float32, or float64 if a gradient has that and the device, too."""
        for bucket in self.buckets:
            if bucket[0].dtype is torch.float64 and device.type in FLOAT64_DEVICES:
                return torch.float64
        return torch.float32

    def norm(
        self,
        order: float,
        one: Tensor,
        groups: Sequence[Any] = (),
        norm_group: Any = None,
        read: Callable[[Tensor], float] | None = None,
        left_out: bool = False,
    ) -> tuple[Any, Any]:
        """Return the norm of all elements on all ranks, and whether all of them are finite.

        Both are tensors of shape `()`, of the norm in float64 if the device has it; or a number and a bool, by `read`.
        The norm is infinite if powers of finite elements leave the dtype. Each rank calls one all-reduce for each
        group, in which it has 0 for the gradients that it lacks.

        Args:
            order: The order of the norm, above 0.
            one: 1.0 in float32, on the device of the all-reduce and of the results.
            groups: The groups over which parameters are sharded or replicated, the same on all ranks of a group. A
                parameter is taken for a copy in each group that does not shard it.
            norm_group: One of `groups`, of which each rank holds other parameters.
            read: A function that waits for a tensor. It is called without groups, for a 2-norm in the dtype of the
                gradients, which is then only computed in float64 if it is not finite or tiny.
            left_out: Whether this rank has left out the last step. If some ranks of `groups` have, and others have not,
                the norm is -1, and not finite.
        """
        device = one.device
        if read is not None and order == 2.0 and not groups and self._values:
            value = read(self._two_norm(device))
            if _SMALL <= value < math.inf or math.isnan(value):  # a sum of finite squares is not NaN
                return value, not math.isnan(value)
        dtype = torch.float64 if device.type in FLOAT64_DEVICES else torch.float32
        norms, is_exact = self._norms(order, dtype, groups, norm_group)
        norms = [to_device(each.to(dtype), device) for each in norms] or [torch.zeros(1, dtype=dtype, device=device)]
        total = torch.linalg.vector_norm(norms[0] if len(norms) == 1 else torch.cat(norms), order)
        if is_exact:
            is_good = total < math.inf  # false for NaN, too, and one kernel where `isfinite` takes four
        else:
            found = self.check_and_multiply_(one, torch.zeros_like(one), is_one=True).values()
            is_good = functools.reduce(torch.maximum, [to_device(each, device) for each in found]) == 0.0
        if groups:
            is_largest = order == math.inf
            part = total if is_largest else total**order
            skips = torch.full_like(part, left_out)
            parts = [torch.where(is_good, part, 0.0), torch.where(is_good, 0.0, one).to(dtype), skips, 1.0 - skips]
            row = torch.stack(parts)
            operation = torch.distributed.ReduceOp.MAX if is_largest else torch.distributed.ReduceOp.SUM
            for group in groups:
                torch.distributed.all_reduce(row, op=operation, group=group)
            is_good = row[1] == 0.0
            total = torch.where(is_good, row[0] if is_largest else row[0] ** (1.0 / order), math.nan)
            is_same = row[2] * row[3] == 0.0
            return torch.where(is_same, total, -1.0), is_good & is_same
        return total, is_good

    def _norms(
        self, order: float, dtype: torch.dtype, groups: Sequence[Any], norm_group: Any
    ) -> tuple[list[Tensor], bool]:
        """Return the norms of tensors, a vector for each bucket, and if these show in `dtype` what is not finite.

        The norm of what has n copies on the ranks is divided, so that the n copies together count once.
        """
        by_count: dict[int, list[Tensor]] = {}
        counts: dict[Any, int] = {}
        norms: list[Tensor] = []
        is_exact = True
        grad: Any
        for grad, values in zip(self._grads, self._values, strict=True):
            if values.numel():  # an empty tensor has no infinity norm
                layout = (grad.device_mesh, grad.placements) if is_dtensor(grad) else None
                if layout not in counts:
                    counts[layout] = _count_copies(layout, [each for each in groups if each is not norm_group])
                if grad.is_complex() and order != 2.0:
                    values, is_exact = torch.view_as_complex(values).abs(), False
                by_count.setdefault(counts[layout], []).append(values)
        for count, some in by_count.items():
            for bucket in to_buckets(some):
                is_double, has_double = bucket[0].dtype is torch.float64, bucket[0].device.type in FLOAT64_DEVICES
                is_held = (has_double and dtype is torch.float64) or (order == math.inf and not is_double)
                is_exact &= is_held and (order == math.inf or (not is_double and order <= MAX_EXACT_ORDER))
                wide = torch.float64 if has_double else torch.float32
                found = torch.stack(torch._foreach_norm(bucket, order, dtype=wide))
                norms.append(found / count ** (1.0 / order) if count > 1 else found)
        return norms, is_exact

    def _two_norm(self, device: torch.device) -> Tensor:
        """Return the norm in the dtype of the gradients, at least float32; not finite if squares leave it."""
        norms = []
        for bucket in self.buckets:
            if bucket[0].dtype is torch.float32 and bucket[0].is_cpu:
                norm = _two_norm_by_dots(bucket)
            else:
                dtype = torch.float32 if bucket[0].dtype.itemsize < 4 else None  # a half norm is infinite from 65520 on
                norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(bucket, 2.0, dtype=dtype)))
            norm = norm.to(self.norm_dtype(device)) if norm.dtype is torch.float64 else norm
            norms.append(to_device(norm, device))
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))

    def multiply_(self, factor: float | Tensor) -> None:
        """Multiply finite gradients in place by a number, or by a tensor of shape `()`."""
        for bucket in self.buckets:
            is_double = bucket[0].dtype is torch.float64
            if isinstance(factor, Tensor):
                factor_there = factor if is_double else factor.float()
                torch._foreach_mul_(bucket, to_device(factor_there, bucket[0].device))
            elif is_double or (bucket[0].dtype is torch.bfloat16 and bucket[0].device.type in _WITHOUT_BFLOAT16):
                torch._foreach_mul_(bucket, factor)
            else:  # by the kernel that also checks, which takes a fifth of the time for small tensors
                flag = torch.zeros((), dtype=torch.float32, device=bucket[0].device)
                check_and_multiply_(bucket, torch.full_like(flag, factor), flag)


def check_and_multiply_(bucket: Bucket, factor: Tensor, found_inf: Tensor, is_one: bool = False) -> None:
    """Set `found_inf` to 1.0 if an element is not finite, and multiply in place unless the factor `is_one`."""
    if bucket[0].dtype is torch.bfloat16 and bucket[0].device.type in _WITHOUT_BFLOAT16:
        if some := [each for each in bucket if each.numel()]:  # an empty tensor has no infinity norm
            largest = torch.stack(torch._foreach_norm(some, math.inf)).amax()
            found_inf.copy_(torch.maximum(found_inf, (~torch.isfinite(largest)).float()))
        if not is_one:
            torch._foreach_mul_(bucket, factor)
    else:  # this kernel does not write by 1
        torch._amp_foreach_non_finite_check_and_unscale_(bucket, found_inf, factor)


def reduce_max(flags: Tensor, groups: Iterable[Any]) -> Tensor:
    """Return flags combined over the ranks of each group, in place; every rank of a group must call."""
    for group in groups:
        torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX, group=group)
    return flags


def params_of(optimizer: Optimizer) -> list[Any]:
    """Return an optimizer's parameters, in order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def names_of(optimizer: Optimizer) -> list[str]:
    """Return a name for each parameter: that with which the optimizer was made, or a place and a shape."""
    return [
        names[place] if place < len(names) else f"parameter {place} of group {number} (shape {tuple(param.shape)})"
        for number, group in enumerate(optimizer.param_groups)
        for names in [group.get("param_names") or []]  # shorter than the parameters if one was added later
        for place, param in enumerate(group["params"])
    ]


def has_gradients(optimizer: Optimizer) -> bool:
    """Return whether a parameter of an optimizer has a gradient."""
    return any(param.grad is not None for group in optimizer.param_groups for param in group["params"])


def values_of(grad: Tensor) -> Tensor:
    """Return the real, dense, local values of a gradient, for reading."""
    if is_dtensor(grad):
        grad = grad.to_local()  # type: ignore[attr-defined]
    if grad.is_sparse:
        grad = grad.coalesce().values()
    return torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad


def to_buckets(values: Iterable[Tensor]) -> list[Bucket]:
    """Return dense, real tensors in lists of one device and dtype each."""
    by_kind: dict[tuple[torch.device, torch.dtype], Bucket] = {}
    for each in values:
        by_kind.setdefault((each.device, each.dtype), []).append(each)
    return list(by_kind.values())


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return floats of less than four bytes in float32, others unchanged."""
    return tensor.float() if tensor.dtype.itemsize < 4 and tensor.is_floating_point() else tensor


def has_meshes() -> bool:
    """Return whether parameters may lie on a device mesh, which needs DTensor and several processes."""
    return "torch.distributed.tensor" in sys.modules and torch.distributed.is_initialized()


def is_dtensor(tensor: Any) -> bool:
    """Return whether `tensor` is a DTensor, without importing DTensor: the import is slow."""
    return type(tensor) is not Tensor and hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`, without waiting for the copy if that is safe.

    A copy to the host waits, since the memory of a non-blocking copy may be read before the device has written it.
    https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
    """
    return tensor if tensor.device == device else tensor.to(device, non_blocking=device.type != "cpu")


def _grads_of(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Return the gradients of optimizers' parameters, in order."""
    params: list[Any] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            params += group["params"]
    params = params if len(optimizers) == 1 else list(dict.fromkeys(params))  # several may share one
    return [grad for param in params if (grad := param.grad) is not None]


def _is_one_bucket(grads: list[Tensor]) -> bool:
    """Return whether all gradients are dense, real tensors of one device and dtype and no special type."""
    dtype, is_cpu, index = grads[0].dtype, grads[0].is_cpu, grads[0].get_device()
    if dtype.is_complex or dtype.itemsize < 2 or (index < 0 and not is_cpu):  # a device type without indices
        return False
    for grad in grads:  # a generator for `all` takes twice as long
        if (
            type(grad) is not Tensor
            or grad.dtype is not dtype
            or grad.layout is not torch.strided
            or not (grad.is_cpu if is_cpu else grad.get_device() == index)  # a CPU tensor has the index -1
        ):
            return False
    return True


def _make_writable(param: Tensor) -> Any:
    """Return a parameter's gradient with values that can be changed in place; replace `.grad` if necessary."""
    grad: Any = param.grad
    if is_dtensor(grad):
        if any(placement.is_partial() for placement in grad.placements):  # the sum of finite parts may be infinite
            from torch.distributed.tensor import Replicate

            placements = [Replicate() if each.is_partial() else each for each in grad.placements]
            param.grad = grad.redistribute(placements=placements)
    elif grad.is_conj():
        param.grad = grad.resolve_conj()
    elif grad.is_sparse and not grad.is_coalesced():
        param.grad = grad.coalesce()  # the gradient is finite if the sums of duplicates are
    elif grad.layout not in (torch.strided, torch.sparse_coo):
        raise TypeError(
            f"a gradient of shape {tuple(grad.shape)} has the layout {grad.layout}, which no kernel can check; "
            "keep its parameter dense, or in torch.sparse_coo"
        )
    return param.grad


def _count_copies(layout: Any, groups: list[Any]) -> int:
    """Return how often a sum over all groups counts a gradient with this layout, which is None without a mesh."""
    sharded = []
    if layout is not None:
        mesh, placements = layout
        sharded = [mesh.get_group(dim) for dim, each in enumerate(placements) if not each.is_replicate()]
    return math.prod(torch.distributed.get_world_size(group) for group in groups if group not in sharded)


def _two_norm_by_dots(bucket: Bucket) -> Tensor:
    """Return the 2-norm by dot products, which read at memory speed on a CPU; small tensors are joined for one."""
    flat: list[Tensor] = []
    small: list[Tensor] = []
    for values in bucket:
        if values.numel() < _JOIN_BELOW:
            small.append(values)
        else:
            flat.append(values.reshape(-1))
    if small:
        flat.append(_flatten_dense_tensors(small))
    dots = [*map(torch.dot, flat, flat)]
    return (dots[0] if len(dots) == 1 else torch.stack(dots).sum()).sqrt()


def _float16_message(optimizers: Sequence[Optimizer]) -> str:
    """Return the message for float16 gradients: torch's own sentence, the parameters, and what to do."""
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
