"""Recorded runs, as `lossscale run`, the demo, TensorBoard and Weights & Biases write them."""

import csv
import errno
import math
import os
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lossscale_core.adapters import LARGEST_PARSED, open_regular, read_data, shown_names, suffix_of
from lossscale_core.errors import TraceFileError

# The names of each column in lower case, as they are or after "run - ", "train/" and the like; the best one first.
_NAMES = {
    "step": ("step", "trainer/global_step", "global_step", "_step", "steps"),
    "scale": ("scale", "loss_scale", "loss_scale_used", "grad_scale", "amp_scale"),
    "overflowed": ("overflowed", "overflow", "skipped", "found_inf"),
    "applied": ("applied",),
    "spiked": ("spiked", "spike"),
    "share": ("overflow_share",),
    "norm": ("norm", "grad_norm", "gradient_norm", "total_norm"),
}
_MOST_COLUMNS = 1000
_MOST_LINES = 2**20
_LONGEST_LINE = 2**20
_LARGEST_CSV = 2**26
_MOST_WORDS = 1000
_FLAGS = ("overflowed", "applied", "spiked")
_WORDS = {"": math.nan, "true": 1.0, "false": 0.0}


class RecordedRun(NamedTuple):
    """A run, a row per recorded step; each array has shape `(steps,)`."""

    step: NDArray[np.float64]
    scale: NDArray[np.float64]
    overflowed: NDArray[np.bool_]
    spiked: NDArray[np.bool_]
    norm: NDArray[np.float64] | None
    """float64: the norm of the unscaled gradients, NaN if it is not known; None without norms."""
    is_guessed: bool
    """Whether overflows are guessed from falls of the scale, since the file does not contain them."""
    share: NDArray[np.float64] | None = None
    """float64: the share of all steps so far that overflowed, also of steps without a row; None if it is not known."""

    @property
    def steps(self) -> int:
        """The number of steps from the first row to the last; more than rows if only some steps were logged."""
        return max(len(self.step), int(self.step[-1] - self.step[0]) + 1)


def read_run(path: Path) -> RecordedRun:
    """Return the run that a CSV, JSON or TensorBoard event file holds. Raises `TraceFileError`; `OSError`."""
    found = _reader(path)(path)
    for role in _FLAGS:
        if role in found and not {0.0, 1.0}.issuperset(found[role][np.isfinite(found[role])]):
            del found[role]  # a share or a count under the same name
    return _run(path, found)


def _run(path: Path, found: dict[str, Any]) -> RecordedRun:
    scale = found["scale"]
    step = found.get("step", np.arange(len(scale), dtype=float))
    # No step counter and no loss scale is beyond these, and a picture could not be drawn.
    rows = (np.abs(step) <= 2.0**53) & (scale >= 2.0**-149) & (scale <= 2.0**128)
    if not rows.any():
        raise TraceFileError(f"{path} holds no steps with a positive loss scale; write one row a step")
    # Rows of several processes may be out of order; those of one step stay in the order of the file.
    order = np.argsort(step[rows], kind="stable")
    kept = {role: values[rows][order] for role, values in found.items()}
    spiked = kept.get("spiked", np.zeros(len(order))) == 1.0
    overflowed, is_guessed = _overflows(kept, spiked)
    norm = kept.get("norm")
    if norm is not None:
        # No float32 is finite beyond it, and a picture could not be drawn.
        norm = np.where((np.abs(norm) <= 2.0**128) | np.isinf(norm), norm, np.nan)
    if norm is None or not np.isfinite(norm).any():
        norm = None
    share = kept["share"] if "share" in kept and np.isfinite(kept["share"]).all() else None
    return RecordedRun(step[rows][order], kept["scale"], overflowed, spiked, norm, is_guessed, share)


def _overflows(found: dict[str, Any], spiked: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], bool]:
    """Return at which steps an overflow was, and whether that is guessed: a scale falls after an overflow alone."""
    if "overflowed" in found:
        return found["overflowed"] > 0, False
    if "applied" in found:
        return (found["applied"] == 0.0) & ~spiked, False
    return np.append(np.diff(found["scale"]) < 0, False), True


def _roles(path: Path, titles: Iterable[str]) -> dict[str, str]:
    """Return the title of the column for each role. Raises `TraceFileError` if no column holds the loss scale."""
    titles = list(titles)
    by_name: dict[str, str] = {}  # the first title of each name, whole or without its prefix
    for title in titles:
        plain = title.strip().lower()
        for name in (plain, plain.rpartition(" - ")[2], plain.rpartition("/")[2]):
            by_name.setdefault(name, title)
    known = {role: [by_name[name] for name in names if name in by_name] for role, names in _NAMES.items()}
    found = {role: found_titles[0] for role, found_titles in known.items() if found_titles}
    if "scale" not in found:
        raise TraceFileError(
            f"{path} has no column for the loss scale, such as 'loss_scale'; it has {shown_names(titles) or 'nothing'}"
        )
    return found


def _reader(path: Path) -> Callable[[Path], dict[str, Any]]:
    if not path.exists():
        hint = "pass a recorded run, such as lossscale run --trace writes"
        raise FileNotFoundError(errno.ENOENT, f"{os.strerror(errno.ENOENT)}; {hint}", str(path))
    if path.is_dir() or ".tfevents." in path.name:
        return _read_events
    readers = {".csv": _read_csv, ".json": _read_json}
    if suffix_of(path) not in readers:
        raise TraceFileError(f"{path} must be a .csv or .json file, or TensorBoard's event file or folder")
    return readers[suffix_of(path)]


def _read_csv(path: Path) -> dict[str, Any]:
    rows = filter(None, csv.reader(_whole_lines(path)))
    try:
        titles = next(rows, [])
        if len(titles) > _MOST_COLUMNS:
            raise TraceFileError(f"{path} has more than {_MOST_COLUMNS} columns; pass a file with fewer")
        roles = _roles(path, titles)
        places = {title: place for place, title in enumerate(titles)}
        columns = [(array("d"), places[title]) for title in roles.values()]
        words = dict(_WORDS)
        for number, row in enumerate(rows, 2):
            if len(row) != len(titles):
                raise TraceFileError(f"{path}: row {number} has {len(row)} cells, but the first row has {len(titles)}")
            for column, place in columns:
                column.append(_number(row[place], words))
    except csv.Error as error:
        raise TraceFileError(f"{path} is not valid CSV: {error}") from error
    return {role: np.array(column) for role, (column, _) in zip(roles, columns, strict=True)}


def _whole_lines(path: Path) -> Iterator[str]:
    """Yield the lines that have an end; the last one may have been cut in the middle of a number."""
    with open_regular(path, TraceFileError) as file:
        size = 0
        for _ in range(_MOST_LINES):
            line = file.readline(_LONGEST_LINE)
            size += len(line)
            if len(line) == _LONGEST_LINE or size > _LARGEST_CSV:
                raise TraceFileError(
                    f"{path} holds more than {_LARGEST_CSV >> 20} MiB, or a line of 1 MiB; pass a smaller file"
                )
            if not line.endswith(b"\n"):
                break
            text = line.decode("utf-8", errors="replace")
            yield text.removeprefix("\ufeff") if size == len(line) else text
        else:
            raise TraceFileError(f"{path} has more than {_MOST_LINES} lines; keep a part of them")
    if line.strip():
        note = f"{path}: the last row is ignored, since it has no end and may have been cut"
        warnings.warn(note, stacklevel=2)


def _read_json(path: Path) -> dict[str, Any]:
    """Return the lists of an object, or the values of a list of objects, by their names."""
    content = read_data(path, TraceFileError, LARGEST_PARSED)
    if isinstance(content, list) and content and all(isinstance(row, dict) for row in content):
        names = dict.fromkeys(name for row in content for name in row)
        if len(names) > _MOST_COLUMNS:
            raise TraceFileError(f"{path} has more than {_MOST_COLUMNS} columns; pass a file with fewer")
        content = {name: [row.get(name) for row in content] for name in _roles(path, names).values()}
    if not isinstance(content, dict):
        raise TraceFileError(f"{path} must hold an object with a list for each column, or a list of objects")
    columns = {name: values for name, values in content.items() if isinstance(values, list)}
    longest = max(map(len, columns.values()), default=0)
    columns = {name: values for name, values in columns.items() if len(values) == longest}
    return {role: _numbers(columns[title]) for role, title in _roles(path, columns).items()}


def _read_events(path: Path) -> dict[str, Any]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.util import tensor_util
    except ModuleNotFoundError as error:
        raise TraceFileError(
            f"{path} is TensorBoard's, and reading it needs tensorboard; run: pip install tensorboard"
        ) from error
    for each in [path, *path.rglob("*tfevents*")] if path.is_dir() else [path]:
        if not each.is_dir():
            open_regular(each, TraceFileError).close()
    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    tags = events.Tags()
    series = {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags["scalars"]}
    for tag in tags["tensors"]:
        # tf.summary, and with it Keras and clu, writes a scalar as a tensor with the name of the plugin that shows it:
        # https://github.com/tensorflow/tensorboard/blob/master/tensorboard/data_compat.py
        if events.SummaryMetadata(tag).plugin_data.plugin_name == "scalars":
            tensors = events.Tensors(tag)
            series[tag] = {event.step: _of_array(tensor_util.make_ndarray(event.tensor_proto)) for event in tensors}
    steps = sorted(set().union(*series.values()))
    tags_of = _roles(path, series)
    columns = {role: np.array([series[tag].get(step, math.nan) for step in steps]) for role, tag in tags_of.items()}
    return {**columns, "step": np.array(steps, dtype=float)}


def _of_array(array: NDArray[Any]) -> float:
    return _number(array.item(), {}) if array.size == 1 else math.nan


def _numbers(values: Iterable[Any]) -> NDArray[np.float64]:
    words = dict(_WORDS)
    return np.array([_number(value, words) for value in values], dtype=float)


def _number(value: Any, words: dict[str, float]) -> float:
    """Return a cell as a number; NaN for anything else, since exports have columns of words, too.

    `words` holds the values of words. The first thousand others are added, since an exception for each cell takes long.
    """
    if isinstance(value, str):
        value = value.strip().lower()
        if value in words:
            return words[value]
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        if isinstance(value, str) and len(words) < _MOST_WORDS:
            words[value] = math.nan
        return math.nan
