"""Readers of recorded runs for `lossscale simulate`: files with one value per step."""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lossscale_core.adapters import read_data, read_text, shown, shown_names, suffix_of
from lossscale_core.errors import TraceFileError

_LARGEST_PARSED = 2**22
"""Bytes of JSON or text that are read at once."""

_FLAGS = {"0": False, "1": True, "false": False, "true": True}


def read_overflow(path: Path) -> list[bool]:
    """Return whether each step overflowed.

    The file holds `0`s and `1`s, with or without separators, or JSON: a list or string of them, or an object with one
    under `"overflow"`, such as the demo writes. Raises `TraceFileError` with the value that cannot be read.
    """
    flags: list[bool] = []
    for value in _values(path, "overflow"):
        word = str(value).strip().lower()
        if word in _FLAGS:
            flags.append(_FLAGS[word])
        elif isinstance(value, str) and {"0", "1"}.issuperset(word):
            flags.extend(digit == "1" for digit in word)
        else:
            raise _refusal(path, len(flags), word, "0 or 1")
    _require_steps(path, len(flags))
    return flags


def read_gradient_max(path: Path) -> NDArray[np.float64]:
    """Return each step's largest gradient magnitude, unscaled.

    The file holds separate numbers, or JSON: a list of them, or an object with one under `"gradient_max"`, such as the
    demo writes; `null` means a gradient that is not finite. Raises `TraceFileError` with the value that cannot be read.
    """
    values = _values(path, "gradient_max")
    numbers = np.fromiter((_number(path, step, value) for step, value in enumerate(values)), dtype=np.float64)
    _require_steps(path, len(numbers))
    return numbers


def _values(path: Path, key: str) -> Iterable[Any]:
    """Return the values of a JSON list, or the words of a text one by one: a list of them would take ten times more."""
    if suffix_of(path) == ".json":
        content = read_data(path, TraceFileError, _LARGEST_PARSED)
    else:
        # Bytes that are not text are replaced, so that the message shows the first bad value and its step.
        content = read_text(path, TraceFileError, _LARGEST_PARSED, errors="replace")
    if isinstance(content, dict):
        if key not in content:
            raise TraceFileError(f"{path} has no {key!r}; it has {shown_names(content) or 'nothing'}")
        content = content[key]
    if isinstance(content, str):
        return (word.group() for word in re.finditer(r"[^\s,]+", content))
    if not isinstance(content, list):
        raise TraceFileError(f"{path} holds {type(content).__name__}, but must hold a list; write one value per step")
    return content


def _require_steps(path: Path, count: int) -> None:
    if not count:
        raise TraceFileError(f"{path} holds no steps; write one value per step")


def _number(path: Path, step: int, value: Any) -> float:
    try:
        number = math.nan if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        raise _refusal(path, step, value, "a number") from None
    if number < 0.0:
        raise _refusal(path, step, value, "a magnitude, 0 or above")
    return number


def _refusal(path: Path, step: int, value: Any, rule: str) -> TraceFileError:
    return TraceFileError(f"{path}: step {step} is {shown(value)}, but must be {rule}; write one value per step")
