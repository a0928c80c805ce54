"""Functions that read JSON and TOML, make lines of CSV, and write a file completely or not at all."""

import contextlib
import math
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO, TypeAlias

from lossscale_core._messages import describe
from lossscale_core.errors import LossScaleError

__all__ = ["csv_lines", "open_file", "read_data", "write_whole"]

Path: TypeAlias = str | os.PathLike[str]
_LIMITS = {"policy": 2**16, "state": 2**22, "trace": 2**26, "archive": math.inf}
"""The largest number of bytes of each kind of file; an archive of `torch.save` may hold a whole model."""
_LONGEST_LINE = 1000


def write_whole(path: Path, content: str | bytes, *, overwrite: bool = False) -> None:
    """Write a file completely or not at all: write a temporary file in the same folder, and rename it.

    Args:
        path: The path of the file. A symbolic link is replaced, and its target is not changed.
        content: The bytes of the file, or its text, which is encoded in UTF-8.
        overwrite: Whether to replace a file that exists; its permissions stay.

    Raises:
        FileExistsError: The file exists, and `overwrite` is False.
        OSError: The file cannot be written. The error names `path`, and an existing file is not changed.
    """
    target = os.fspath(path)
    if not overwrite and os.path.lexists(target):
        raise FileExistsError(17, os.strerror(17), target)
    temporary = f"{target}.{os.getpid()}"
    try:
        with open(temporary, "wb") as file:
            if os.path.isfile(target) and not os.path.islink(target):
                os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))  # before the content, which may be private
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            # A rename may reach the disk before the content does, and then a crash would leave an empty file.
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise type(error)(error.errno, error.strerror, target) from error


def open_file(path: Path, kind: str, error: type[LossScaleError]) -> BinaryIO:
    """Open a regular file for reading. Does not wait for another process, as opening a FIFO may.

    Args:
        path: The path of the file, or of a link to it.
        kind: The kind of the content, which limits the size: "policy" (also another tool's config), "state" (in JSON),
            "trace" or "archive".
        error: The type of the `LossScaleError` that this function raises; the message names the file.

    Returns:
        The open file, in binary.

    Raises:
        LossScaleError: The path names a folder, a FIFO or a device, or the file is too large. Its type is `error`.
        OSError: The file cannot be opened.
    """
    name, limit = os.fspath(path), _LIMITS[kind]
    if os.path.isdir(path):
        raise error(f"{name} is a folder; pass a file in it")
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))  # noqa: SIM115
    status = os.fstat(file.fileno())  # of the open file, because another file may replace the path
    if stat.S_ISREG(status.st_mode) and status.st_size <= limit:
        return file
    file.close()
    if not stat.S_ISREG(status.st_mode):
        raise error(f"{name} is a FIFO or a device; pass a regular file")
    raise error(f"{name} has {status.st_size} bytes, but a {kind} may have {limit} at most; pass a smaller file")


def read_data(path: Path, kind: str, error: type[LossScaleError]) -> Any:
    """Return the content of a `.toml` or `.json` file.

    Args:
        path: The path of the file.
        kind: The kind of the content, as in `open_file`.
        error: The type of the error for invalid content; the message names the file.

    Returns:
        Dicts, lists, text, numbers, bools and None, as the parser returns them.

    Raises:
        LossScaleError: The content is invalid, or `open_file` rejects the path. Its type is `error`.
        OSError: The file cannot be read.
    """
    # Imported late, because most processes do not read files.
    import json
    import tomllib

    suffix = suffix_of(path)
    with open_file(path, kind, error) as file:
        content = file.read(int(_LIMITS[kind]))
    try:
        text = content.decode("utf-8-sig")  # Windows editors write a byte order mark
        if suffix == ".toml":
            # A key of n parts takes n**2 words of memory in tomllib: 40 kB of `a.a.a...` take 1.5 GB.
            if len(max(text.splitlines(), key=len, default="")) > _LONGEST_LINE:
                raise ValueError(f"a line has more than {_LONGEST_LINE} characters; break it, or write JSON")
            return tomllib.loads(text)
        return json.loads(text, object_pairs_hook=_reject_duplicates)
    except (ValueError, RecursionError) as reason:
        kind = "TOML" if suffix == ".toml" else "JSON"
        raise error(f"{os.fspath(path)} is not valid {kind}: {reason}") from reason


def csv_lines(rows: Iterable[Sequence[Any]], titles: Sequence[str] = ()) -> Iterator[str]:
    """Yield rows as lines of CSV. Synchronises with the host if cells are on a device.

    Args:
        rows: The cells of each row: numbers, arrays of shape `()`, bools, or None for an unknown value.
        titles: The cells of a first line; empty for no such line.

    Yields:
        The lines, with their ends.
    """
    if titles:
        yield ",".join(titles) + "\n"
    for row in rows:
        cells = (cell.item() if hasattr(cell, "item") else cell for cell in row)
        yield ",".join("" if cell is None else repr(cell) for cell in cells) + "\n"


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict of pairs. Raises `ValueError` for a repeated key, as the parser of TOML does."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {describe(next(key for key in content if keys.count(key) > 1))} is there twice")
    return content


def suffix_of(path: Path) -> str:
    """Return a path's suffix in lower case.

    Args:
        path: Any path.

    Returns:
        The suffix with its dot, such as ".json", or an empty text.
    """
    return os.path.splitext(path)[1].lower()
