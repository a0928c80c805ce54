"""An optimizer's gradients as real, dense, local values that can be checked, unscaled and multiplied."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

Bucket = list[Tensor]


class Gradients:
    """The gradients of some optimizers, in buckets of one device and dtype each, for foreach kernels.

    The tensors in the buckets share memory with the gradients. A gradient that kernels cannot change in place (sparse
    with duplicates, partial sums over a device mesh) is first replaced in `.grad` by one that they can. `ValueError` is
    raised, with torch's message, for float16 unless `allow_half`.
    """

    __slots__ = ("are_complex", "buckets")

    def __init__(self, optimizers: list[Any], allow_half: bool = True) -> None:
        grads = grads_of(*optimizers)
        self.are_complex = False
        if not grads:
            self.buckets: list[Bucket] = []
        elif _are_one_bucket(grads):
            self.buckets = [grads]
        else:
            self.are_complex = any(grad.is_complex() for grad in grads)
            self.buckets = buckets(_writable_values(param) for each in optimizers for param in params_of(each))
        for bucket in self.buckets:
            if bucket[0].dtype is torch.float16 and not allow_half:
                raise ValueError(half_gradients_message(optimizers))

    @classmethod
    def of_params(cls, params: Iterable[Tensor]) -> "Gradients":
        """Return the gradients of some parameters."""
        gradients = cls([])
        gradients.buckets = buckets(map(_writable_values, params))
        gradients.are_complex = any(param.grad is not None and param.grad.is_complex() for param in params)
        return gradients

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of the gradients; a complex one counts as the dtype of its parts."""
        return {bucket[0].dtype for bucket in self.buckets}

    def found_inf(self) -> dict[torch.device, Tensor]:
        """Return for each device 1.0 if a gradient holds NaN or infinity, else 0.0; do not change the gradients."""
        found: dict[torch.device, Tensor] = {}
        for bucket in self.buckets:
            device = bucket[0].device
            flag = found_inf_in(bucket)
            found[device] = torch.maximum(found[device], flag) if device in found else flag
        return found

    def unscale_(self, inverse: Tensor, found_inf: Tensor) -> dict[torch.device, Tensor]:
        """Multiply by `inverse` in place; return for each device 1.0 if a gradient was not finite before.

        `found_inf` is the flag, 0.0, on the device of `inverse`; other devices get copies of both.
        """
        found: dict[torch.device, Tensor] = {}
        here = found_inf.device
        for bucket in self.buckets:
            device = bucket[0].device
            is_here = device == here
            if device not in found:
                found[device] = found_inf if is_here else moved(found_inf.clone(), device)
            check_and_multiply_(bucket, found[device], inverse if is_here else moved(inverse, device))
        return found

    @torch.no_grad()
    def multiply_(self, factor: float | Tensor) -> None:
        """Multiply finite gradients in place by one number, or by a tensor of shape `()`."""
        for bucket in self.buckets:
            if isinstance(factor, Tensor):
                multiply_(bucket, moved(factor, bucket[0].device))
            elif bucket[0].dtype is torch.float64:
                multiply_(bucket, factor)
            else:  # by the kernel that also checks, which takes a fifth of the time for small tensors
                flag = torch.zeros((), dtype=torch.float32, device=bucket[0].device)
                check_and_multiply_(bucket, flag, torch.full_like(flag, factor))


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return an optimizer's parameters, in order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def grads_of(*optimizers: torch.optim.Optimizer) -> list[Tensor]:
    """Return the gradients of optimizers' parameters, in order; raise torch's `AssertionError` for another type."""
    try:
        return [
            g
            for each in optimizers
            for group in each.param_groups
            for p in group["params"]
            if (g := p.grad) is not None
        ]
    except AttributeError:
        for param in (param for optimizer in optimizers for param in params_of(optimizer)):
            if not isinstance(param, Tensor):
                raise AssertionError(f"expected param to be torch.Tensor, got {type(param).__name__}") from None
        raise


def values_of(grad: Tensor) -> Tensor:
    """Return the real, dense, local values of a gradient, for reading."""
    if is_dtensor(grad):
        grad = grad.to_local()  # type: ignore[attr-defined]
    if grad.is_sparse:
        grad = grad.coalesce().values()
    return torch.view_as_real(grad) if grad.is_complex() else grad


def buckets(values: Iterable[Tensor | None]) -> list[Bucket]:
    """Return dense, real tensors in lists of one device and dtype each."""
    by_kind: dict[tuple[torch.device, torch.dtype], Bucket] = {}
    for each in values:
        if each is not None:
            by_kind.setdefault((each.device, each.dtype), []).append(each)
    return list(by_kind.values())


def found_inf_in(bucket: Bucket) -> Tensor:
    """Return 1.0 if a tensor of the bucket holds NaN or infinity, else 0.0: float32, shape `()`, on their device.

    The bucket is not changed.
    """
    found = torch.zeros((), dtype=torch.float32, device=bucket[0].device)
    check_and_multiply_(bucket, found, torch.ones_like(found))
    return found


def check_and_multiply_(bucket: Bucket, found_inf: Tensor, factor: Tensor) -> None:
    """Set `found_inf` to 1.0 if an element is not finite, and multiply in place; a factor of 1 writes nothing."""
    if bucket[0].dtype is torch.bfloat16 and bucket[0].is_cuda:
        # the kernel does not support bfloat16 on CUDA: https://github.com/pytorch/pytorch/issues/127176
        if some := [each for each in bucket if each.numel()]:  # an empty tensor has no infinity norm
            found_inf.copy_(
                torch.maximum(found_inf, _not_finite(torch.stack(torch._foreach_norm(some, torch.inf)).amax()))
            )
        multiply_(bucket, factor)
        return
    torch._amp_foreach_non_finite_check_and_unscale_(bucket, found_inf, factor)


def half_gradients_message(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """Return the message for float16 gradients: torch's own sentence, the parameters, and what to do."""
    named = []
    for g, group in enumerate(group for optimizer in optimizers for group in optimizer.param_groups):
        named += [
            parameter_name(group, g, i)
            for i, param in enumerate(group["params"])
            if param.grad is not None and param.grad.dtype is torch.float16
        ]
    listed = "; ".join(named[:5]) + (f"; and {len(named) - 5} more" if len(named) > 5 else "")
    return (
        f"Attempting to unscale FP16 gradients. They belong to {listed}. Keep the parameters in float32 and run the "
        "forward pass under torch.autocast, or pass half_gradients=True to unscale them in float16."
    )


def parameter_name(group: dict[str, Any], g: int, i: int) -> str:
    """Return the name of the parameter with index `i` in a group, which has index `g`, and its dtype and shape."""
    names = group.get("param_names") or []  # shorter than the list of parameters if one was added later
    param = group["params"][i]
    name = names[i] if i < len(names) else f"parameter {i} of group {g}"
    return f"{name} ({param.dtype}, shape {tuple(param.shape)})"


def lifted(tensor: Tensor) -> Tensor:
    """Return floats of less than four bytes in float32, others unchanged."""
    is_small = tensor.dtype.itemsize < 4 and tensor.is_floating_point()
    return tensor.float() if is_small else tensor


def is_dtensor(tensor: Any) -> bool:
    """Return whether `tensor` is a DTensor, without importing DTensor: the import is slow."""
    return type(tensor) is not Tensor and hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`, without waiting for the copy if that is safe.

    A copy to the host waits, since the memory of a non-blocking copy may be read before the device has written it.
    https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
    """
    return tensor if tensor.device == device else tensor.to(device, non_blocking=device.type != "cpu")


def _writable_values(param: Tensor) -> Tensor | None:
    """Return the values of a parameter's gradient, in its own memory; replace `.grad` if necessary."""
    if param.grad is None:
        return None
    if is_dtensor(param.grad):
        param.grad = _without_partial_sums(param.grad)
    elif param.grad.is_sparse and not param.grad.is_coalesced():
        param.grad = param.grad.coalesce()  # the gradient is finite if the sums of duplicates are
    return values_of(param.grad)


def multiply_(bucket: Bucket, factor: float | Tensor) -> None:
    """Multiply in place by one number, or by a tensor of shape `()` on the same device."""
    torch._foreach_mul_(bucket, factor)


def _without_partial_sums(grad: Any) -> Any:
    """Return a DTensor without partial sums, since each partial sum may be finite and the total infinite."""
    if not any(placement.is_partial() for placement in grad.placements):
        return grad
    from torch.distributed.tensor import Replicate

    return grad.redistribute(placements=[Replicate() if each.is_partial() else each for each in grad.placements])


def _are_one_bucket(grads: list[Tensor]) -> bool:
    """Return whether all gradients are dense, real tensors of one device and dtype and no special type."""
    dtype, is_cpu, index = grads[0].dtype, grads[0].is_cpu, grads[0].get_device()
    if dtype.is_complex or dtype.itemsize < 2 or (index < 0 and not is_cpu):  # a device type without indices
        return False
    try:
        for grad in grads:
            if (
                type(grad) is not Tensor
                or grad.dtype is not dtype
                or not (grad.is_cpu if is_cpu else grad.get_device() == index)  # a CPU tensor has the index -1
                or not grad.is_contiguous()  # a sparse or an expanded tensor is not, either
            ):
                return False
    except RuntimeError:  # some sparse layouts do not support this check
        return False
    return True


def _not_finite(value: Tensor) -> Tensor:
    return (~torch.isfinite(value)).float()
