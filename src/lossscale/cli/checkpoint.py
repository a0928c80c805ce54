"""The subcommand `lossscale checkpoint`: the scalers in a checkpoint file, as JSON."""

import zipfile
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from lossscale.cli._shared import FILE, example, print_json, say, warnings_as_lines
from lossscale.other_tools import state_from_tool, tools_of_checkpoint
from lossscale_core import ScalingPolicy, diagnose, load_policy, policy_from_dict, state_from_dict, state_to_dict
from lossscale_core.adapters import describe, join_names, read_torch_keys
from lossscale_core.errors import CheckpointError
from lossscale_core.files import open_file, read_data

_MAX_DEPTH = 3
"""The number of levels to search. Megatron-LM has its scaler below two keys; deeper levels are dicts of parameters."""
_MAX_DICTS = 1000
_MAX_PICKLE_BYTES = 2**22
"""The largest size of a pickle, which needs up to 70 times as much memory."""


@click.command("checkpoint", epilog=example("lossscale checkpoint last.pt"))
@click.argument("file", type=FILE)
@click.option("--from", "tool", metavar="TOOL", help="The tool that saved it; guessed from the names.")
@click.option("--policy", "policy_file", type=FILE, help="The policy that will continue with it.")
def command(file: Path, tool: str | None, policy_file: Path | None) -> None:
    """Print the saved scalers in FILE.

    The scalers of this library and of other tools are printed as JSON that `state_from_dict` reads. FILE is JSON, or
    torch.save wrote it. No class in it is imported. A single scaler is printed without its place in the file; several
    scalers are printed under their places.
    """
    content = _content(file)
    scalers = _scalers(content) or ({} if tool is None else {"": content})
    if not scalers:
        names = join_names(content) or "none"
        raise click.UsageError(f"{file}: no known scaler under the names {names}; pass its own part, and --from TOOL")
    policy = None if policy_file is None else load_policy(policy_file)
    states = {
        place: _state(f"{file}{place and f' at {describe(place)}'}", entries, tool, policy)
        for place, entries in scalers.items()
    }
    print_json(next(iter(states.values())) if len(states) == 1 else states)


def _state(place: str, entries: Mapping[str, Any], tool: str | None, policy: ScalingPolicy | None) -> dict[str, Any]:
    """Return the state as a dict, and print a sentence about it."""
    with warnings_as_lines():
        if tool is None and "version" in entries:  # other tools do not have this name in the dict of a scaler
            own = read_torch_keys(entries)
            others = entries if policy is None else own  # torch's keys contradict another policy
            policy = policy_from_dict(own["policy"]) if policy is None and "policy" in own else policy
            state = state_from_dict(own, policy)
            say(f"{place}: a state of this library{'' if policy is None else f'; {diagnose(policy, state)}'}")
            return {**others, **state_to_dict(state, policy)}
        names = [tool] if tool is not None else tools_of_checkpoint(entries)
        if len(names) != 1:
            which = f"{', '.join(names)} save" if names else "no known tool saves"
            raise click.UsageError(f"{place}: {which} these names: {join_names(entries) or 'none'}; pass --from TOOL")
        state = state_from_tool(names[0], entries, policy)
    say(f"{place}: the scaler of {names[0]}")
    return state_to_dict(state, policy)


def _scalers(content: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the dicts that look like a saved scaler, by their places: keys joined by dots. Searches breadth first."""
    scalers: dict[str, Mapping[str, Any]] = {}
    pending: deque[tuple[tuple[str, ...], Mapping[str, Any]]] = deque([((), content)])
    visited = {id(content)}  # the number of paths to shared dicts grows exponentially
    while pending:
        names, entries = pending.popleft()
        if {"version", "loss_scale"} <= entries.keys() or tools_of_checkpoint(entries):
            scalers[".".join(names)] = entries
            continue
        for name, value in entries.items() if len(names) < _MAX_DEPTH else ():
            if isinstance(value, Mapping) and id(value) not in visited and len(visited) <= _MAX_DICTS:
                visited.add(id(value))
                pending.append(((*names, str(name)), value))
    if len(visited) > _MAX_DICTS:
        say(f"only the first {_MAX_DICTS} dicts were searched; save the scaler by itself if it is elsewhere")
    return scalers


def _content(path: Path) -> Mapping[str, Any]:
    """Return the dict in a file. Objects of other classes are read as dicts of their attributes."""
    is_json = path.suffix.lower() == ".json"
    content = read_data(path, "state", CheckpointError) if is_json else _read_archive(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds {describe(content)}, but must hold a dict; pass another file")
    return content


def _read_archive(path: Path) -> Any:
    """Return the content of a file that `torch.save` wrote, without importing classes from other packages."""
    import torch
    from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

    with open_file(path, "archive", CheckpointError) as file:
        try:
            archive = zipfile.ZipFile(file)
            # torch.save does not compress. A compressed part may expand to any size, and so may a bytearray.
            is_stored = all(part.compress_type == zipfile.ZIP_STORED for part in archive.infolist())
            pickles = [part for part in archive.infolist() if part.filename.endswith(".pkl")]
            is_small = sum(part.file_size for part in pickles) <= _MAX_PICKLE_BYTES
            if not is_stored or not is_small or any(b"bytearray" in archive.read(part) for part in pickles):
                most = f"more than {_MAX_PICKLE_BYTES} bytes of pickles, compressed parts or bytearrays"
                raise ValueError(f"it has {most}; save the scaler by itself")
            file.seek(0)
            names = get_unsafe_globals_in_checkpoint(file)
            file.seek(0)
            with safe_globals([(type(name.rpartition(".")[2], (_Attributes,), {}), name) for name in names]):
                return torch.load(file, weights_only=True, map_location="cpu")
        except Exception as error:  # the parsers raise many types of errors for damaged files
            reason = str(error).partition("\n")[0]
            raise CheckpointError(
                f"{path} is damaged, or is neither .json nor a zip archive, as torch.save writes: {describe(reason)}; "
                "if you trust it, load and save it again with a newer PyTorch"
            ) from error


class _Attributes(dict[Any, Any]):
    """The attributes of an object, such as the scaler of DeepSpeed, in place of its class, which is not imported."""

    def __new__(cls, *_: Any, **__: Any) -> "_Attributes":
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        self.update(*(part for part in (state if isinstance(state, tuple) else (state,)) if isinstance(part, dict)))
