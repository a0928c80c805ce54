"""A report on the magnitudes in one training step: overflows, elements that flush to zero, and a fitting loss scale."""

import contextlib
import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lossscale_core._range_records import (
    GRADIENT,
    NonfiniteInput,
    OperationRange,
    by_module,
    first_overflow,
    from_plain,
    in_low_precision,
    needs_scaling,
    share_flushed,
    to_plain,
)
from lossscale_core._range_search import recommended_floor, recommended_scale, search
from lossscale_core._range_unscaled import UnscaledGradient

_MOST_INPUTS = 3
_NOTHING = "Nothing to draw was computed in float16, bfloat16 or float8."
_GIVEN = "is the first to be given infinity or NaN"
_CAUSES = {
    "inside": "not zero for a loss of zero: see attach, if a loss is added within the graph",
    "nonlinear": "which does not grow with the scale: look for hooks that clamp or normalise gradients",
    "early": "there before the backward pass: return the loss, and leave its backward pass to the report",
}


@dataclass(frozen=True)
class RangeReport:
    """A report on the magnitudes that one forward and one backward pass compute, and the loss scales that fit them.

    An adapter's `range_report` returns it. `str(report)` summarises it in four lines, with more for inputs, weights
    and labels that hold NaN or infinity, and for gradients that do not follow the loss scale.
    """

    loss: float
    """The loss, unscaled."""
    forward: tuple[OperationRange, ...] = field(repr=False)
    """The operations of the forward pass in float16, bfloat16 or float8, in order."""
    backward: tuple[OperationRange, ...] = field(repr=False)
    """The operations of the backward pass in these dtypes, then the parameters' gradients, at `loss_scale`."""
    loss_scale: float
    """The loss scale of `backward`: the largest with which a recorded pass was finite, or 1 if none was.

    If it is below 1 and no scale fits, unscaling by it makes the gradient of a parameter infinite.
    """
    overflows_above: float | None
    """The largest power of two at which every operation and every parameter's gradient is finite.

    Infinity if nothing is computed in float16, bfloat16 or float8, and None if no scale fits.
    """
    init_scale: float | None
    """The recommended first loss scale: half of `overflows_above`, or None if no scale fits.

    It is within the bounds of `DynamicScaling` if `overflows_above` is 1 or more. If it is below 1, the policy needs a
    smaller `min_scale` as well, which the last line of the text names.
    """
    overflows_first: OperationRange | None
    """The operation that overflows first as the scale rises, or that overflows at every scale.

    If the loss is not finite, the first operation that overflows in the forward pass, or else the first that was given
    infinity or NaN, for example by a constant that its dtype cannot hold. None if no operation in low precision was.
    """
    nonfinite_inputs: tuple[NonfiniteInput, ...] = ()
    """The inputs, weights and labels that hold NaN or infinity before the forward pass, in the order of their use."""
    unscaled_gradients: tuple[UnscaledGradient, ...] = ()
    """The gradients that do not follow the loss scale, so that training with another scale gives other weights.

    Looked for only if a scale fits.
    """

    @classmethod
    def measure(
        cls,
        forward: Callable[[], tuple[float, Iterable[OperationRange]]],
        backward: Callable[[float], Iterable[OperationRange]],
        *,
        nonfinite_inputs: Callable[[], Iterable[NonfiniteInput]] = tuple,
        unscaled_gradients: Callable[[float], Iterable[UnscaledGradient]] = lambda _: (),
    ) -> "RangeReport":
        """Make a report from one forward pass and from backward passes at several scales.

        The search begins at the first scale of `DynamicScaling`. The backward pass is linear in the loss scale, so that
        a finite pass predicts where it overflows; a second pass confirms the prediction. The states of Python's and
        NumPy's global random number generators are restored.

        Args:
            forward: Runs the forward pass and returns the loss, unscaled, and the records of its operations.
            backward: Runs the backward pass of the loss times its argument, a loss scale, and returns its records.
            nonfinite_inputs: Returns, after the forward pass, the values that held NaN or infinity before it.
            unscaled_gradients: Returns the gradients that do not follow the loss scale; its argument is the largest
                scale with which a recorded pass was finite.

        Returns:
            The report.
        """
        # A model may draw from them, for dropout or augmentation, and a report must not change the run that follows.
        with _restored_random_states():
            loss, records = forward()
            forward_records, inputs = tuple(records), tuple(nonfinite_inputs())
            if not math.isfinite(loss):
                return cls(loss, forward_records, (), 1.0, None, None, first_overflow(forward_records), inputs)
            found = search(backward)
            unscaled = () if found.overflows_above is None else tuple(unscaled_gradients(found.scale))
        if found.overflows_above is None:
            cause = first_overflow(forward_records, or_held=False) or found.overflows_first
            return cls(loss, forward_records, found.records, found.scale, None, None, cause, inputs)
        init_scale = recommended_scale(found.overflows_above, found.records)
        above, first = found.overflows_above, found.overflows_first
        return cls(loss, forward_records, found.records, found.scale, above, init_scale, first, inputs, unscaled)

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
        return share_flushed(self._gradients(), _require_positive(loss_scale) / self.loss_scale)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as dicts, lists, strings and numbers, which `json.dumps` accepts."""
        plain = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        for name in ("forward", "backward"):
            plain[name] = [to_plain(record) for record in plain[name]]
        for name in ("nonfinite_inputs", "unscaled_gradients"):
            plain[name] = [each._asdict() for each in getattr(self, name)]
        plain["overflows_first"] = None if self.overflows_first is None else to_plain(self.overflows_first)
        return plain

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "RangeReport":
        """Return the report that `to_dict` converted to `plain`."""
        records = {name: tuple(from_plain(each) for each in plain[name]) for name in ("forward", "backward")}
        first = plain["overflows_first"]
        others = {
            "overflows_first": None if first is None else from_plain(first),
            "nonfinite_inputs": tuple(NonfiniteInput(**each) for each in plain.get("nonfinite_inputs", ())),
            "unscaled_gradients": tuple(UnscaledGradient(**each) for each in plain.get("unscaled_gradients", ())),
        }
        return cls(**plain | records | others)

    def __str__(self) -> str:
        first = [*self._input_lines(), self._forward_line()]
        return "\n".join([*first, *self._backward_lines(), *self._unscaled_lines(), self._advice()])

    def _gradients(self) -> list[OperationRange]:
        return [record for record in in_low_precision(self.backward) if record.operation != GRADIENT]

    def _harmful_inputs(self) -> list[NonfiniteInput]:
        """Return the inputs to name in the first line: all with NaN, and those with infinity that may do harm.

        Infinity may be a bound or a mask: harmless if a scale fits, or if an operation with finite inputs overflows.
        Negative infinity is most likely a mask, and not named next to NaN.
        """
        fits, first = self.overflows_above is not None, self.overflows_first
        may_harm = not (fits or (first and first.overflowed))
        has_nan = any(each.nans for each in self.nonfinite_inputs)
        return [
            each
            for each in self.nonfinite_inputs
            if each.nans or (may_harm and (each.infinities or (each.negative_infinities and not has_nan)))
        ]

    def _input_lines(self) -> list[str]:
        inputs = self._harmful_inputs()
        more = f", and {len(inputs) - _MOST_INPUTS} more do" if len(inputs) > _MOST_INPUTS else ""
        named = ", ".join(map(str, inputs[:_MOST_INPUTS]))
        return [f"before the forward pass: {named}{more}"] if inputs else []

    def _forward_line(self) -> str:
        if not math.isfinite(self.loss):
            return self._loss_line()
        if overflow := first_overflow(self.forward, or_held=False):
            return f"forward: overflows in {_where(overflow)}; the loss is finite"
        tightest = min(self.forward, key=lambda record: record.headroom, default=None)
        if tightest is None:
            return "forward: finite; nothing is computed in float16, bfloat16 or float8"
        room = f"{tightest.headroom:.1f} bits of room"
        return f"forward: finite; largest {tightest.largest:.3g} in {tightest.module} ({room})"

    def _loss_line(self) -> str:
        """Return the line about a forward pass with a loss that is not finite."""
        first = self.overflows_first
        if first is None:
            return f"forward: the loss is {self.loss:g}, and no operation in low precision has made it so"
        if first.overflowed:
            return f"forward: overflows in {_where(first)}; the loss is {self.loss:g}"
        return f"forward: the loss is {self.loss:g}, and {_where(first)} {_GIVEN}"

    def _backward_lines(self) -> list[str]:
        if self.overflows_above is None:
            if not self.backward:
                return ["backward: not run, since the loss is not finite before it is scaled"]
            first = self.overflows_first
            if first and first.operation == GRADIENT and not first.nonfinite:
                finite = f"{_where(first)} is finite at a loss scale of {_power(self.loss_scale)}"
                return [f"backward: no scale fits; {finite}, and overflows when unscaled"]
            if first and first.overflowed:
                return [f"backward: overflows even at a loss scale of {self.loss_scale:g}, first in {_where(first)}"]
            cause = f"; {_where(first)} {_GIVEN}" if first else ""
            return [f"backward: not finite even at a loss scale of {self.loss_scale:g}{cause}"]
        if self.init_scale is None or not self._gradients():
            return ["backward: finite; no gradient is computed in float16, bfloat16 or float8"]
        if self.overflows_first is None:
            return ["backward: every gradient in low precision is zero"]
        limit, where = _power(self.overflows_above), _where(self.overflows_first)
        return [f"backward: overflows above a loss scale of {limit}, first in {where}", self._flush_line()]

    def _unscaled_lines(self) -> Iterator[str]:
        for cause, text in _CAUSES.items():
            names = [each.name for each in self.unscaled_gradients if each.cause == cause]
            if names:
                do = "gradient does" if len(names) == 1 else "gradients do"
                yield f"{len(names)} {do} not follow the loss scale, first {names[0]}, {text}"

    def _flush_line(self) -> str:
        scale = self.init_scale or 1.0
        shares = {
            module: share_flushed(records, scale / self.loss_scale, with_zeros=True)
            for module, records in by_module(self._gradients()).items()
        }
        worst = max(shares, key=lambda module: shares[module])
        least = self.flushed(scale)
        most = share_flushed(self._gradients(), scale / self.loss_scale, with_zeros=True)
        # Elements that a ReLU masks are zero at every scale; the record cannot distinguish them from flushed ones.
        share = _percent(most) if least == most else f"at least {_percent(least)} and at most {_percent(most)}"
        where = f", most in {worst} ({_percent(shares[worst])})" if most else ""
        return f"at {_power(scale)}: {share} of the gradient elements flush to zero{where}"

    def _advice(self) -> str:
        if self.overflows_above is None:
            return self._advice_if_no_scale_fits()
        if self.init_scale is None or not needs_scaling(self.backward):
            return "use NoScaling()"
        floor = recommended_floor(self.init_scale)
        bound = "" if floor is None else f", min_scale={_power(floor)}"
        return f"use DynamicScaling(init_scale={_power(self.init_scale)}{bound})"

    def _advice_if_no_scale_fits(self) -> str:
        if self._harmful_inputs():
            return "replace NaN and infinity there first"
        given = self.overflows_first
        if given is None or given.overflowed or not given.nonfinite:
            if not self.backward:
                return "look at the inputs and at the forward pass first"
            return "give the loss a smaller weight, or compute what overflows in float32 or bfloat16"
        if not self.backward:
            first = "look at the inputs and constants of that operation first"
            return f"{first}; a number too large for {given.dtype} is infinite"
        return "look for a division by zero, or a root or logarithm of zero, in what the model computes after it"


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


@contextlib.contextmanager
def _restored_random_states() -> Iterator[None]:
    python, numpys = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpys)


RangeReport.__module__ = "lossscale_core"  # a pickle stores it, and the private module may change
