"""Other tools' files: configs in JSON or TOML, checkpoints in JSON or as `torch.save` wrote them."""

from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lossscale.cli._torch_files import SUFFIXES, read_pickle
from lossscale_core._files import LARGEST_DATA, read_data, suffix_of
from lossscale_core._words import shown, shown_names
from lossscale_core.dialects import possible_peers
from lossscale_core.errors import CheckpointError, PolicyError

_DEEPEST = 3
_MOST_DICTS = 100_000


def read_config(path: Path) -> Mapping[str, Any]:
    """Return the dict in a `.json` or `.toml` file. Raises `PolicyError` naming the file; `OSError`."""
    if suffix_of(path) not in (".json", ".toml"):
        raise PolicyError(f"{path} must be a config in JSON (.json) or TOML (.toml); other formats are not read")
    config = read_data(path, PolicyError)
    if not isinstance(config, Mapping):
        raise PolicyError(f"{path} holds {type(config).__name__} where a dict of keys belongs")
    return config


def read_checkpoint(path: Path, key: str | None = None) -> tuple[str, Mapping[str, Any]]:
    """Return the saved scaler in a checkpoint file, and the keys that lead to it (`""` at the top).

    The file is JSON, or what `torch.save` wrote, read with `weights_only=True`, and only by a torch whose
    `weights_only` has no known way around it. `key` says where the scaler is (`scaler`, `optimizer.grad_scaler`);
    without it the one dict is taken that looks like a scaler. Raises `CheckpointError` naming the file; `OSError`.
    """
    content = _load(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds {type(content).__name__} where a dict belongs")
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
        raise CheckpointError(f"{path} must be JSON (.json) or written by torch.save ({', '.join(SUFFIXES)})")
    return read_data(path, CheckpointError, LARGEST_DATA)


def _at(path: Path, content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the dict at a key, or at keys joined by dots."""
    here: Any = content
    for name in [key] if key in content else key.split("."):
        if not isinstance(here, Mapping) or name not in here:
            known = f"; it has {shown_names(here)}" if isinstance(here, Mapping) else ""
            raise CheckpointError(f"{path} has no key {shown(key)}{known}")
        here = here[name]
    if not isinstance(here, Mapping):
        raise CheckpointError(f"{path} holds {type(here).__name__} at {shown(key)}, where a dict belongs")
    return here


def _scalers(path: Path, content: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield what looks like a saved scaler, with the keys that lead to it, from the top down.

    A dict that is shared is one, whoever holds it: a file of shared dicts has more ways to them than anyone can walk.
    """
    waiting: deque[tuple[tuple[Any, ...], Mapping[str, Any]]] = deque([((), content)])
    met = {id(content)}
    while waiting:
        names, here = waiting.popleft()
        if _is_scaler(here):
            yield ".".join(map(_as_text, names)), here
            continue
        for name, value in here.items() if len(names) < _DEEPEST else ():
            if isinstance(value, Mapping) and id(value) not in met:
                met.add(id(value))
                waiting.append(((*names, name), value))
        if len(met) > _MOST_DICTS:
            raise CheckpointError(f"{path} holds too many dicts to search; pass --key with the place of the scaler")


def _as_text(name: Any) -> str:
    return name if isinstance(name, str) else shown(name)


def _is_scaler(content: Mapping[str, Any]) -> bool:
    return ("version" in content and "loss_scale" in content) or bool(possible_peers(content))
