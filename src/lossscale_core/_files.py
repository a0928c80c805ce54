"""A reader of JSON and TOML files with a size limit, and a writer that writes a file completely or not at all."""

import contextlib
import os
import re
import stat
from typing import Any, BinaryIO, TypeAlias

from lossscale_core._messages import shown
from lossscale_core.errors import LossScaleError

try:
    import fcntl as _fcntl
except ImportError:  # of Windows
    _fcntl = None  # type: ignore[assignment]

__all__ = [
    "LARGEST_CONFIG",
    "LARGEST_PARSED",
    "TOML_END",
    "TOML_START",
    "open_regular",
    "read_data",
    "read_text",
    "suffix_of",
    "write_whole",
]

Path: TypeAlias = str | os.PathLike[str]

_locks: Any = _fcntl

LARGEST_CONFIG = 2**20
"""The most bytes that a policy or another tool's config may have."""
_LARGEST_TOML = 2**16
"""The most bytes that a TOML file may have: its parser takes long for many keys."""
LARGEST_PARSED = 2**22
"""The most bytes of a checkpoint in JSON, or of a recorded run in JSON or text. JSON takes 25 times that in memory."""
TOML_START = "# written by lossscale; without its last line this file is incomplete\n"
"""The first line of a TOML file that this library writes."""
TOML_END = "\n# end\n"
"""The last line of such a file; without it, a part of the file might be valid, too."""
_DEEPEST_TOML = 16
_TEMPORARY = re.compile(r"\.lossscale-[0-9a-f]{16}\.tmp")
_PIPES = ("/dev/stdin", "/dev/fd/")
# Tokens of TOML: texts of several lines, comments, and keys or values, which are words joined by dots. All are
# possessive, and what is not closed ends with its line or the file, so that the time grows with the length of the text.
_WORD = r"""(?:[\w-]++|"(?:[^"\\\n]|\\[^\n])*+\\?(?:"|(?=\n)|\Z)|'[^'\n]*+(?:'|(?=\n)|\Z))"""
_DOT_WORD = rf"(?:[ \t]*+\.[ \t]*+{_WORD})"
_TOML_TOKEN = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*+(?:"{3,5}|\\?\Z)'
    r"|'''(?:[^']|'(?!''))*+(?:'{3,5}|\Z)"
    r"|#[^\n]*+"
    rf"|(?P<too_deep>{_WORD}{_DOT_WORD}{{{_DEEPEST_TOML},}})"
    rf"|{_WORD}{_DOT_WORD}*+",
    re.DOTALL,
)


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
    folder = os.path.dirname(target)
    temporary = None
    try:
        _remove_leftovers(folder)
        # In the same folder, because a rename works within one file system only.
        with _new_temporary(folder) as file:
            temporary = file.name
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            # A rename may reach the disk before the content does, and then a crash would leave an empty file.
            file.flush()
            os.fsync(file.fileno())
            if _locks is None:
                file.close()  # Windows renames no open file
            if overwrite:
                _copy_mode(target, temporary)
                os.replace(temporary, target)
            else:
                _rename_to_new(temporary, target)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, target) from error
    finally:
        if temporary is not None:
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
        LossScaleError: The file has more than `limit` bytes, or is not a regular file; its type is `error`.
        UnicodeDecodeError: The file is not UTF-8, and `errors` is `"strict"`.
        OSError: The file cannot be read.
    """
    with open_regular(path, error) as file:
        content = file.read(limit + 1)  # a device such as /dev/zero has a size of 0 and no end
    if len(content) > limit:
        raise error(f"{os.fspath(path)} holds more than {_size(limit)}; pass a smaller file")
    return content.decode("utf-8-sig", errors=errors)


def open_regular(path: Path, error: type[LossScaleError]) -> BinaryIO:
    """Open a regular file to read its bytes, or the pipe that a shell has made under `/dev/stdin` or `/dev/fd`.

    Args:
        path: The path of the file.
        error: The type of error to raise for anything else.

    Returns:
        The open file.

    Raises:
        LossScaleError: `path` is something else, such as a named pipe, which may have no writer; its type is `error`.
        OSError: The file cannot be opened.
    """
    name = os.fspath(path)
    if os.path.normpath(name).startswith(_PIPES):
        return open(name, "rb")
    # A named pipe without a writer would block here otherwise.
    descriptor = os.open(name, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise error(f"{name} is not a regular file, but a folder; pass a file in it")
        raise error(f"{name} is not a regular file; pass one, or /dev/stdin for a pipe")
    return open(descriptor, "rb")


def _size(limit: int) -> str:
    return f"{limit >> 20} MiB" if limit >= 2**20 else f"{limit >> 10} KiB"


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
        if suffix == ".toml":
            return _parse_toml(read_text(path, error, _LARGEST_TOML))
        return _parse_json(read_text(path, error, limit), **json_options)
    except (ValueError, RecursionError) as reason:
        # The parsers and the UTF-8 decoder raise ValueError, and `error` is a ValueError, too. For deep nesting json
        # raises RecursionError.
        if isinstance(reason, LossScaleError):
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


def _parse_json(text: str, **options: Any) -> Any:
    import json  # imported late, as tomllib below: most processes read no file, and pay for every import

    return json.loads(text, object_pairs_hook=_without_duplicates, **options)


def _parse_toml(text: str) -> Any:
    import tomllib

    if any(token["too_deep"] for token in _TOML_TOKEN.finditer(text)):
        raise ValueError(f"a key has more than {_DEEPEST_TOML} parts")
    if text.startswith(TOML_START.rstrip()) and TOML_END.strip() not in text.splitlines():
        raise ValueError(f"it was cut, since its last line {TOML_END.strip()!r} is missing; write it again")
    return tomllib.loads(text)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raises `ValueError` for a key that occurs twice, which json itself accepts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the key {shown(name)} occurs twice; delete one of the two")
            seen.add(name)
    return found


def _new_temporary(folder: str) -> BinaryIO:
    """Open a new temporary file, locked as long as it is open, so that no other writer takes it for a leftover."""
    while True:
        name = os.path.join(folder, f".lossscale-{os.urandom(8).hex()}.tmp")
        file = open(name, "xb")  # noqa: SIM115, the caller closes it
        if _locks is None:
            return file
        with contextlib.suppress(OSError):  # some network file systems have no locks
            _locks.flock(file, _locks.LOCK_EX)
        if os.path.exists(name):
            return file
        file.close()  # another writer has removed it before it was locked


def _remove_leftovers(folder: str) -> None:
    """Remove temporary files of processes that were killed while they wrote to a folder; these are not locked."""
    if _locks is None:
        return
    with contextlib.suppress(OSError):  # the folder may be unreadable
        for name in filter(_TEMPORARY.fullmatch, os.listdir(folder or ".")):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError, LossScaleError), open_regular(path, LossScaleError) as file:
                _locks.flock(file, _locks.LOCK_EX | _locks.LOCK_NB)
                os.unlink(path)


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
