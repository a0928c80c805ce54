"""A reader of files from `torch.save`, which are pickles: only torch versions that run no code from them are used."""

import os
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

from lossscale._install import how_to_install
from lossscale_core.errors import CheckpointError
from lossscale_core.files import open_regular

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_OLDEST_TORCH = (2, 10)
_ARCHIVE = b"PK\x03\x04"  # torch looks at these four bytes
_SEPARATELY = (
    "save the scaler's part separately: torch.save(scaler.state_dict(), file), or "
    "json.dump(vars(scaler), file, default=str)"
)


def read_pickle(path: Path) -> Any:
    """Return the content of a file that `torch.save` wrote, read with `weights_only=True`.

    Raises `CheckpointError` if the file cannot be read, or if torch is missing or too old, and `OSError`.
    """
    open_regular(path, CheckpointError).close()  # before torch is imported, which takes seconds
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
    """Require that an archive holds no more than its bytes: torch stores tensors uncompressed, each once.

    Files of torch before 1.6 are no archive and store tensors likewise.
    """
    start = file.read(len(_ARCHIVE))
    if (start == _ARCHIVE) != zipfile.is_zipfile(file):
        raise CheckpointError(f"{path} {_unreadable(ValueError())}")
    if start == _ARCHIVE:
        try:
            with zipfile.ZipFile(file) as zipped:
                _require_size(path, file, zipped.infolist())
        except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
            raise CheckpointError(f"{path} {_unreadable(error)}") from error
    file.seek(0)


def _require_size(path: Path, file: BinaryIO, entries: list[zipfile.ZipInfo]) -> None:
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise CheckpointError(f"{path} is compressed, unlike what torch.save writes; save it again by torch.save")
    if sum(entry.file_size for entry in entries) > os.fstat(file.fileno()).st_size:
        raise CheckpointError(f"{path} says that its content is larger than the file; save it again")


def _unreadable(error: Exception) -> str:
    if "unsupported global" in str(error).lower() or "unsupported class" in str(error).lower():
        return f"holds objects that cannot be read without running code from the file; {_SEPARATELY}"
    return "is not what torch.save writes, or is damaged; save it again"
