"""The search for the saved scaler in the content of a checkpoint."""

from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lossscale.dialects import possible_tools
from lossscale_core.adapters import shown, shown_names
from lossscale_core.errors import CheckpointError

# Megatron-LM has its scaler below two keys. Further down is a dict for each parameter, and a search takes long.
_DEEPEST = 3
_MOST_DICTS = 100_000
_LONGEST_NAME = 500


def find_scaler(path: Path, content: Any, key: str | None) -> tuple[str, Mapping[str, Any]]:
    """Return the path of keys to the saved scaler in the content of a file (`""` for the whole), and the scaler.

    `key` names the place of the scaler; without it, the only dict that looks like a scaler is returned, or else the
    content. Raises `CheckpointError` with the name of the file.
    """
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds {type(content).__name__}, but must hold a dict; pass another file")
    if key is not None:
        return key, _at(path, content, key)
    found = list(_scalers(path, content))
    if len(found) > 1:
        places = shown_names(where for where, _ in found)
        raise CheckpointError(f"{path} holds several scalers; pass --key with one of {places}")
    return found[0] if found else ("", content)


def _at(path: Path, content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the dict at a key, or at a path of keys joined by dots."""
    found: Any = content
    for name in [key] if key in content else key.split("."):
        if not isinstance(found, Mapping) or name not in found:
            known = f"; it has {shown_names(found)}" if isinstance(found, Mapping) else ""
            raise CheckpointError(f"{path} has no key {shown(key)}{known}")
        found = found[name]
    if not isinstance(found, Mapping):
        raise CheckpointError(
            f"{path} holds {type(found).__name__} at {shown(key)}, but must hold a dict; pass another --key"
        )
    return found


def _scalers(path: Path, content: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each dict that looks like a saved scaler, with its path of keys, breadth first.

    A dict that occurs several times is visited once: the number of paths to shared dicts grows exponentially.
    """
    pending: deque[tuple[tuple[Any, ...], Mapping[str, Any]]] = deque([((), content)])
    visited = {id(content)}
    while pending:
        names, found = pending.popleft()
        if _is_scaler(found):
            yield ".".join(map(_as_text, names)), found
            continue
        for name, value in found.items() if len(names) < _DEEPEST else ():
            if isinstance(value, Mapping) and id(value) not in visited:
                visited.add(id(value))
                pending.append(((*names, name), value))
        # The whole search is bounded, since a file may be made to take long.
        if len(visited) > _MOST_DICTS:
            raise CheckpointError(f"{path} holds too many dicts to search; pass --key with the place of the scaler")


def _as_text(name: Any) -> str:
    return name if isinstance(name, str) and len(name) <= _LONGEST_NAME else shown(name)


def _is_scaler(content: Mapping[str, Any]) -> bool:
    return ("version" in content and "loss_scale" in content) or bool(possible_tools(content))
