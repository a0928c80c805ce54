"""What objects hold: attributes, the parameters of optimizers, and digests of tensors."""

import gc
import hashlib
from collections.abc import Iterator
from typing import Any

import torch


class Same:
    """An object as a part of a key, which compares by identity."""

    def __init__(self, it: Any) -> None:
        self.it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.it is other.it

    def __hash__(self) -> int:
        return id(self.it)


def attributes_of(each: Any) -> dict[str, Any]:
    """Return the attributes of an object, without a call of its own code."""
    try:
        found: dict[str, Any] = object.__getattribute__(each, "__dict__")
    except (AttributeError, TypeError):  # it has slots, or is a module of C
        return {}
    return found if isinstance(found, dict) else {}


def all_optimizers() -> list[Any]:
    """Return the optimizers of the process that derive from torch's."""
    return [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]


def is_finite(param: torch.Tensor) -> bool:
    """Return whether the elements of a parameter that this rank holds are finite. Synchronises."""
    values = values_of(param)
    return values.is_meta or bool(torch.isfinite(values).all())


def params_of(optimizer: Any) -> Iterator[Any]:
    """Return an iterator over the parameters of an optimizer."""
    return (param for group in optimizer.param_groups for param in group["params"])


def values_of(tensor: Any) -> torch.Tensor:
    """Return the elements of a tensor that this rank holds: of a shard, or of a sparse tensor."""
    if torch.nn.parameter.is_lazy(tensor):
        return torch.empty(0, device="meta")
    local = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    return local.coalesce().values() if local.is_sparse else local


def digests(optimizers: list[Any]) -> dict[tuple[str, Same], bytes]:
    """Return a digest of each parameter and each tensor of its state. Copies them to the host one by one."""
    found: dict[tuple[str, Same], bytes] = {}
    for param in (param for each in optimizers for param in params_of(each)):
        found["", Same(param)] = digest(param)
    for each in optimizers:
        for param, state in getattr(each, "state", {}).items():
            for name, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    found[name, Same(param)] = digest(value)
    return found


def digest(tensor: Any) -> bytes:
    """Return a digest of a tensor's bits; empty if all are zero."""
    values = values_of(tensor)
    if values.is_meta:
        return b""
    content = values.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.blake2b(content, digest_size=16).digest() if any(content) else b""


def name_of(param: Any) -> str:
    """Return a parameter's longest name in a module of the process, which is that in its model."""
    modules = (each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module))
    names = [name for each in modules for name, other in each.named_parameters() if other is param]
    return max(names, key=len, default=f"a parameter of shape {tuple(param.shape)}")
