"""JSON and TOML files read, and any file written completely or not at all."""

import contextlib
import os
from typing import Any, TypeAlias

from lossscale_core.errors import LossScaleError

Path: TypeAlias = str | os.PathLike[str]


def write_whole(path: Path, content: str | bytes, *, overwrite: bool = False) -> None:
    """Write a file completely or not at all: write another file in the same folder, and rename it.

    Args:
        path: The path of the file. A symbolic link is replaced itself, and its target is not changed.
        content: The bytes of the file, or its text, which is encoded in UTF-8.
        overwrite: Whether to replace a file that exists.

    Raises:
        FileExistsError: The file exists, and `overwrite` is False.
        OSError: The file cannot be written. The error names `path`, and an existing file stays as it was.
    """
    target = os.fspath(path)
    if not overwrite and os.path.lexists(target):
        raise FileExistsError(17, os.strerror(17), target)
    temporary = f"{target}.{os.getpid()}"
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            # A rename may reach the disk before the content does, and then a crash would leave an empty file.
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise type(error)(error.errno, error.strerror, target) from error


def read_data(path: Path, error: type[LossScaleError]) -> Any:
    """Return the content of a `.toml` or `.json` file.

    Args:
        path: The path of the file.
        error: The type of error to raise for invalid content; the message names the file.

    Returns:
        Dicts, lists, text, numbers, bools and None, as the parser returns them.

    Raises:
        LossScaleError: The content is invalid, or the path is that of a folder; its type is `error`.
        OSError: The file cannot be read.
    """
    # Imported late: most processes read no file, and pay for every import.
    import json
    import tomllib

    suffix = suffix_of(path)
    if os.path.isdir(path):
        raise error(f"{os.fspath(path)} is a folder; pass a file in it")
    try:
        with open(path, encoding="utf-8-sig") as file:  # Windows editors write a byte order mark
            text = file.read()
        return tomllib.loads(text) if suffix == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as reason:
        raise error(f"{os.fspath(path)} is not valid {suffix[1:].upper()}: {reason}") from reason


def suffix_of(path: Path) -> str:
    """Return a path's suffix in lower case.

    Args:
        path: Any path.

    Returns:
        The suffix with its dot, such as ".json", or an empty text.
    """
    return os.path.splitext(path)[1].lower()
