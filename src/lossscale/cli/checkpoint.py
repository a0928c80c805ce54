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

# Megatron-LM has its scaler below two keys. Further down is a dict for each parameter.
_DEEPEST = 3
_MOST_DICTS = 1000
_MOST_PICKLED = 2**22
"""The most bytes of a pickle, which takes up to 70 times its size of memory."""


@click.command("checkpoint", epilog=example("lossscale checkpoint last.pt"))
@click.argument("file", type=FILE)
@click.option("--from", "tool", metavar="TOOL", help="The tool that saved it; guessed from the names.")
@click.option("--policy", "policy_file", type=FILE, help="The policy that will continue with it.")
def command(file: Path, tool: str | None, policy_file: Path | None) -> None:
    """Print the saved scalers in FILE.

    They are scalers of this library or another tool, and are printed as the JSON that `state_from_dict` reads. FILE is
    JSON, or what torch.save wrote. No class in it is imported. One scaler is printed itself; several are printed under
    their places.
    """
    content = _content(file)
    found = _scalers(content) or ({} if tool is None else {"": content})
    if not found:
        names = join_names(content) or "none"
        raise click.UsageError(f"{file}: no known scaler under the names {names}; pass its own part, and --from TOOL")
    policy = None if policy_file is None else load_policy(policy_file)
    states = {
        place: _state(f"{file}{place and f' at {describe(place)}'}", found[place], tool, policy) for place in found
    }
    print_json(next(iter(states.values())) if len(states) == 1 else states)


def _state(place: str, saved: Mapping[str, Any], tool: str | None, policy: ScalingPolicy | None) -> dict[str, Any]:
    """Return the state as a dict, and print a sentence about it."""
    with warnings_as_lines():
        if tool is None and "version" in saved:  # which no other tool saves in the dict of its scaler
            own = read_torch_keys(saved)
            entries = saved if policy is None else own  # another policy contradicts torch's keys
            policy = policy_from_dict(own["policy"]) if policy is None and "policy" in own else policy
            state = state_from_dict(own, policy)
            say(f"{place}: a state of this library{'' if policy is None else f'; {diagnose(policy, state)}'}")
            return {**entries, **state_to_dict(state, policy)}
        names = [tool] if tool is not None else tools_of_checkpoint(saved)
        if len(names) != 1:
            which = f"{', '.join(names)} save" if names else "no known tool saves"
            raise click.UsageError(f"{place}: {which} these names: {join_names(saved) or 'none'}; pass --from TOOL")
        state = state_from_tool(names[0], saved, policy)
    say(f"{place}: the scaler of {names[0]}")
    return state_to_dict(state, policy)


def _scalers(content: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the dicts that look like a saved scaler, by their keys joined by dots, breadth first."""
    found: dict[str, Mapping[str, Any]] = {}
    pending: deque[tuple[tuple[str, ...], Mapping[str, Any]]] = deque([((), content)])
    visited = {id(content)}  # the number of paths to shared dicts grows exponentially
    while pending:
        names, saved = pending.popleft()
        if {"version", "loss_scale"} <= saved.keys() or tools_of_checkpoint(saved):
            found[".".join(names)] = saved
            continue
        for name, value in saved.items() if len(names) < _DEEPEST else ():
            if isinstance(value, Mapping) and id(value) not in visited and len(visited) <= _MOST_DICTS:
                visited.add(id(value))
                pending.append(((*names, str(name)), value))
    if len(visited) > _MOST_DICTS:
        say(f"only the first {_MOST_DICTS} dicts were searched; save the scaler by itself if it is elsewhere")
    return found


def _content(path: Path) -> Mapping[str, Any]:
    """Return the dict in a file. Objects of other classes in a file of `torch.save` are dicts of their attributes."""
    is_json = path.suffix.lower() == ".json"
    content = read_data(path, "state", CheckpointError) if is_json else _read_archive(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds {describe(content)}, but must hold a dict; pass another file")
    return content


def _read_archive(path: Path) -> Any:
    import torch
    from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

    with open_file(path, "archive", CheckpointError) as file:
        try:
            archive = zipfile.ZipFile(file)
            # What torch.save writes is stored as it is. A compressed part may be of any size, and so may a bytearray.
            is_stored = all(part.compress_type == zipfile.ZIP_STORED for part in archive.infolist())
            pickles = [part for part in archive.infolist() if part.filename.endswith(".pkl")]
            is_small = sum(part.file_size for part in pickles) <= _MOST_PICKLED
            if not is_stored or not is_small or any(b"bytearray" in archive.read(part) for part in pickles):
                most = f"more than {_MOST_PICKLED} bytes of pickles, compressed parts or bytearrays"
                raise ValueError(f"it has {most}; save the scaler by itself")
            file.seek(0)
            names = get_unsafe_globals_in_checkpoint(file)
            file.seek(0)
            with safe_globals([(type(name.rpartition(".")[2], (_Attributes,), {}), name) for name in names]):
                return torch.load(file, weights_only=True, map_location="cpu")
        except Exception as error:  # these parsers raise nearly anything for a file that was cut or written by hand
            reason = str(error).partition("\n")[0]
            raise CheckpointError(
                f"{path} is damaged, or is neither .json nor a zip archive, as torch.save writes: {describe(reason)}; "
                "if you trust it, load and save it again with a newer PyTorch"
            ) from error


class _Attributes(dict[Any, Any]):
    """The attributes of an object of a class that is not imported, such as the scaler of DeepSpeed."""

    def __new__(cls, *_: Any, **__: Any) -> "_Attributes":
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        self.update(*(part for part in (state if isinstance(state, tuple) else (state,)) if isinstance(part, dict)))
