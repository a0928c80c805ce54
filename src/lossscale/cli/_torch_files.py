"""A reader of files from `torch.save`, which are pickles: only torch versions that run no code from them are used."""

import stat
from pathlib import Path
from typing import Any

from lossscale._install import how_to_install
from lossscale_core.errors import CheckpointError

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_OLDEST_TORCH = (2, 10)


def read_pickle(path: Path) -> Any:
    """Return the content of a file that `torch.save` wrote, read with `weights_only=True`.

    Raises `CheckpointError` if the file cannot be read, or if torch is missing or too old, and `OSError`.
    """
    # Opening a named pipe would wait for its writer for ever.
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{path} is not a file that torch.save wrote; pass a regular file")
    try:
        import torch  # imported late: only these files need torch
    except ImportError:
        raise CheckpointError(
            f"reading {path} needs torch, which is not installed; {how_to_install('torch')}"
        ) from None
    _require_safe(path, torch.__version__)
    with path.open("rb") as file:
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


def _unreadable(error: Exception) -> str:
    if "unsupported global" in str(error).lower() or "unsupported class" in str(error).lower():
        return (
            "holds objects that cannot be read without running code from the file; save the scaler's part separately: "
            "torch.save(scaler.state_dict(), file), or json.dump(vars(scaler), file, default=str)"
        )
    return "is not what torch.save writes, or is damaged; save it again"
