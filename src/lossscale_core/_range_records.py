"""The magnitudes of one operation's result, and summaries of several such records."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

GRADIENT = "gradient"
"""The `operation` of a record about a parameter's whole gradient."""


CHUNK = 2**18
"""The number of elements to measure at a time, so that it takes little memory compared with a model."""


class _Format(NamedTuple):
    largest: float
    smallest_exponent: int
    """The exponent of the smallest subnormal number."""


# NumPy has the types of 16 bits and more but bfloat16; the others are those of https://github.com/jax-ml/ml_dtypes.
_FORMATS = {
    "float16": _Format(65504.0, -24),
    "bfloat16": _Format(float.fromhex("0x1.fep127"), -133),
    "float4_e2m1fn": _Format(6.0, -1),
    "float8_e3m4": _Format(15.5, -6),
    "float8_e4m3": _Format(240.0, -9),
    "float8_e4m3b11fnuz": _Format(30.0, -13),
    "float8_e4m3fn": _Format(448.0, -9),
    "float8_e4m3fnuz": _Format(240.0, -10),
    "float8_e5m2": _Format(57344.0, -16),
    "float8_e5m2fnuz": _Format(57344.0, -17),
    "float32": _Format(float.fromhex("0x1.fffffep127"), -149),
    "float64": _Format(float.fromhex("0x1.fffffffffffffp1023"), -1074),
}


class OperationRange(NamedTuple):
    """The magnitudes of one operation's result, in plain numbers."""

    operation: str
    """The operation's name in its framework, such as `aten.mm`; `gradient` for a parameter's whole gradient."""
    module: str
    """The place of the operation: a module's path or a name stack; for a gradient, the parameter's name."""
    dtype: str
    """`float16`, `bfloat16`, a type of eight bits or fewer; for a parameter's gradient also `float32` or `float64`."""
    largest: float
    """The largest magnitude among the finite elements; 0.0 if no element is finite."""
    nonfinite: int
    """The number of elements that are NaN or infinite."""
    zeros: int
    """The number of elements that are zero."""
    exponents: dict[int, int]
    """The number of finite elements in [2**e, 2**(e + 1)), for each exponent `e` that occurs."""
    overflowed: bool = False
    """Whether some elements are non-finite although all inputs of the operation are finite."""
    scaled: bool = False
    """Whether the elements are proportional to the loss scale; False in the forward pass."""

    @classmethod
    def of(cls, values: Any, operation: str, module: str) -> "OperationRange":
        """Measure an array.

        Args:
            values: An array of any shape and any float or complex dtype that NumPy can hold, or what `np.asarray`
                converts to one. The parts of complex numbers count as two elements.
            operation: The operation that computed it.
            module: The place of the operation.

        Returns:
            The record, with `overflowed` and `scaled` False.
        """
        array = np.ravel(values)
        flat = array.view(array.real.dtype) if array.dtype.kind == "c" else array
        largest, nonfinite, zeros = 0.0, 0, 0
        exponents: Counter[int] = Counter()
        for start in range(0, flat.size, CHUNK):
            chunk = flat[start : start + CHUNK]
            magnitudes = abs(chunk.astype(np.float32) if chunk.dtype.itemsize < 4 else chunk)
            finite = magnitudes[magnitudes < math.inf]  # this excludes NaN, too
            nonzero = finite[finite > 0]
            nonfinite += magnitudes.size - finite.size
            zeros += finite.size - nonzero.size
            largest = max(largest, float(finite.max(initial=0.0)))
            exponents.update(_exponents(nonzero))
        return cls(operation, module, flat.dtype.name, largest, nonfinite, zeros, dict(sorted(exponents.items())))

    @property
    def headroom(self) -> float:
        """The number of times that the largest element can double before it overflows; infinite if all are zero."""
        return math.log2(_FORMATS[self.dtype].largest / self.largest) if self.largest else math.inf


class NonfiniteInput(NamedTuple):
    """An input, a weight or a label that holds NaN or infinity before the forward pass computes anything."""

    name: str
    """The kind and name of the value: `weight head.weight`, `batch['labels'] of loss_fn`."""
    size: int
    """The number of its elements; the parts of complex numbers count as two."""
    nans: int
    """The number of elements that are NaN."""
    infinities: int
    """The number of elements that are infinite and positive."""
    negative_infinities: int
    """The number of elements that are infinite and negative, as those of an attention mask are on purpose."""

    @classmethod
    def of(cls, values: Any, name: str) -> "NonfiniteInput | None":
        """Count the elements of an array that are not finite.

        Args:
            values: An array of any shape and any dtype that NumPy can hold.
            name: The kind and name of the array.

        Returns:
            The counts, or None if all elements are finite or of a dtype that has no infinity.
        """
        array = np.ravel(values)
        flat = array.view(array.real.dtype) if array.dtype.kind == "c" else array
        if flat.dtype.kind != "f" and flat.dtype.name not in _FORMATS:
            return None
        counts = Counter[str]()
        for start in range(0, flat.size, CHUNK):
            chunk = flat[start : start + CHUNK]
            wide = chunk.astype(np.float32) if chunk.dtype.itemsize < 4 else chunk
            counts["nan"] += int(np.isnan(wide).sum())
            counts["+inf"] += int((wide == math.inf).sum())
            counts["-inf"] += int((wide == -math.inf).sum())
        found = cls(name, flat.size, counts["nan"], counts["+inf"], counts["-inf"])
        return found if any(found[2:]) else None

    def __str__(self) -> str:
        kinds = ["NaN"] * bool(self.nans) + ["infinity"] * bool(self.infinities + self.negative_infinities)
        count = self.nans + self.infinities + self.negative_infinities
        elements = f"in {count} of its {self.size} elements" if self.size > 1 else "in its one element"
        return f"{self.name} holds {' and '.join(kinds)} {elements}"


def _exponents(magnitudes: Any) -> dict[int, int]:
    """Return how many of these positive numbers lie in [2**e, 2**(e + 1)), for each exponent `e` that occurs."""
    if not magnitudes.size:
        return {}
    # In place, since the caller made this array by a selection and does not use it again.
    magnitudes.sort()
    lowest, highest = (math.frexp(magnitudes[end])[1] - 1 for end in (0, -1))
    # 2**1024 is not a float64, so that the elements above the last power of two are counted by the size.
    starts = magnitudes.searchsorted([2.0**exponent for exponent in range(lowest, highest + 1)]).tolist()
    ends = [*starts[1:], magnitudes.size]
    return {lowest + n: end - start for n, (start, end) in enumerate(zip(starts, ends, strict=True)) if end > start}


def in_low_precision(records: Iterable[OperationRange]) -> list[OperationRange]:
    """Return the records that the loss scale multiplies, of dtypes with fewer bits than float32."""
    return [record for record in records if record.scaled and record.dtype not in ("float32", "float64")]


def needs_scaling(records: Iterable[OperationRange]) -> bool:
    """Return whether the loss scale multiplies anything narrower in range than bfloat16."""
    return any(record.dtype != "bfloat16" for record in in_low_precision(records))


def first_overflow(records: Iterable[OperationRange], *, or_held: bool = True) -> OperationRange | None:
    """Return the first record that produced an infinity or NaN, or else, with `or_held`, that contains one."""
    found = list(records)
    made = (record for record in found if record.overflowed)
    held = (record for record in found if record.nonfinite and or_held)
    return next(made, None) or next(held, None)


def share_flushed(records: Iterable[OperationRange], factor: float, *, with_zeros: bool = False) -> float:
    """Return the fraction of non-zero elements that round to zero when multiplied by `factor`.

    With `with_zeros`, elements that are zero already count as flushed.
    """
    shift = math.floor(math.log2(factor))
    elements = flushed = 0
    for record in records:
        zeros = record.zeros if with_zeros else 0
        elements += sum(record.exponents.values()) + zeros
        # Round to nearest: a number above half of the smallest subnormal number rounds up to it.
        last = _FORMATS[record.dtype].smallest_exponent - 2 - shift
        flushed += sum(count for exponent, count in record.exponents.items() if exponent <= last) + zeros
    return flushed / elements if elements else 0.0


def by_module(records: Iterable[OperationRange]) -> dict[str, list[OperationRange]]:
    """Return the records of each module, in the order of its first one."""
    modules: dict[str, list[OperationRange]] = {}
    for record in records:
        modules.setdefault(record.module, []).append(record)
    return modules


def to_plain(record: OperationRange) -> dict[str, Any]:
    """Return a record as values for JSON, which has no integer keys."""
    return record._asdict() | {"exponents": sorted(record.exponents.items())}


def from_plain(plain: dict[str, Any]) -> OperationRange:
    """Return the record that `to_plain` converted."""
    return OperationRange(**plain | {"exponents": dict(plain["exponents"])})
