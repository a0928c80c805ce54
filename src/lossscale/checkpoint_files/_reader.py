"""The process that reads a file of `torch.save` within limits and prints the scaler in it as JSON.

Its arguments are the file and, possibly, the key of the scaler. It prints an object with `place` and `scaler`, or with
`error`; a signal ends it where the file takes too long.
"""

import contextlib
import gc
import itertools
import json
import signal
import sys
from pathlib import Path
from typing import Any

from lossscale.checkpoint_files._search import find_scaler
from lossscale.checkpoint_files._torch_files import UNREAD, too_large
from lossscale.checkpoint_files._unpickle import Tensor, TorchFile
from lossscale_core.adapters import escaped, open_regular, shown
from lossscale_core.errors import CheckpointError

_SECONDS = 1.0
_BYTES = 240 * 2**20
# Of the dict of a scaler, of dicts in it, and of those in these; a scaler of this library holds its policy.
_MOST_ITEMS = (1000, 50, 10)
_LONGEST = 1000  # characters of a text, and bits of an integer
_LONGEST_ANSWER = 2**22


def main() -> None:
    """Print the scaler in the file that the arguments of this process name, searched if they name no key."""
    gc.disable()  # this process ends soon, and a collection visits every object of a large file
    _limit()
    path = Path(sys.argv[1])
    try:
        text = json.dumps(_answer(path, *sys.argv[2:]))
        if len(text) > _LONGEST_ANSWER:
            raise too_large(path)
    except CheckpointError as error:
        text = json.dumps({"error": str(error)})
    except (MemoryError, RecursionError):
        text = json.dumps({"error": str(too_large(path))})
    sys.stdout.write(text)


def _limit() -> None:
    """Limit the memory and the processor time of this process, if the system supports it."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource  # absent on Windows

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + _BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if hasattr(signal, "setitimer"):
        # The signal ends the process at once, also within a hash or another call that returns to no Python code.
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
        signal.setitimer(signal.ITIMER_PROF, _SECONDS)


def _answer(path: Path, key: str | None = None) -> dict[str, Any]:
    with open_regular(path, CheckpointError) as file:
        try:
            torch_file = TorchFile(path, file)
            place, scaler = find_scaler(path, torch_file.content, key)
            return {"place": place, "scaler": _plain(torch_file, scaler)}
        except (CheckpointError, MemoryError, RecursionError):
            raise
        except Exception as error:  # a damaged pickle can raise anything
            raise CheckpointError(f"{path} is not what torch.save writes, or is damaged; save it again") from error


def _plain(file: TorchFile, value: Any, level: int = 0) -> Any:
    """Return a value in types of JSON, cut to what a scaler may have; the rest becomes `{UNREAD: text}`."""
    if isinstance(value, Tensor):
        number = file.number(value)
        return {UNREAD: f"Tensor of shape {value.shape}"} if number is None else number
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int) and value.bit_length() <= _LONGEST:
        return value
    if isinstance(value, str) and len(value) <= _LONGEST:
        return value
    if isinstance(value, dict) and level < len(_MOST_ITEMS) and (value or not level or type(value) is dict):
        items = itertools.islice(value.items(), _MOST_ITEMS[level])
        return {_name(name): _plain(file, each, level + 1) for name, each in items}
    if isinstance(value, list | tuple) and level < len(_MOST_ITEMS) and len(value) <= _MOST_ITEMS[-1]:
        return [_plain(file, each, level + 1) for each in value]
    return {UNREAD: _described(value)}


def _name(name: Any) -> str:
    return name if isinstance(name, str) and name.isprintable() and len(name) <= _LONGEST else shown(name)


def _described(value: Any) -> str:
    if isinstance(value, str | bytes | bytearray | int | complex):
        return shown(value)
    kind = value if isinstance(value, type) else type(value)
    return f"<{escaped(kind.__name__)}>"
