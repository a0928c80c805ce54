"""The five verbs on tensors: `init_state`, `scale`, `all_finite`, `unscale`, `select`."""

from typing import Any, TypeVar, cast, overload

import torch
from torch import Tensor

from lossscale_core import PolicyLike, ScaleState, as_policy
from lossscale_core.adapters import describe, loss_scale_of, require_flag, tree
from lossscale_torch._gradients import (
    at_least_float32,
    check_and_multiply_,
    reduce_max,
    to_buckets,
    to_device,
    values_of,
)
from lossscale_torch._record import combine

Tree = TypeVar("Tree")
"""A tensor, a number, or a nested structure of them, which is returned with the same structure."""


def init_state(policy: PolicyLike, *, device: torch.device | str | None = None) -> ScaleState[torch.Tensor]:
    """Return the state before the first step under a policy. Does not synchronise.

    Args:
        policy: Anything that `as_policy` accepts.
        device: The device of the state; by default, torch's default device.

    Returns:
        The policy's state, of tensors of shape `()`.
    """
    state = as_policy(policy).init_state()
    return state._make(torch.tensor(value, device=device) for value in state)


@overload
def scale(loss: float | Tensor, state: ScaleState) -> Tensor: ...
@overload
def scale(loss: Tree, state: ScaleState) -> Tree: ...
def scale(loss: Any, state: ScaleState) -> Any:
    """Return `loss` times the loss scale: call `.backward()` on the result. Differentiable; does not synchronise.

    float16, bfloat16 and float8 are converted to float32 first, because a scale of 2**16 is infinite in float16.

    Args:
        loss: A tensor of any shape and dtype, a Python number, or a nested structure of them.
        state: The scaling state.

    Raises:
        TypeError: A leaf of `loss` is not a number, or `state` is not a state.
    """
    loss_scale = loss_scale_of(state, "scale(loss, state)")
    return tree.map_leaves(lambda leaf: None if leaf is None else scaled(_as_tensor(leaf), loss_scale), loss)


def all_finite(grads: Any, *, process_group: Any = None) -> Tensor:
    """Return whether every gradient element is finite. Does not synchronise with the host.

    Args:
        grads: A nested structure of tensors, dense or sparse, real or complex, and Python numbers. `None`, integer and
            empty leaves do not count.
        process_group: The group of ranks over which the flag is combined; every rank of it must call this function.

    Returns:
        A bool tensor of shape `()`; True without gradients.
    """
    leaves = [_as_tensor(leaf) for leaf in tree.leaves(grads) if is_gradient(leaf, "all_finite(grads)")]
    device = leaves[0].device if leaves else torch.empty(()).device
    flags = []
    # The kernel can also write, so that it accepts neither float8 nor expanded tensors.
    readable = [at_least_float32(values) if values.dtype.itemsize < 2 else values for values in map(values_of, leaves)]
    for bucket in to_buckets(map(Tensor.contiguous, readable)):
        flags.append(torch.zeros((), dtype=torch.float32, device=bucket[0].device))
        check_and_multiply_(bucket, torch.ones_like(flags[-1]), flags[-1], is_one=True)
    overflow = combine(flags, device)
    return reduce_max(overflow, [process_group] if process_group is not None else []) == 0


def unscale(grads: Tree, state: ScaleState) -> Tree:
    """Return `grads` divided by the loss scale, as new tensors. Does not synchronise.

    Args:
        grads: A nested structure of tensors and Python numbers; `None` and integer leaves pass through.
        state: The scaling state.

    Returns:
        The same structure. float16, bfloat16 and float8 leaves become float32; others keep their dtype, and sparse
        leaves stay sparse.

    Raises:
        TypeError: A leaf of `grads` is neither a tensor nor a number, or `state` is not a state.
    """
    loss_scale = loss_scale_of(state, "unscale(grads, state)")

    def unscale_leaf(leaf: Any) -> Any:
        if not is_gradient(leaf, "unscale(grads, state)"):
            return leaf
        values = at_least_float32(_as_tensor(leaf))
        return values / _on_device_of(loss_scale, values)

    return cast(Tree, tree.map_leaves(unscale_leaf, grads))


def select(grads_finite: bool | Tensor, new: Tree, old: Tree) -> Tree:
    """Return `new` if `grads_finite`, else `old`: a step is applied completely or not at all.

    Args:
        grads_finite: A bool tensor of shape `()`, which causes no synchronisation; or a Python bool, which returns the
            leaves of one side unchanged.
        new: A nested structure of tensors and Python numbers.
        old: The same structure before the step.

    Raises:
        TypeError: `grads_finite` is not a bool of shape `()`.
        ValueError: The structures differ.
    """
    require_flag(grads_finite, "select(grads_finite, new, old)")
    if not isinstance(grads_finite, Tensor):
        return cast(Tree, tree.map_leaves(lambda a, b: a if grads_finite else b, new, old))

    def select_leaf(a: Any, b: Any) -> Tensor | None:
        if a is None:
            return None
        a, b = (leaf if isinstance(leaf, Tensor) else torch.tensor(leaf) for leaf in (a, b))
        return torch.where(to_device(grads_finite, a.device), a, b)

    return cast(Tree, tree.map_leaves(select_leaf, new, old))


def scaled(loss: Tensor, loss_scale: Any) -> Tensor:
    """Return one tensor times the loss scale, at least in float32."""
    values = at_least_float32(loss)
    return values * _on_device_of(loss_scale, values)


def is_gradient(leaf: Any, call: str) -> bool:
    """Return whether `leaf` is a tensor of floats; raise `TypeError` unless it is a tensor, a number or None."""
    if isinstance(leaf, Tensor):
        return leaf.is_floating_point() or leaf.is_complex()
    if leaf is None or isinstance(leaf, (int, float, complex)):
        return isinstance(leaf, (float, complex))
    raise TypeError(
        f"{describe(leaf)} is not a tensor; call {call} with tensors, numbers or None, in dicts, lists and tuples"
    )


def _as_tensor(leaf: Any) -> Tensor:
    """Return a tensor unchanged, and a number as a float32, complex64 or int64 tensor under any default dtype."""
    if isinstance(leaf, Tensor):
        return leaf
    dtype = torch.float32 if isinstance(leaf, float) else torch.complex64 if isinstance(leaf, complex) else None
    try:
        return torch.tensor(leaf, dtype=dtype)
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"{describe(leaf)} is not a number; pass the loss that the model computes, a tensor") from error


def _on_device_of(loss_scale: Any, tensor: Tensor) -> Any:
    """Return `loss_scale` in a form that can be combined with `tensor` in an expression."""
    return to_device(loss_scale, tensor.device) if isinstance(loss_scale, Tensor) else float(loss_scale)
