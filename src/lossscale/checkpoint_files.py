"""A reader of saved scalers: files of `torch.save`, JSON, and NumPy's `.npz`; no class in a file is imported or run."""

import pickle
import zipfile
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lossscale.other_tools import tools_of_checkpoint
from lossscale_core.adapters import read_data, shown, shown_names, suffix_of
from lossscale_core.errors import CheckpointError

_OF_TORCH = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_LARGEST_JSON = 2**22
# Megatron-LM has its scaler below two keys. Further down is a dict for each parameter, and a search takes long.
_DEEPEST = 3
_MOST_DICTS = 100_000


def read_checkpoint(path: Path, key: str | None = None) -> tuple[str, Mapping[str, Any]]:
    """Return the place of the saved scaler in a checkpoint file, and the scaler.

    Args:
        path: A file of `torch.save`, which needs PyTorch, of `numpy.savez`, or in JSON.
        key: The place of the scaler, such as `scaler` or `optimizer.grad_scaler`. Without it, the only dict that looks
            like a scaler is returned, or else the whole content.

    Returns:
        The keys to the scaler, joined by dots (`""` for the whole file), and its dict. A pickled object of another
        class than torch's own is the dict of its attributes.

    Raises:
        CheckpointError: The file cannot be read, holds several scalers, or has no such key; the message names the file.
        OSError: The file cannot be opened.
    """
    content = _content(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds {type(content).__name__}, but must hold a dict; pass another file")
    if key is not None:
        return key, _at(path, content, key)
    found = list(_scalers(path, content))
    if len(found) > 1:
        places = shown_names(where for where, _ in found)
        raise CheckpointError(f"{path} holds several scalers; pass --key with one of {places}")
    return found[0] if found else ("", content)


def _content(path: Path) -> Any:
    suffix = suffix_of(path)
    path.stat()  # a file that is missing has no format
    if suffix == ".json":
        return read_data(path, CheckpointError, _LARGEST_JSON)
    if path.is_file() and suffix in _OF_TORCH:
        return _read_by_torch(path)
    if path.is_file() and suffix == ".npz":
        try:
            with np.load(path) as file:
                return dict(file)
        except (ValueError, EOFError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{path} is not a file of numpy.savez without objects: {error}") from error
    formats = f"JSON (.json), NumPy's .npz, or written by torch.save ({', '.join(_OF_TORCH)})"
    raise CheckpointError(f"{path} must be a file in {formats}; save it as one")


def _read_by_torch(path: Path) -> Any:
    """Return the content of a file of `torch.save`; objects of other classes are inert stand-ins."""
    if not zipfile.is_zipfile(path):
        raise CheckpointError(
            f"{path} is not a zip archive, as torch.save writes since PyTorch 1.6; if you trust it, load and save it "
            "again with a newer PyTorch"
        )
    try:
        import torch
        from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{path} was written by torch.save, and PyTorch is not installed; install it, or save the scaler's "
            "state_dict() as JSON"
        ) from error
    try:
        names = get_unsafe_globals_in_checkpoint(path)
        with safe_globals([(type(name.rpartition(".")[2], (_StandIn,), {}), name) for name in names]):
            return torch.load(path, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, ValueError, TypeError, KeyError, EOFError, AttributeError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} is damaged, or holds more than data: {reason}; save it again") from error


class _StandIn(dict[Any, Any]):
    """An object of a class that is not imported: the dict of its attributes."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __new__(cls, *_: Any, **__: Any) -> "_StandIn":
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.update(part)


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
    """Yield each dict that looks like a saved scaler, with its path of keys, breadth first."""
    pending: deque[tuple[tuple[Any, ...], Mapping[str, Any]]] = deque([((), content)])
    visited = {id(content)}  # the number of paths to shared dicts grows exponentially
    while pending:
        names, found = pending.popleft()
        if ("version" in found and "loss_scale" in found) or tools_of_checkpoint(found):
            yield ".".join(map(str, names)), found
            continue
        for name, value in found.items() if len(names) < _DEEPEST else ():
            if isinstance(value, Mapping) and id(value) not in visited:
                visited.add(id(value))
                pending.append(((*names, name), value))
        if len(visited) > _MOST_DICTS:
            raise CheckpointError(f"{path} holds too many dicts to search; pass --key with the place of the scaler")
