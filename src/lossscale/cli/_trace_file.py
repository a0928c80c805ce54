"""Readers of recorded runs for `lossscale simulate`: files with one value per step."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lossscale_core.errors import TraceFileError
from lossscale_core.files import LARGEST_PARSED, read_data, read_text, suffix_of
from lossscale_core.messages import shown, shown_names

_FLAGS = {"0": False, "1": True, "false": False, "true": True}


def read_overflow(path: Path) -> list[bool]:
    """Return whether each step overflowed.

    The file holds `0`s and `1`s, with or without separators, or JSON: a list or string of them, or an object with one
    under `"overflow"`, such as the demo writes. Raises `TraceFileError` with the value that cannot be read.
    """
    values = _values(path, "overflow")
    words = [str(value).strip().lower() for value in values]
    if words and all(set(word) <= {"0", "1"} for word in words):
        words = list("".join(words))
    for step, word in enumerate(words):
        if word not in _FLAGS:
            raise _refusal(path, step, word, "0 or 1")
    return [_FLAGS[word] for word in words]


def read_gradient_max(path: Path) -> NDArray[np.float64]:
    """Return each step's largest gradient magnitude, unscaled.

    The file holds separate numbers, or JSON: a list of them, or an object with one under `"gradient_max"`, such as the
    demo writes; `null` means a gradient that is not finite. Raises `TraceFileError` with the value that cannot be read.
    """
    return np.array([_number(path, step, value) for step, value in enumerate(_values(path, "gradient_max"))])


def _values(path: Path, key: str) -> list[Any]:
    if suffix_of(path) == ".json":
        content = read_data(path, TraceFileError, LARGEST_PARSED)
    else:
        # Bytes that are not text are replaced, so that the message shows the first bad value and its step.
        content = read_text(path, TraceFileError, LARGEST_PARSED, errors="replace")
    if isinstance(content, dict):
        if key not in content:
            raise TraceFileError(f"{path} has no {key!r}; it has {shown_names(content) or 'nothing'}")
        content = content[key]
    values = content.replace(",", " ").split() if isinstance(content, str) else content
    if not isinstance(values, list):
        raise TraceFileError(f"{path} holds {type(values).__name__}, but must hold a list; write one value per step")
    if not values:
        raise TraceFileError(f"{path} holds no steps; write one value per step")
    return values


def _number(path: Path, step: int, value: Any) -> float:
    try:
        return math.nan if value is None else abs(float(value))
    except (TypeError, ValueError, OverflowError):
        raise _refusal(path, step, value, "a number") from None


def _refusal(path: Path, step: int, value: Any, rule: str) -> TraceFileError:
    return TraceFileError(f"{path}: step {step} is {shown(value)}, but must be {rule}; write one value per step")
