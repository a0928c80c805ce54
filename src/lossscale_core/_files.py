"""The one reader and writer of files: what is read is bounded, and what is written is whole.

The parsers are imported where they are used, so that importing the core stays nearly as quick as importing NumPy.
"""

import contextlib
import os
import stat
from collections.abc import Callable
from typing import Any, TypeAlias

from lossscale_core._words import shown
from lossscale_core.errors import LossScaleError

Path: TypeAlias = str | os.PathLike[str]

LARGEST_CONFIG = 2**20
"""The most bytes that a policy or another tool's config may have."""
LARGEST_DATA = 2**26
"""The most bytes that a recorded run or a checkpoint in JSON may have."""


def write_whole(path: Path, content: str | bytes, *, overwrite: bool = False) -> None:
    """Write a file whole or not at all: it is written beside its place, brought to the disk, and moved there.

    What is at `path` is replaced where `overwrite` says so, and a `FileExistsError` otherwise. A link is itself what is
    at `path`: it is not followed. Any `OSError` names `path` and leaves what was there.
    """
    place = os.fspath(path)
    beside = os.path.join(os.path.dirname(place), f".lossscale-{os.urandom(8).hex()}.tmp")
    try:
        _write_durably(beside, content.encode("utf-8") if isinstance(content, str) else content)
        if overwrite:
            _keep_mode(place, beside)
            os.replace(beside, place)
        else:
            _move_to_new(beside, place)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, place) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)


def read_text(path: Path, error: type[LossScaleError], limit: int, *, errors: str = "strict") -> str:
    """Return the text in a file, without the mark with which Windows editors begin one.

    Raises `error` for more than `limit` bytes, `UnicodeDecodeError`, and `OSError` where the file cannot be read.
    """
    with open(path, "rb") as file:
        content = file.read(limit + 1)  # a device such as /dev/zero has a size of 0 and no end
    if len(content) > limit:
        raise error(f"{os.fspath(path)} holds more than {limit >> 20} MiB; pass a smaller file")
    return content.decode("utf-8-sig", errors=errors)


def read_data(path: Path, error: type[LossScaleError], limit: int = LARGEST_CONFIG, **json_options: Any) -> Any:
    """Return what a `.toml` or `.json` file holds. Raises `error` where it holds neither, and `OSError`."""
    suffix = suffix_of(path)
    try:
        return _PARSERS[suffix](read_text(path, error, limit), **(json_options if suffix == ".json" else {}))
    except (ValueError, RecursionError) as reason:  # what tomllib, json and utf-8 raise; `error` is one of them, too
        if isinstance(reason, LossScaleError):
            raise
        raise error(f"{os.fspath(path)} is not valid {suffix[1:].upper()}: {reason}") from reason


def suffix_of(path: Path) -> str:
    """Return a path's suffix in lower case."""
    return os.path.splitext(path)[1].lower()


def _parse_json(text: str, **options: Any) -> Any:
    import json

    return json.loads(text, object_pairs_hook=_without_duplicates, **options)


def _parse_toml(text: str) -> Any:
    import tomllib

    return tomllib.loads(text)


_PARSERS: dict[str, Callable[..., Any]] = {".toml": _parse_toml, ".json": _parse_json}


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict; of two values for one key nobody knows which is meant."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"the key {shown(twice)} occurs twice; delete one of the two")
    return found


def _write_durably(path: str, content: bytes) -> None:
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _keep_mode(place: str, beside: str) -> None:
    """Give the new file the permissions of the file that it replaces."""
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(place).st_mode
        if stat.S_ISREG(mode):
            os.chmod(beside, stat.S_IMODE(mode))


def _move_to_new(beside: str, place: str) -> None:
    """Give the file its name, unless that is taken: a link made by another process in between is seen, too."""
    try:
        os.link(beside, place)
    except FileExistsError:
        raise
    except OSError:  # some file systems, such as FAT, have no hard links: there the name is claimed first
        os.close(os.open(place, os.O_CREAT | os.O_EXCL))
        os.replace(beside, place)
