"""A reader of files from `torch.save`, which are pickles: another process with limits reads them and runs no code."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lossscale_core.adapters import open_regular
from lossscale_core.errors import CheckpointError

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
UNREAD = "\0unread"
"""The key of a value that JSON cannot hold; no name in a file is read as this key."""
_LONGEST_SECONDS = 30.0  # of the clock, for systems that do not limit the time of the processor


class _Unread:
    """A value of a file that is not a number, a text or a dict, such as a tensor with several elements."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def read_torch_file(path: Path, key: str | None) -> tuple[str, Mapping[str, Any]]:
    """Return the place of the scaler in a file and its dict, as `read_checkpoint` does.

    A file of a few bytes can keep an unpickler busy without end, in code that no exception can stop: a dict with a key
    that is a tuple, which holds another tuple twice, and so on. So it runs in another process, which can be ended.
    """
    open_regular(path, CheckpointError).close()
    # -P, and this process's own path at the end: a module in the present folder must not be imported instead of one of
    # Python's own.
    code = f"import sys; sys.path += {[*filter(None, sys.path)]!r}; from {__package__} import _reader; _reader.main()"
    command = [sys.executable, "-P", "-c", code, str(path), *([] if key is None else [key])]
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=_LONGEST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise too_large(path) from None
    if done.returncode < 0:  # a signal ended it
        raise too_large(path)
    if done.returncode:
        raise RuntimeError(f"the reader of {path} failed: {done.stderr.decode(errors='replace')}")
    answer = json.loads(done.stdout, object_hook=_with_unread)
    if "error" in answer:
        raise CheckpointError(answer["error"])
    return answer["place"], answer["scaler"]


def _with_unread(content: dict[str, Any]) -> Any:
    return _Unread(content[UNREAD]) if content.keys() == {UNREAD} else content


def too_large(path: Path) -> CheckpointError:
    """Return the error for a file that exceeds a limit."""
    return CheckpointError(
        f"{path} takes too much time or memory to read; save the scaler separately: "
        "torch.save(scaler.state_dict(), file)"
    )
