"""A reader of files from `torch.save`, which are pickles: only torch versions that run no code from them are used."""

import os
import zipfile
from pathlib import Path
from typing import IO, Any, BinaryIO

from lossscale._install import how_to_install
from lossscale_core.errors import CheckpointError
from lossscale_core.files import open_regular

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_OLDEST_TORCH = (2, 10)
_BYTES = b"\nbytearray\n"
_SEPARATELY = (
    "save the scaler's part separately: torch.save(scaler.state_dict(), file), or "
    "json.dump(vars(scaler), file, default=str)"
)


def read_pickle(path: Path) -> Any:
    """Return the content of a file that `torch.save` wrote, read with `weights_only=True`.

    Raises `CheckpointError` if the file cannot be read, or if torch is missing or too old, and `OSError`.
    """
    try:
        import torch  # imported late: only these files need torch
    except ImportError:
        raise CheckpointError(
            f"reading {path} needs torch, which is not installed; {how_to_install('torch')}"
        ) from None
    _require_safe(path, torch.__version__)
    with open_regular(path, CheckpointError) as file:
        _require_stored(path, file)
        try:
            # Tensors of a GPU are read on the CPU, since this machine may have no GPU.
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file can make torch.load raise anything
            raise CheckpointError(f"{path} {_unreadable(error)}") from error


def _require_safe(path: Path, version: str) -> None:
    """Require a torch whose `weights_only=True` has no known vulnerability.

    See https://nvd.nist.gov/vuln/detail/CVE-2025-32434 (fixed in 2.6) and
    https://nvd.nist.gov/vuln/detail/CVE-2026-24747 (fixed in 2.10).
    """
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
    if numbers < _OLDEST_TORCH:
        raise CheckpointError(
            f"{path} is not read with torch {version}, whose weights_only=True a file can bypass "
            "(CVE-2025-32434, CVE-2026-24747); run: pip install --upgrade 'torch>=2.10', or save the scaler as JSON "
            "where it was made: json.dump(scaler.state_dict(), file)"
        )


def _require_stored(path: Path, file: BinaryIO) -> None:
    """Require that a file has no more content than bytes, so that a small file cannot fill the memory.

    torch stores tensors uncompressed, each once. Files of torch before 1.6 are no archive and store them likewise.
    """
    if zipfile.is_zipfile(file):
        try:
            with zipfile.ZipFile(file) as zipped:
                entries = zipped.infolist()
                _require_size(path, file, entries)
                pickles = [entry for entry in entries if entry.filename.endswith(".pkl")]
                makes_bytes = any(_makes_bytes(zipped.open(entry)) for entry in pickles)
        except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path} {_unreadable(error)}") from error
    else:
        file.seek(0)
        makes_bytes = _makes_bytes(file)
    if makes_bytes:
        raise CheckpointError(f"{path} makes arrays of bytes, which may be of any size; {_SEPARATELY}")
    file.seek(0)


def _require_size(path: Path, file: BinaryIO, entries: list[zipfile.ZipInfo]) -> None:
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise CheckpointError(f"{path} is compressed, which torch.save does not do; save it again")
    if sum(entry.file_size for entry in entries) > os.fstat(file.fileno()).st_size:
        raise CheckpointError(f"{path} says that its content is larger than the file; save it again")


def _makes_bytes(file: IO[bytes]) -> bool:
    """Return whether a pickle names `bytearray`, which torch calls with any number and which has as many bytes then."""
    before = b""
    while chunk := file.read(2**20):
        if _BYTES in before + chunk:
            return True
        before = chunk[-len(_BYTES) :]
    return False


def _unreadable(error: Exception) -> str:
    if "unsupported global" in str(error).lower() or "unsupported class" in str(error).lower():
        return f"holds objects that cannot be read without running code from the file; {_SEPARATELY}"
    return "is not what torch.save writes, or is damaged; save it again"
