"""A reader of JSON and TOML files with a size limit, and a writer that writes a file whole or not at all."""

import contextlib
import os
import stat
from collections.abc import Callable
from typing import Any, TypeAlias

from lossscale_core.errors import LossScaleError
from lossscale_core.messages import shown

__all__ = ["LARGEST_CONFIG", "LARGEST_DATA", "read_data", "read_text", "suffix_of", "write_whole"]

Path: TypeAlias = str | os.PathLike[str]

LARGEST_CONFIG = 2**20
"""The most bytes that a policy or another tool's config may have."""
LARGEST_DATA = 2**26
"""The most bytes that a recorded run or a checkpoint in JSON may have."""


def write_whole(path: Path, content: str | bytes, *, overwrite: bool = False) -> None:
    """Write a file completely or not at all: write a temporary file in the same folder, flush it, and rename it.

    Args:
        path: The path of the file. A symbolic link is replaced itself, and its target is not changed.
        content: The bytes of the file, or its text, which is encoded in UTF-8.
        overwrite: Whether to replace a file that exists, with its permissions.

    Raises:
        FileExistsError: The file exists, and `overwrite` is False.
        OSError: The file cannot be written. The error names `path`, and an existing file stays as it was.
    """
    target = os.fspath(path)
    # In the same folder, because a rename works within one file system only.
    temporary = os.path.join(os.path.dirname(target), f".lossscale-{os.urandom(8).hex()}.tmp")
    try:
        _write_durably(temporary, content.encode("utf-8") if isinstance(content, str) else content)
        if overwrite:
            _copy_mode(target, temporary)
            os.replace(temporary, target)
        else:
            _rename_to_new(temporary, target)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, target) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def read_text(path: Path, error: type[LossScaleError], limit: int, *, errors: str = "strict") -> str:
    """Return the text in a file, without the byte order mark that Windows editors write.

    Args:
        path: The path of a file in UTF-8.
        error: The type of error to raise for a file that is too large.
        limit: The most bytes that the file may have.
        errors: What to do with bytes that are not UTF-8, as in `bytes.decode`.

    Returns:
        The text.

    Raises:
        LossScaleError: The file has more than `limit` bytes; its type is `error`.
        UnicodeDecodeError: The file is not UTF-8, and `errors` is `"strict"`.
        OSError: The file cannot be read.
    """
    with open(path, "rb") as file:
        content = file.read(limit + 1)  # a device such as /dev/zero has a size of 0 and no end
    if len(content) > limit:
        raise error(f"{os.fspath(path)} holds more than {limit >> 20} MiB; pass a smaller file")
    return content.decode("utf-8-sig", errors=errors)


def read_data(path: Path, error: type[LossScaleError], limit: int = LARGEST_CONFIG, **json_options: Any) -> Any:
    """Return the content of a `.toml` or `.json` file.

    Args:
        path: The path of the file.
        error: The type of error to raise for invalid content; the message names the file.
        limit: The most bytes that the file may have.
        **json_options: Further arguments of `json.loads`.

    Returns:
        Dicts, lists, text, numbers, bools and None, as the parser returns them.

    Raises:
        LossScaleError: The file is too large, its content is invalid, or a JSON object has a key twice; its type is
            `error`.
        OSError: The file cannot be read.
    """
    suffix = suffix_of(path)
    try:
        return _PARSERS[suffix](read_text(path, error, limit), **(json_options if suffix == ".json" else {}))
    except (ValueError, RecursionError) as reason:
        # The parsers and the UTF-8 decoder raise a ValueError, and `error` is one, too. For deep nesting json raises a
        # RecursionError.
        if isinstance(reason, LossScaleError):
            raise
        raise error(f"{os.fspath(path)} is not valid {suffix[1:].upper()}: {reason}") from reason


def suffix_of(path: Path) -> str:
    """Return a path's suffix in lower case.

    Args:
        path: Any path.

    Returns:
        The suffix with its dot, such as ".json", or an empty text.
    """
    return os.path.splitext(path)[1].lower()


def _parse_json(text: str, **options: Any) -> Any:
    import json  # imported late, as tomllib below: most processes read no file, and pay for every import

    return json.loads(text, object_pairs_hook=_without_duplicates, **options)


def _parse_toml(text: str) -> Any:
    import tomllib

    return tomllib.loads(text)


_PARSERS: dict[str, Callable[..., Any]] = {".toml": _parse_toml, ".json": _parse_json}


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raises `ValueError` for a key that occurs twice, which json itself accepts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"the key {shown(twice)} occurs twice; delete one of the two")
    return found


def _write_durably(path: str, content: bytes) -> None:
    with open(path, "xb") as file:
        file.write(content)
        # A rename may reach the disk before the content does, and then a crash would leave an empty file.
        file.flush()
        os.fsync(file.fileno())


def _copy_mode(target: str, temporary: str) -> None:
    """Give the new file the permissions of the file that it replaces."""
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(target).st_mode
        if stat.S_ISREG(mode):
            os.chmod(temporary, stat.S_IMODE(mode))


def _rename_to_new(temporary: str, target: str) -> None:
    """Rename the temporary file unless the target exists, without a moment in which another process could create it."""
    # os.rename replaces an existing file on POSIX; os.link does not: https://docs.python.org/3/library/os.html#os.link
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError:  # FAT and some other file systems have no hard links: create the target first, then replace it
        os.close(os.open(target, os.O_CREAT | os.O_EXCL))
        os.replace(temporary, target)
