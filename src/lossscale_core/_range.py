"""A report on the magnitudes in one training step: overflows, elements that flush to zero, and a fitting loss scale."""

import contextlib
import dataclasses
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lossscale_core._files import write_whole
from lossscale_core._policy import DynamicScaling
from lossscale_core._range_picture import Row, html_page, svg_picture
from lossscale_core._settings import LARGEST_SCALE

_DEFAULT = DynamicScaling()
GRADIENT = "gradient"
"""The `operation` of a record about a parameter's whole gradient."""


_CHUNK = 2**18
"""Elements measured at a time, so that the memory which that takes stays small beside a model's."""


class _Format(NamedTuple):
    largest: float
    smallest_exponent: int
    """The exponent of the smallest subnormal number."""


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
        for start in range(0, flat.size, _CHUNK):
            chunk = flat[start : start + _CHUNK]
            magnitudes = abs(chunk.astype(np.float32) if chunk.dtype.itemsize < 4 else chunk)
            finite = magnitudes[magnitudes < math.inf]  # which NaN is not either
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


@dataclass(frozen=True)
class RangeReport:
    """A report on the magnitudes that one forward and one backward pass compute, and the loss scales that fit them.

    An adapter's `range_report` returns it. `str(report)` summarises it in four lines.
    """

    loss: float
    """The loss, unscaled."""
    forward: tuple[OperationRange, ...] = field(repr=False)
    """The operations of the forward pass in float16, bfloat16 or float8, in order."""
    backward: tuple[OperationRange, ...] = field(repr=False)
    """The operations of the backward pass in these dtypes, then the parameters' gradients, at `loss_scale`."""
    loss_scale: float
    """The loss scale of `backward`: the largest with which a recorded pass was finite, or 1 if none was."""
    overflows_above: float | None
    """The largest power of two at which every operation and every parameter's gradient is finite.

    Infinity if nothing is computed in float16, bfloat16 or float8, and None if no scale fits.
    """
    init_scale: float | None
    """The recommended first loss scale: half of `overflows_above`, within the bounds of `DynamicScaling`; or None."""
    overflows_first: OperationRange | None
    """The operation that overflows first as the scale rises, or that overflows at every scale."""

    @classmethod
    def measure(
        cls,
        forward: Callable[[], tuple[float, Iterable[OperationRange]]],
        backward: Callable[[float], Iterable[OperationRange]],
    ) -> "RangeReport":
        """Make a report from one forward pass and from backward passes at several scales.

        The search begins at the first scale of `DynamicScaling`. The backward pass is linear in the loss scale, so that
        a finite pass predicts where it overflows; a second pass confirms the prediction. The states of Python's and
        NumPy's global random number generators are restored.

        Args:
            forward: Runs the forward pass and returns the loss, unscaled, and the records of its operations.
            backward: Runs the backward pass of the loss times its argument, a loss scale, and returns its records.

        Returns:
            The report.
        """
        with _restored_random_states():
            loss, records = forward()
            forward_records = tuple(records)
            if not math.isfinite(loss):
                return cls(loss, forward_records, (), 1.0, None, None, _first_overflow(forward_records))
            found = _search(backward)
        if found.overflows_above is None:
            culprit = _first_overflow(forward_records) or found.overflows_first
            return cls(loss, forward_records, found.records, found.scale, None, None, culprit)
        init_scale = _init_scale(found.overflows_above, found.records)
        above, first = found.overflows_above, found.overflows_first
        return cls(loss, forward_records, found.records, found.scale, above, init_scale, first)

    @property
    def forward_finite(self) -> bool:
        """Whether the loss is finite and no operation of the forward pass overflowed.

        An infinity that the model writes on purpose, such as an attention mask, is not an overflow.
        """
        return math.isfinite(self.loss) and not any(record.overflowed for record in self.forward)

    def flushed(self, loss_scale: float) -> float:
        """Return the fraction of non-zero gradient elements that become zero at `loss_scale`.

        The result is a lower bound, because elements that were zero already in the recorded pass do not count.

        Args:
            loss_scale: A positive, finite number.

        Returns:
            A fraction from 0 to 1.

        Raises:
            ValueError: `loss_scale` is not a positive, finite number.
        """
        return _share_flushed(self._gradients(), _require_positive(loss_scale) / self.loss_scale)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as dicts, lists, strings and numbers, which `json.dumps` accepts."""
        plain = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        for name in ("forward", "backward"):
            plain[name] = [_to_plain(record) for record in plain[name]]
        plain["overflows_first"] = None if self.overflows_first is None else _to_plain(self.overflows_first)
        return plain

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "RangeReport":
        """Return the report that `to_dict` converted to `plain`."""
        records = {name: tuple(_from_plain(each) for each in plain[name]) for name in ("forward", "backward")}
        first = plain["overflows_first"]
        return cls(**plain | records | {"overflows_first": None if first is None else _from_plain(first)})

    def plot(self, path: str | Path, *, loss_scale: float | None = None) -> None:
        """Draw a histogram of the gradients' exponents for each module, and save the picture.

        The picture shows the range of float16; bars that overflow or flush to zero are coloured and hatched.

        Args:
            path: The path of the file: `.svg`, or `.html` with the text of the report above the picture.
            loss_scale: The scale of the drawn gradients; `init_scale` if left out.

        Raises:
            ValueError: The suffix is another one, or `loss_scale` is not a positive, finite number.
        """
        target = Path(path)
        if target.suffix not in (".svg", ".html"):
            raise ValueError(f"{str(path)!r} is not an .svg or .html file; pass a path that ends in .svg or .html")
        is_page = target.suffix == ".html"
        picture = self.to_html(loss_scale=loss_scale) if is_page else svg_picture(*self._picture(loss_scale))
        write_whole(target, picture, overwrite=True)

    def to_html(self, *, loss_scale: float | None = None) -> str:
        """Return a self-contained HTML page with the text of the report and the picture that `plot` draws.

        Args:
            loss_scale: The scale of the drawn gradients; `init_scale` if left out.

        Returns:
            The text of the page.
        """
        return html_page(str(self), svg_picture(*self._picture(loss_scale)))

    def __str__(self) -> str:
        return "\n".join([self._forward_line(), *self._backward_lines(), self._advice()])

    def _gradients(self) -> list[OperationRange]:
        return [record for record in _in_low_precision(self.backward) if record.operation != GRADIENT]

    def _picture(self, loss_scale: float | None) -> tuple[list[Row], str]:
        scale = (self.init_scale or self.loss_scale) if loss_scale is None else _require_positive(loss_scale)
        shift = round(math.log2(scale / self.loss_scale))
        rows = [
            Row(
                module,
                {exponent + shift: count for exponent, count in _sum_exponents(records).items()},
                sum(record.nonfinite for record in records),
            )
            for module, records in _by_module(self._gradients()).items()
        ]
        return rows[::-1], f"Exponents of the gradients at a loss scale of {_power(scale)}"

    def _forward_line(self) -> str:
        if overflow := _first_overflow(self.forward, or_held=False):
            loss = "finite" if math.isfinite(self.loss) else f"{self.loss:g}"
            return f"forward: overflows in {_where(overflow)}; the loss is {loss}"
        if not math.isfinite(self.loss):
            return f"forward: the loss is {self.loss:g}, and no operation in low precision has made it so"
        tightest = min(self.forward, key=lambda record: record.headroom, default=None)
        if tightest is None:
            return "forward: finite; nothing is computed in float16, bfloat16 or float8"
        room = f"{tightest.headroom:.1f} bits of room"
        return f"forward: finite; largest {tightest.largest:.3g} in {tightest.module} ({room})"

    def _backward_lines(self) -> list[str]:
        if self.overflows_above is None:
            if not self.backward:
                return ["backward: no scale fits; the loss is not finite before it is scaled"]
            first = self.overflows_first
            does = "overflows" if first and first.overflowed else "is the first to be given infinity or NaN"
            cause = f", and {_where(first)} {does}" if first else ""
            return [f"backward: no scale fits; it is not finite at a loss scale of {_power(self.loss_scale)}{cause}"]
        if self.init_scale is None or not self._gradients():
            return ["backward: finite; no gradient is computed in float16, bfloat16 or float8"]
        if self.overflows_first is None:
            return ["backward: every gradient in low precision is zero"]
        limit, where = _power(self.overflows_above), _where(self.overflows_first)
        return [f"backward: overflows above a loss scale of {limit}, first in {where}", self._flush_line()]

    def _flush_line(self) -> str:
        scale = self.init_scale or 1.0
        shares = {
            module: _share_flushed(records, scale / self.loss_scale, with_zeros=True)
            for module, records in _by_module(self._gradients()).items()
        }
        worst = max(shares, key=lambda module: shares[module])
        least = self.flushed(scale)
        most = _share_flushed(self._gradients(), scale / self.loss_scale, with_zeros=True)
        # Elements that a ReLU masks are zero at every scale; the record cannot tell them from flushed ones.
        share = _percent(most) if least == most else f"at least {_percent(least)} and at most {_percent(most)}"
        where = f", most in {worst} ({_percent(shares[worst])})" if most else ""
        return f"at {_power(scale)}: {share} of the gradient elements flush to zero{where}"

    def _advice(self) -> str:
        if self.overflows_above is None:
            if not self.backward:
                return "look at the inputs and at the forward pass first"
            if self.overflows_first and not self.overflows_first.overflowed:
                return (
                    "look for a division by zero, or a root or logarithm of zero, in what the model computes after it"
                )
            return "give the loss a smaller weight, or compute what overflows in float32 or bfloat16"
        if self.init_scale is None or not _needs_scaling(self.backward):
            return "use NoScaling()"
        return f"use DynamicScaling(init_scale={_power(self.init_scale)})"


def _exponents(magnitudes: Any) -> dict[int, int]:
    """Return how many of these positive numbers lie in [2**e, 2**(e + 1)), for each exponent `e` that occurs."""
    if not magnitudes.size:
        return {}
    magnitudes.sort()
    lowest, highest = (math.frexp(magnitudes[end])[1] - 1 for end in (0, -1))
    # 2**1024 is not a float64, so that what lies above the last power of two is counted by the size.
    starts = magnitudes.searchsorted([2.0**exponent for exponent in range(lowest, highest + 1)]).tolist()
    ends = [*starts[1:], magnitudes.size]
    return {lowest + n: end - start for n, (start, end) in enumerate(zip(starts, ends, strict=True)) if end > start}


class _Found(NamedTuple):
    scale: float
    records: tuple[OperationRange, ...]
    overflows_above: float | None
    overflows_first: OperationRange | None


def _search(backward: Callable[[float], Iterable[OperationRange]]) -> _Found:
    """Run the backward pass at different scales until the largest finite one is known."""
    scale, too_large, fall = _DEFAULT.init_scale, math.inf, 4
    best: _Found | None = None
    overflow: OperationRange | None = None
    while True:
        records = tuple(backward(scale))
        if _is_finite(records):
            best = _Found(scale, records, *_predict(records, scale))
            scale = min(_next_scale(best), too_large / 2, _DEFAULT.max_scale)
        elif scale <= 1.0:
            return _Found(scale, records, None, _first_overflow(records))
        else:
            too_large, overflow = scale, _first_overflow(records)
            # The first scale may be far too large, so that each reduction has twice the exponent of the last one.
            scale = scale / 2 if best else max(1.0, scale / 2**fall)
            fall *= 2
        if best and scale <= best.scale:
            is_predicted = best.overflows_above is not None and best.overflows_above < too_large
            return best if is_predicted else best._replace(overflows_above=too_large / 2, overflows_first=overflow)


def _is_finite(records: Iterable[OperationRange]) -> bool:
    return not any(record.nonfinite for record in records if record.scaled)


def _predict(records: Iterable[OperationRange], scale: float) -> tuple[float, OperationRange | None]:
    """Return the largest scale at which every record stays finite, and the record that overflows above it."""
    scaled = [record for record in records if record.scaled and record.largest]
    if not _in_low_precision(scaled):
        return math.inf, None
    first = min(scaled, key=lambda record: math.floor(record.headroom))
    return min(scale * 2.0 ** math.floor(first.headroom), LARGEST_SCALE), first


def _next_scale(found: _Found) -> float:
    """Return the scale to try next: the predicted one, or a far larger one if all gradients are zero."""
    if found.overflows_first is None:
        return found.scale * 2.0**16 if _in_low_precision(found.records) else found.scale
    return found.overflows_above or found.scale


def _first_overflow(records: Iterable[OperationRange], *, or_held: bool = True) -> OperationRange | None:
    """Return the first record that produced an infinity or NaN, or else, with `or_held`, that contains one."""
    found = list(records)
    made = (record for record in found if record.overflowed)
    held = (record for record in found if record.nonfinite and or_held)
    return next(made, None) or next(held, None)


def _init_scale(overflows_above: float, records: Iterable[OperationRange]) -> float:
    """Return a scale with one bit of headroom; at most the policy's default if bfloat16 is the only narrow dtype."""
    most = _DEFAULT.max_scale if _needs_scaling(records) else _DEFAULT.init_scale
    return max(_DEFAULT.min_scale, min(overflows_above / 2, most))


def _in_low_precision(records: Iterable[OperationRange]) -> list[OperationRange]:
    """Return the records that the loss scale multiplies and whose dtype has fewer bits than float32."""
    return [record for record in records if record.scaled and record.dtype not in ("float32", "float64")]


def _needs_scaling(records: Iterable[OperationRange]) -> bool:
    return any(record.dtype != "bfloat16" for record in _in_low_precision(records))


def _share_flushed(records: Iterable[OperationRange], factor: float, *, with_zeros: bool = False) -> float:
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


def _by_module(records: Iterable[OperationRange]) -> dict[str, list[OperationRange]]:
    modules: dict[str, list[OperationRange]] = {}
    for record in records:
        modules.setdefault(record.module, []).append(record)
    return modules


def _sum_exponents(records: Iterable[OperationRange]) -> Counter[int]:
    return sum((Counter(record.exponents) for record in records), Counter())


def _require_positive(loss_scale: float) -> float:
    if not 0 < loss_scale < math.inf:
        raise ValueError(f"loss_scale={loss_scale!r} must be a positive, finite number; pass a power of two")
    return loss_scale


def _where(record: OperationRange) -> str:
    return f"{record.module} ({record.operation})"


def _power(scale: float) -> str:
    exponent = math.log2(scale)
    return f"2**{exponent:.0f}" if exponent.is_integer() else f"{scale:g}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def _to_plain(record: OperationRange) -> dict[str, Any]:
    return record._asdict() | {"exponents": sorted(record.exponents.items())}


def _from_plain(plain: dict[str, Any]) -> OperationRange:
    return OperationRange(**plain | {"exponents": dict(plain["exponents"])})


@contextlib.contextmanager
def _restored_random_states() -> Iterator[None]:
    python, numpys = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpys)
