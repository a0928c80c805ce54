"""Other tools' files: configs in JSON or TOML, checkpoints in JSON or as `torch.save` wrote them."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lossscale_core.dialects import possible_peers
from lossscale_core.errors import CheckpointError, PolicyError

_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_DEEPEST = 3


def read_config(path: Path) -> Mapping[str, Any]:
    """Return the dict in a `.json` or `.toml` file. Raises `PolicyError` naming the file; `OSError`."""
    if path.suffix.lower() not in (".json", ".toml"):
        raise PolicyError(f"{path} must be a config in JSON (.json) or TOML (.toml); other formats are not read")
    parse = tomllib.loads if path.suffix.lower() == ".toml" else json.loads
    try:
        config = parse(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"{path} is not valid {'TOML' if parse is tomllib.loads else 'JSON'}: {error}") from error
    if not isinstance(config, Mapping):
        raise PolicyError(f"{path} holds {type(config).__name__} where a dict of keys belongs")
    return config


def read_checkpoint(path: Path, key: str | None = None) -> tuple[str, Mapping[str, Any]]:
    """Return the saved scaler in a checkpoint file, and the keys that lead to it (`""` at the top).

    The file is JSON, or what `torch.save` wrote, read with `weights_only=True` so that nothing in it is run. `key`
    says where the scaler is (`scaler`, `optimizer.grad_scaler`); without it the one dict is taken that looks like a
    scaler. Raises `CheckpointError` naming the file; `OSError`.
    """
    content = _load(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds {type(content).__name__} where a dict belongs")
    if key is not None:
        return key, _at(path, content, key)
    found = dict(_scalers("", content, _DEEPEST))
    if len(found) > 1 and "" not in found:
        raise CheckpointError(f"{path} holds several scalers; pass --key with one of {', '.join(found)}")
    where = "" if not found else next(iter(found))
    return where, found.get(where, content)


def _load(path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix in _PICKLES:
        return _load_pickle(path)
    if suffix != ".json":
        raise CheckpointError(f"{path} must be JSON (.json) or written by torch.save ({', '.join(_PICKLES)})")
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error


def _load_pickle(path: Path) -> Any:
    try:
        import torch  # here, since only these files need it
    except ImportError:
        raise CheckpointError(
            f"reading {path} needs torch, which is not installed; run: pip install 'lossscale[torch]'"
        ) from None
    with path.open("rb") as file:
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever a file that is none, or is damaged, makes of its reader
            raise CheckpointError(f"{path} {_unreadable(error)}") from error


def _unreadable(error: Exception) -> str:
    if "unsupported global" in str(error).lower() or "unsupported class" in str(error).lower():
        return (
            "holds objects that cannot be read without running what is in it; save the scaler's part by itself: "
            "torch.save(scaler.state_dict(), file), or json.dump(vars(scaler), file, default=str)"
        )
    return "is not what torch.save writes, or is damaged; save it again"


def _at(path: Path, content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the dict at a key, or at keys joined by dots."""
    here: Any = content
    for name in [key] if key in content else key.split("."):
        if not isinstance(here, Mapping) or name not in here:
            known = f"; it has {', '.join(map(str, here))}" if isinstance(here, Mapping) else ""
            raise CheckpointError(f"{path} has no key {key!r}{known}")
        here = here[name]
    if not isinstance(here, Mapping):
        raise CheckpointError(f"{path} holds {type(here).__name__} at {key!r}, where a dict belongs")
    return here


def _scalers(where: str, content: Mapping[str, Any], depth: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield what looks like a saved scaler, with the keys that lead to it, from the top down."""
    if _is_scaler(content):
        yield where, content
        return
    for name, value in content.items() if depth else ():
        if isinstance(value, Mapping):
            yield from _scalers(f"{where}.{name}".lstrip("."), value, depth - 1)


def _is_scaler(content: Mapping[str, Any]) -> bool:
    return ("version" in content and "loss_scale" in content) or bool(possible_peers(content))
