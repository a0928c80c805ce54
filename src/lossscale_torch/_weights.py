"""A copy of an optimizer's parameters, state and settings, from which a step is undone."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lossscale_core.adapters import tree


class WeightsAndState:
    """An optimizer's parameters, state and settings before a step; the values are written back to the same tensors."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._entries = [(key, entry, _shallow(entry)) for key, entry in _state_of(optimizer).items()]
        self._groups = [(group, _shallow(_settings(group))) for group in optimizer.param_groups]
        params = [
            p for group in optimizer.param_groups for p in group["params"] if p.requires_grad or p.grad is not None
        ]
        values = [*params, *_state_of(optimizer).values(), *(settings for _, settings in self._groups)]
        self._copies = [(tensor, tensor.detach().clone()) for tensor in _tensors_in(values)]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore parameters, state and settings; state that was created since is removed."""
        for tensor, before in self._copies:
            tensor.copy_(before)
        state = _state_of(self._optimizer)
        state.clear()
        for key, entry, saved in self._entries:
            state[key] = _put_back(entry, saved)
        for group, settings in self._groups:
            params = group["params"]
            group.clear()
            group.update(params=params, **_shallow(settings))


def _state_of(optimizer: Any) -> Any:
    state = getattr(optimizer, "state", None)
    return state if isinstance(state, Mapping) else {}


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers; of a subclass, such as DTensor, those of which it is made."""
    if isinstance(value, Tensor):
        parts = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else ()
        yield from (_tensors_in([getattr(value, name) for name in parts]) if parts else (value,))
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(each)


def _shallow(value: Any) -> Any:
    """Return the same leaves in new containers."""
    return tree.map_leaves(lambda leaf: leaf, value)


def _put_back(entry: Any, saved: Any) -> Any:
    if not isinstance(entry, dict):
        return _shallow(saved)
    entry.clear()
    entry.update(_shallow(saved))
    return entry  # other code may hold this dict
