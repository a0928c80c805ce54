"""A reader of saved scalers: JSON, and files of `torch.save`, which are read without torch and without running code."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lossscale.checkpoint_files._search import find_scaler
from lossscale.checkpoint_files._torch_files import SUFFIXES, read_torch_file
from lossscale_core.adapters import LARGEST_PARSED, read_data, suffix_of
from lossscale_core.errors import CheckpointError

__all__ = ["read_checkpoint"]


def read_checkpoint(path: Path, key: str | None = None) -> tuple[str, Mapping[str, Any]]:
    """Return the place of the saved scaler in a checkpoint file, and the scaler.

    Args:
        path: A file in JSON, or one that `torch.save` wrote.
        key: The place of the scaler, such as `scaler` or `optimizer.grad_scaler`. Without it, the only dict that looks
            like a scaler is returned, or else the whole content.

    Returns:
        The keys to the scaler, joined by dots (`""` for the whole file), and its dict. In a file of `torch.save` a
        tensor of one element is a number, and a pickled object is the dict of its attributes.

    Raises:
        CheckpointError: The file cannot be read, holds several scalers, or has no such key; the message names the file.
        OSError: The file cannot be opened.
    """
    suffix = suffix_of(path)
    if suffix in SUFFIXES:
        return read_torch_file(path, key)
    if suffix != ".json":
        formats = f"JSON (.json) or written by torch.save ({', '.join(SUFFIXES)})"
        path.stat()  # a file that is missing has no format
        if path.is_dir():
            raise CheckpointError(f"{path} is a folder; pass a file in it: {formats}")
        raise CheckpointError(f"{path} must be {formats}; save it as one")
    return find_scaler(path, read_data(path, CheckpointError, LARGEST_PARSED), key)
