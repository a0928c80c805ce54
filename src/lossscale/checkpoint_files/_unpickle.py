"""An unpickler for files of `torch.save` that imports nothing: each class and function becomes an inert object."""

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from lossscale_core.errors import CheckpointError

# torch writes a number for each kind of storage: https://docs.python.org/3/library/struct.html#format-characters
_FORMATS = {
    "DoubleStorage": "d",
    "FloatStorage": "f",
    "HalfStorage": "e",
    "BFloat16Storage": "H",
    "LongStorage": "q",
    "IntStorage": "i",
    "ShortStorage": "h",
    "CharStorage": "b",
    "ByteStorage": "B",
    "BoolStorage": "?",
}
_SIZES = {kind: struct.calcsize(f"<{code}") for kind, code in _FORMATS.items()}
_SIZES |= {"ComplexHalfStorage": 4, "ComplexFloatStorage": 8, "ComplexDoubleStorage": 16, "QInt32Storage": 4}
"""The bytes of each number; 1 for the other kinds."""
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_utils.py
_TENSORS = ("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_SUBCLASSES = ("torch._tensor._rebuild_from_type_v2", "torch._utils._rebuild_from_type_v2")
_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/serialization.py: the three pickles before the content
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LARGEST_PICKLE = 2**26


class Inert(dict[Any, Any]):
    """An object of a class that is not imported: a dict of its attributes, and of its items if it is a dict."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__
    __ne__ = object.__ne__

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):  # objects with slots have two parts
            for name, value in part.items() if isinstance(part, dict) else ():
                self.setdefault(name, value)  # an item of the same name takes precedence

    def append(self, _: Any) -> None:
        """Ignore an item: of the classes that are lists, none is a scaler."""

    add = append


class Storage(NamedTuple):
    """The place of a tensor's numbers in the file."""

    kind: str
    key: str
    length: int


class Tensor(NamedTuple):
    """A tensor of a file; its numbers are not read."""

    storage: Any
    offset: int
    shape: tuple[int, ...]


class TorchFile:
    """An open file of `torch.save`.

    Args:
        path: The path of the file, for messages.
        file: The open file, which stays open as long as numbers of its tensors are read.

    Raises:
        CheckpointError: The file holds compressed parts, or says that it holds more than its size.
        Exception: The file is damaged: a pickle can raise anything.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._bytes_at: Callable[[Storage, int, int], bytes]
        self._order = "<"
        is_archive = file.read(4) == b"PK\x03\x04"
        file.seek(0)
        self.content = self._read_archive() if is_archive else self._read_legacy()

    def number(self, tensor: Tensor) -> Any:
        """Return the number in a tensor of one element, or None for another tensor or an unknown type."""
        storage, offset, shape = tensor
        code = _FORMATS.get(storage.kind) if isinstance(storage, Storage) else None
        if code is None or any(size != 1 for size in shape) or not 0 <= offset < storage.length:
            return None
        content = self._bytes_at(storage, offset, struct.calcsize(f"<{code}"))
        number = struct.unpack(f"{self._order}{code}", content)[0]
        return struct.unpack("<f", struct.pack("<I", number << 16))[0] if storage.kind == "BFloat16Storage" else number

    def _read_archive(self) -> Any:
        with zipfile.ZipFile(self._file) as zipped:
            entries = {entry.filename: entry for entry in zipped.infolist()}
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
            raise CheckpointError(
                f"{self._path} is compressed, unlike what torch.save writes; save it again by torch.save"
            )
        if sum(entry.file_size for entry in entries.values()) > self._file.seek(0, io.SEEK_END):
            raise CheckpointError(f"{self._path} says that its content is larger than the file; save it again")
        (pickled,) = (name for name in entries if name.endswith("/data.pkl"))
        folder = pickled.removesuffix("data.pkl")

        def part(name: str, offset: int, size: int) -> bytes:
            # Not by `zipped.open`, which requires checksums, and torch writes none after set_crc32_options(False).
            entry = entries[folder + name]
            self._file.seek(entry.header_offset + 26)
            lengths = struct.unpack("<HH", self._file.read(4))  # of the name and of the field after it
            self._file.seek(sum(lengths) + offset, io.SEEK_CUR)
            return self._file.read(min(size, entry.file_size - offset))

        self._bytes_at = lambda storage, offset, size: part(f"data/{storage.key}", offset * size, size)
        if f"{folder}byteorder" in entries:
            self._order = ">" if part("byteorder", 0, 3) == b"big" else "<"
        if entries[pickled].file_size > _LARGEST_PICKLE:
            raise MemoryError
        return _Unpickler(io.BytesIO(part("data.pkl", 0, _LARGEST_PICKLE))).load()

    def _read_legacy(self) -> Any:
        """Read a file of torch before 1.6: pickles one after the other, and the storages behind them."""
        file = self._file
        if _Unpickler(file).load() != _LEGACY_MAGIC:
            raise ValueError
        _Unpickler(file).load()  # the version of the format
        about = _Unpickler(file).load()
        self._order = "<" if about.get("little_endian", True) else ">"
        unpickler = _Unpickler(file)
        content = unpickler.load()
        keys = _Unpickler(file).load()
        start = file.tell()

        def bytes_at(storage: Storage, offset: int, size: int) -> bytes:
            position = start
            for key in keys[: keys.index(storage.key)]:
                before = unpickler.storages[key]
                position += 8 + before.length * _SIZES.get(before.kind, 1)
            file.seek(position + 8 + offset * size)  # a storage begins with its length
            return file.read(size)

        self._bytes_at = bytes_at
        return content


class _Unpickler(pickle.Unpickler):
    """Python's unpickler, which asks `find_class` for every class and function that the file names."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, encoding="utf-8")
        self.storages: dict[str, Storage] = {}
        self._found: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return a placeholder for a class or function of this name; nothing is imported."""
        full = f"{module}.{name}"
        if full in _TENSORS:
            return _tensor
        if full in _PARAMETERS:
            return _data_of_parameter
        if full in _SUBCLASSES:
            return _rebuilt
        if full not in self._found:
            self._found[full] = type(full, (Inert,), {})
        return self._found[full]

    def persistent_load(self, pid: Any) -> Any:
        """Return the place of a storage in the file."""
        if pid[0] == "module":  # a class, with its source, as torch wrote before 1.6
            return pid[1]
        _, kind, key, _, length, *view = pid
        self.storages[key] = Storage(kind.__name__.rpartition(".")[2], key, length)
        # Storages that show a part of another one were written by torch before 0.4 only; their numbers are not read.
        return None if any(view) else self.storages[key]


def _tensor(
    storage: Any, offset: Any, shape: Any, stride: Any = None, gradient: Any = None, hooks: Any = None, *more: Any
) -> Tensor:
    # The values after the hooks say, for example, that the numbers are negated.
    return Tensor(None if any(more) else storage, int(offset), tuple(int(size) for size in shape))


def _rebuilt(function: Any, _: Any, arguments: Any, *__: Any) -> Any:
    return function(*arguments)


def _data_of_parameter(data: Any, *_: Any) -> Any:
    return data
