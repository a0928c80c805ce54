"""The search for the largest loss scale at which a backward pass is finite."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from lossscale_core._policy import DynamicScaling
from lossscale_core._range_records import GRADIENT, OperationRange, first_overflow, in_low_precision, needs_scaling
from lossscale_core._settings import LARGEST_SCALE, SMALLEST_SCALE

_DEFAULT = DynamicScaling()


class Found(NamedTuple):
    """The last finite pass, or the pass at a scale of 1 if no scale fits, and what its records predict."""

    scale: float
    records: tuple[OperationRange, ...]
    overflows_above: float | None
    overflows_first: OperationRange | None


def search(backward: Callable[[float], Iterable[OperationRange]]) -> Found:
    """Run the backward pass at different scales until the largest finite one is known."""
    scale, too_large, fall = _DEFAULT.init_scale, math.inf, 4
    best: Found | None = None
    overflow: OperationRange | None = None
    at_one: Found | None = None
    while True:
        records = tuple(backward(scale))
        if _is_finite(records):
            best = Found(scale, records, *_predict(records, scale))
            scale = min(_next_scale(best), too_large / 2, _DEFAULT.max_scale)
        else:
            too_large, overflow = scale, first_overflow(records)
            if scale == 1.0:
                at_one = Found(scale, records, None, overflow)
            if at_one and scale <= SMALLEST_SCALE:
                return at_one
            # The first scale may be far too large, so that each reduction has twice the exponent of the last one.
            scale = scale / 2 if best else max(scale / 2**fall, 1.0 if scale > 1.0 else SMALLEST_SCALE)
            fall *= 2
        if best and scale <= best.scale:
            is_predicted = best.overflows_above is not None and best.overflows_above < too_large
            limit = best if is_predicted else best._replace(overflows_above=too_large / 2, overflows_first=overflow)
            return limit if at_one is None else _below_one(limit, at_one)


def _below_one(found: Found, at_one: Found) -> Found:
    """Return the pass at a limit below 1, or the pass at 1 if no scale below 1 is useful."""
    # If all elements flush to zero, the pass is finite, but nothing is trained.
    if not any(record.largest for record in found.records if record.scaled):
        return at_one
    # Gradients are divided by the scale in their own dtype, so that a scale below 1 makes them larger again.
    for record in found.records:
        if record.operation == GRADIENT and record.headroom + math.log2(found.scale) < 0.0:
            return found._replace(overflows_above=None, overflows_first=record)
    return found


def _is_finite(records: Iterable[OperationRange]) -> bool:
    return not any(record.nonfinite for record in records if record.scaled)


def _predict(records: Iterable[OperationRange], scale: float) -> tuple[float, OperationRange | None]:
    """Return the largest scale at which every record stays finite, and the record that overflows above it."""
    scaled = [record for record in records if record.scaled and record.largest]
    if not in_low_precision(scaled):
        return math.inf, None
    first = min(scaled, key=lambda record: math.floor(record.headroom))
    return min(scale * 2.0 ** math.floor(first.headroom), LARGEST_SCALE), first


def _next_scale(found: Found) -> float:
    """Return the scale to try next: the predicted one, or a far larger one if all gradients are zero."""
    if found.overflows_first is None:
        return found.scale * 2.0**16 if in_low_precision(found.records) else found.scale
    return found.overflows_above or found.scale


def recommended_scale(overflows_above: float, records: Iterable[OperationRange]) -> float:
    """Return a scale with one bit of headroom; at most the policy's default if bfloat16 is the only narrow dtype."""
    most = _DEFAULT.max_scale if needs_scaling(records) else _DEFAULT.init_scale
    least = _DEFAULT.min_scale if overflows_above >= _DEFAULT.min_scale else SMALLEST_SCALE
    return max(least, min(overflows_above / 2, most))


def recommended_floor(init_scale: float) -> float | None:
    """Return the `min_scale` of a policy with a first scale below the default one; None if the default fits."""
    return None if init_scale >= _DEFAULT.min_scale else max(SMALLEST_SCALE, init_scale * 2.0**-8)
