"""A reader of JSON and TOML files with a size limit, and a writer that writes a file completely or not at all."""

import contextlib
import os
import tempfile
from typing import Any, TypeAlias

from lossscale_core._messages import shown
from lossscale_core.errors import LossScaleError

Path: TypeAlias = str | os.PathLike[str]

_LARGEST = 2**20
"""The most bytes that a policy or another tool's config may have."""


def write_whole(path: Path, content: str | bytes, *, overwrite: bool = False) -> None:
    """Write a file completely or not at all: write a temporary file in the same folder, and rename it.

    Args:
        path: The path of the file. A symbolic link is replaced itself, and its target is not changed.
        content: The bytes of the file, or its text, which is encoded in UTF-8.
        overwrite: Whether to replace a file that exists, with its permissions.

    Raises:
        FileExistsError: The file exists, and `overwrite` is False.
        OSError: The file cannot be written. The error names `path`, and an existing file stays as it was.
    """
    target = os.fspath(path)
    temporary = None
    try:
        if not overwrite and os.path.lexists(target):
            raise FileExistsError(17, os.strerror(17), target)
        # In the same folder, because a rename works within one file system only.
        descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(target) or ".", prefix=".lossscale-")
        with open(descriptor, "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            # A rename may reach the disk before the content does, and then a crash would leave an empty file.
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, _mode(target))
        os.replace(temporary, target)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        raise type(error)(error.errno, error.strerror, target) from error


def _mode(target: str) -> int:
    """Return the permissions of the file that is replaced, or those of a new file."""
    if os.path.isfile(target) and not os.path.islink(target):
        return os.stat(target).st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def read_text(path: Path, error: type[LossScaleError], limit: int = _LARGEST, *, errors: str = "strict") -> str:
    """Return the text in a file, without the byte order mark that Windows editors write.

    Args:
        path: The path of a file in UTF-8.
        error: The type of error to raise for a file that is too large.
        limit: The most bytes that the file may have.
        errors: What to do with bytes that are not UTF-8, as in `bytes.decode`.

    Returns:
        The text.

    Raises:
        LossScaleError: The file has more than `limit` bytes, or is a folder; its type is `error`.
        UnicodeDecodeError: The file is not UTF-8, and `errors` is `"strict"`.
        OSError: The file cannot be read.
    """
    if os.path.isdir(path):
        raise error(f"{os.fspath(path)} is a folder; pass a file in it")
    with open(path, "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise error(f"{os.fspath(path)} holds more than {limit >> 20} MiB; pass a smaller file")
    return content.decode("utf-8-sig", errors=errors)


def read_data(path: Path, error: type[LossScaleError], limit: int = _LARGEST) -> Any:
    """Return the content of a `.toml` or `.json` file.

    Args:
        path: The path of the file.
        error: The type of error to raise for invalid content; the message names the file.
        limit: The most bytes that the file may have.

    Returns:
        Dicts, lists, text, numbers, bools and None, as the parser returns them.

    Raises:
        LossScaleError: The file is too large, its content is invalid, or a JSON object has a key twice; its type is
            `error`.
        OSError: The file cannot be read.
    """
    # Imported late: most processes read no file, and pay for every import.
    import json
    import tomllib

    suffix = suffix_of(path)
    try:
        text = read_text(path, error, limit)
        if suffix == ".toml":
            return tomllib.loads(text)
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as reason:
        if isinstance(reason, LossScaleError):  # which is a ValueError, too
            raise
        if isinstance(reason, UnicodeDecodeError):
            reason = ValueError(f"its byte {reason.start} is not UTF-8; pass a text file")
        raise error(f"{os.fspath(path)} is not valid {suffix[1:].upper()}: {reason}") from reason


def suffix_of(path: Path) -> str:
    """Return a path's suffix in lower case.

    Args:
        path: Any path.

    Returns:
        The suffix with its dot, such as ".json", or an empty text.
    """
    return os.path.splitext(path)[1].lower()


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raises `ValueError` for a key that occurs twice, which json itself accepts."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {shown(name)} occurs twice; delete one of the two")
        found[name] = value
    return found
