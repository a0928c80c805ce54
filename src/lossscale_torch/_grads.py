"""What only torch can do with gradients: find, check, unscale and measure them where they live."""

import sys
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lossscale_core import tree

_HALF = (torch.float16, torch.bfloat16)
_mesh_groups: "WeakKeyDictionary[Any, tuple[int, tuple[Any, ...]]]" = WeakKeyDictionary()


def scale(loss: Any, state: Any) -> Any:
    """Return `loss` times the loss scale: what to call `.backward()` on.

    `loss` is a tensor of any shape and dtype, or a nested structure of them. float16 and bfloat16 are lifted to float32
    first, since a scale of 2**16 is already infinite in float16. Differentiable; does not synchronise.
    """
    return tree.map_leaves(lambda leaf: None if leaf is None else scaled(leaf, state.loss_scale), loss)


def all_finite(grads: Any, *, process_group: Any = None) -> Tensor:
    """Return whether every gradient element is finite, as a bool tensor of shape `()`.

    `grads` is a nested structure of tensors, dense or sparse, real or complex. `None` and integer leaves do not count,
    and nothing at all is finite. With `process_group` the flag is combined over its ranks, all of which must call.
    Does not synchronise with the host.
    """
    local = [values for leaf in tree.leaves(grads) if is_gradient(leaf) for values in [values_of(leaf)]]
    device = local[0].device if local else None
    found = torch.zeros((), dtype=torch.float32, device=device)
    for bucket in buckets(local):
        found = torch.maximum(found, found_inf_in(bucket).to(found.device))
    if process_group is not None:
        reduce_max(found, [process_group])
    return found == 0


def unscale(grads: Any, state: Any) -> Any:
    """Return `grads` divided by the loss scale, as new tensors.

    `grads` is a nested structure of tensors. float16 and bfloat16 leaves come back in float32; others keep their dtype,
    and sparse ones stay sparse; `None` and integer leaves pass through. Does not synchronise.
    """

    def unscale_leaf(leaf: Any) -> Any:
        return _lifted(leaf) / _beside(state.loss_scale, leaf) if is_gradient(leaf) else leaf

    return tree.map_leaves(unscale_leaf, grads)


def select(grads_finite: Any, new: Any, old: Any) -> Any:
    """Return `new` where `grads_finite`, else `old`: a step is applied as a whole or not at all.

    `new` and `old` are nested structures alike. `grads_finite` is a bool tensor of shape `()`, and nothing
    synchronises; or a Python bool, which picks the leaves of one side untouched. Raises `ValueError` where the
    structures differ.
    """
    if isinstance(grads_finite, bool):
        return tree.map_leaves(lambda a, b: a if grads_finite else b, new, old)

    def select_leaf(a: Any, b: Any) -> Any:
        if a is None:
            return None
        a, b = (leaf if isinstance(leaf, Tensor) else torch.tensor(leaf) for leaf in (a, b))
        return torch.where(grads_finite.to(a.device), a, b)

    return tree.map_leaves(select_leaf, new, old)


def scaled(loss: Tensor, loss_scale: Any) -> Tensor:
    """Return one tensor times the loss scale, half ones in float32."""
    lifted = loss.float() if loss.dtype in _HALF else loss
    return lifted * _beside(loss_scale, lifted)


def is_gradient(leaf: Any) -> bool:
    """Return whether `leaf` is a tensor of floats; raise `TypeError` for what is neither tensor nor number nor None."""
    if isinstance(leaf, Tensor):
        return leaf.is_floating_point() or leaf.is_complex()
    if leaf is None or isinstance(leaf, (bool, int)):
        return False
    raise TypeError(f"{leaf!r} is no tensor; pass tensors, integers or None, in dicts, lists and tuples")


def grads_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the gradients of an optimizer's parameters, in order."""
    try:
        return [g for group in optimizer.param_groups for p in group["params"] if (g := p.grad) is not None]
    except AttributeError:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if not isinstance(param, Tensor):
                    raise AssertionError(f"expected param to be torch.Tensor, got {type(param).__name__}") from None
        raise


def coalesce_sparse(optimizer: torch.optim.Optimizer) -> None:
    """Sum the duplicates of sparse gradients in place: only their sum tells whether it is finite."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and param.grad.is_sparse and not param.grad.is_coalesced():
                param.grad = param.grad.coalesce()


def values_of(grad: Tensor) -> Tensor:
    """Return the real, dense, local values that a gradient stores; writing to them writes to the gradient."""
    if is_dtensor(grad):
        grad = grad.to_local()  # type: ignore[attr-defined]
    if grad.is_sparse:
        grad = grad.coalesce().values()
    return torch.view_as_real(grad) if grad.is_complex() else grad


def buckets_of(optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    """Return the values of an optimizer's gradients in lists of one device and dtype each, for foreach kernels."""
    grads = grads_of(optimizer)
    if not grads:
        return []
    if _are_one_bucket(grads):
        return [grads]
    coalesce_sparse(optimizer)
    return buckets([values_of(grad) for grad in grads_of(optimizer)])


def buckets(values: list[Tensor]) -> list[list[Tensor]]:
    """Return dense, real tensors in lists of one device and dtype each."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for each in values:
        by_kind.setdefault((each.device, each.dtype), []).append(each)
    return list(by_kind.values())


def _are_one_bucket(grads: list[Tensor]) -> bool:
    """Return whether all gradients are dense, real tensors of one device and dtype and no special type."""
    dtype, device, strided = grads[0].dtype, grads[0].get_device(), torch.strided
    for grad in grads:
        if type(grad) is not Tensor or grad.dtype is not dtype or grad.layout is not strided:
            return False
        if grad.get_device() != device:
            return False
    return not dtype.is_complex


def half_gradients_message(optimizer: torch.optim.Optimizer) -> str:
    """Say which parameters have float16 gradients, and the mend; torch's own sentence comes first."""
    named = []
    for g, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"parameter {i} of group {g}" for i in range(len(group["params"]))]
        named += [
            f"{name} ({param.dtype}, shape {tuple(param.shape)})"
            for name, param in zip(names, group["params"], strict=True)
            if param.grad is not None and param.grad.dtype is torch.float16
        ]
    listed = "; ".join(named[:5]) + (f"; and {len(named) - 5} more" if len(named) > 5 else "")
    return (
        f"Attempting to unscale FP16 gradients. They belong to {listed}. Keep the parameters in float32 and run the "
        "forward pass under torch.autocast, or pass half_gradients=True to unscale them in float16."
    )


def found_inf_in(bucket: list[Tensor], factor: Tensor | None = None) -> Tensor:
    """Return 1.0 if a tensor of the bucket holds NaN or infinity, else 0.0: float32, shape `()`, on their device.

    With `factor` it is what they hold after being multiplied by it that counts. The bucket is left alone.
    """
    if factor is not None:
        bucket = [each for each in bucket if each.numel()]
        if not bucket:
            return torch.zeros((), dtype=torch.float32, device=factor.device)
        return _not_finite(torch.stack(torch._foreach_norm(bucket, torch.inf)).amax() * factor)
    found = torch.zeros((), dtype=torch.float32, device=bucket[0].device)
    check_and_multiply_(bucket, found, torch.ones_like(found))
    return found


def check_and_multiply_(bucket: list[Tensor], found_inf: Tensor, factor: Tensor) -> None:
    """Set `found_inf` to 1.0 where an element is not finite, and multiply in place; a factor of 1 writes nothing."""
    if bucket[0].dtype is torch.bfloat16 and bucket[0].is_cuda:  # the kernel knows no bfloat16 there
        found_inf.copy_(
            torch.maximum(found_inf, _not_finite(torch.stack(torch._foreach_norm(bucket, torch.inf)).amax()))
        )
        torch._foreach_mul_(bucket, factor)
    else:
        torch._amp_foreach_non_finite_check_and_unscale_(bucket, found_inf, factor)


def zero_unwritten_momentum(new_states: list[dict[str, Any]], found_inf: Tensor) -> None:
    """Zero the momentum that a parameter's first step, if skipped, has left uninitialised; without waiting to know.

    torch's fused SGD allocates its momentum before its kernel decides to skip, and would use it as it is from then on.
    """
    for state in new_states:
        momentum = state.get("momentum_buffer")
        if momentum is not None:
            momentum.copy_(torch.where(moved(found_inf, momentum.device) == 0.0, momentum, 0.0))


def reduce_max(found_inf: Tensor, groups: Iterable[Any]) -> None:
    """Combine a flag over the ranks of each group, in place; every rank of a group must call."""
    for group in groups:
        torch.distributed.all_reduce(found_inf, op=torch.distributed.ReduceOp.MAX, group=group)


def is_dtensor(tensor: Any) -> bool:
    """Return whether `tensor` is a DTensor, without importing them where nobody has."""
    return type(tensor) is not Tensor and hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def mesh_groups(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """Return the process groups over which an optimizer's parameters are sharded, with gradients or without."""
    if "torch.distributed.tensor" not in sys.modules:
        return ()
    known = _mesh_groups.get(optimizer)
    if known is None or known[0] != len(optimizer.param_groups):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        meshes = dict.fromkeys(param.device_mesh for param in params if is_dtensor(param))
        groups = tuple(mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim))
        known = _mesh_groups[optimizer] = (len(optimizer.param_groups), groups)
    return known[1]


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`, without waiting for it."""
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


def _not_finite(value: Tensor) -> Tensor:
    return (~torch.isfinite(value)).float()


def _lifted(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


def _beside(loss_scale: Any, tensor: Tensor) -> Any:
    """Return `loss_scale` so that it can stand in an expression beside `tensor`."""
    if not isinstance(loss_scale, Tensor):
        return float(loss_scale)
    return loss_scale if loss_scale.get_device() == tensor.get_device() else moved(loss_scale, tensor.device)
