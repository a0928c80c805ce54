"""Readers of other tools' files: configs in JSON or TOML, checkpoints in JSON or from `torch.save`."""

from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lossscale.cli._torch_files import SUFFIXES, read_pickle
from lossscale_core.dialects import possible_peers
from lossscale_core.errors import CheckpointError, PolicyError
from lossscale_core.files import LARGEST_PARSED, read_data, suffix_of
from lossscale_core.messages import shown, shown_names

# Megatron-LM has its scaler below two keys. Further down is a dict for each parameter, and a search takes long.
_DEEPEST = 3
_MOST_DICTS = 100_000


def read_config(path: Path) -> Mapping[str, Any]:
    """Return the dict in a `.json` or `.toml` file. Raises `PolicyError` naming the file; `OSError`."""
    if suffix_of(path) not in (".json", ".toml"):
        raise PolicyError(f"{path} must be a config in JSON (.json) or TOML (.toml); convert it to one of them")
    config = read_data(path, PolicyError)
    if not isinstance(config, Mapping):
        raise PolicyError(f"{path} holds {type(config).__name__}, but must hold a dict of keys; pass another file")
    return config


def read_checkpoint(path: Path, key: str | None = None) -> tuple[str, Mapping[str, Any]]:
    """Return the path of keys to the saved scaler in a checkpoint file (`""` for the whole file), and the scaler.

    The file is JSON, or was written by `torch.save`. `key` names the place of the scaler, such as `scaler` or
    `optimizer.grad_scaler`; without it, the only dict that looks like a scaler is returned. Raises `CheckpointError`
    with the name of the file, and `OSError`.
    """
    content = _load(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds {type(content).__name__}, but must hold a dict; pass another file")
    if key is not None:
        return key, _at(path, content, key)
    found = list(_scalers(path, content))
    if len(found) > 1:
        places = shown_names(where for where, _ in found)
        raise CheckpointError(f"{path} holds several scalers; pass --key with one of {places}")
    return found[0] if found else ("", content)


def _load(path: Path) -> Any:
    suffix = suffix_of(path)
    if suffix in SUFFIXES:
        return read_pickle(path)
    if suffix != ".json":
        raise CheckpointError(
            f"{path} must be JSON (.json) or written by torch.save ({', '.join(SUFFIXES)}); save it as one"
        )
    return read_data(path, CheckpointError, LARGEST_PARSED)


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
    return name if isinstance(name, str) else shown(name)


def _is_scaler(content: Mapping[str, Any]) -> bool:
    return ("version" in content and "loss_scale" in content) or bool(possible_peers(content))
