"""The readings in records: conversions between the values of other tools' keys and settings."""

import math
from collections.abc import Callable
from typing import Any

from lossscale.dialects._record import Meaning, NoCounterpartError, Reading
from lossscale_core.adapters import LARGEST_SCALE, SMALLEST_SCALE

NEVER = 2**31 - 1
"""A count that no run reaches; a scale with this interval never grows."""
UNBOUNDED = {"min_scale": SMALLEST_SCALE, "max_scale": LARGEST_SCALE}
FLOOR_OF_ONE = {"min_scale": 1.0, "max_scale": LARGEST_SCALE}
HALVES = {"growth_factor": 2.0, "backoff_factor": 0.5}
FIXED_BUG = "applies infinite gradients under a fixed scale; FixedScaling skips the steps that overflow"


def number(setting: str) -> Reading:
    """Return the reading of a key that has the same value as this setting."""
    return Reading(f"`{setting}`", lambda value: Meaning({setting: value}))


INIT_SCALE = number("init_scale")
GROWTH_FACTOR = number("growth_factor")
BACKOFF_FACTOR = number("backoff_factor")


def real(value: Any) -> float:
    """Return a number, or text that contains a number, as a float."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    except OverflowError:
        raise NoCounterpartError("it is larger than every float; pass a smaller number") from None
    if math.isnan(number):
        raise NoCounterpartError("it must be a number")
    return number


def whole(value: Any) -> int:
    """Return a whole number, such as 1000 or 1000.0, as an int."""
    number = real(value)
    if not math.isfinite(number) or number != int(number):
        raise NoCounterpartError("it must be a whole number")
    return int(number)


def _read_power(value: Any) -> Meaning:
    power = whole(value)
    if abs(power) > 126:
        raise NoCounterpartError("it must be from -126 to 126, so that the scale is from 2**-126 to 2**126")
    return Meaning({"init_scale": 2.0**power})


POWER_OF_TWO = Reading("`init_scale` = 2**value", _read_power)


def _read_factor(value: Any) -> Meaning:
    factor = real(value)
    if factor <= 0:
        raise NoCounterpartError("it must be above 1")
    return Meaning({"growth_factor": factor, "backoff_factor": 1.0 / factor})


FACTOR = Reading("`growth_factor`, and `backoff_factor` = 1 / value", _read_factor)


def _read_two(value: Any) -> Meaning:
    if real(value) != 2.0:
        raise NoCounterpartError("the original takes only 2")
    return Meaning({})


ONLY_TWO = Reading("2, or refused as there", _read_two)


def _read_true(value: Any) -> Meaning:
    if not _flag(value):
        raise NoCounterpartError("the original takes only true; use FixedScaling instead of false")
    return Meaning({})


ONLY_TRUE = Reading("true, or refused as there", _read_true)
IGNORED_FACTOR = Reading(
    "nothing, as there: the factors stay 2 and 0.5",
    lambda value: Meaning({}, "" if real(value) == 2.0 else "is ignored there and here: the factors are 2 and 0.5"),
)

_NEVER_GROWS = "never grows the scale there, because the count of steps never equals it, nor does it here"
_NEVER_BACKS_OFF = (
    "never lowers the scale there, because the count of overflows never equals it, nor does it here; "
    "pass 1 to lower it at once"
)


def _counted(value: Any, bug: str, setting: str, more: int = 0) -> Meaning:
    """Return the meaning of a count that the original compares with `==`."""
    count = real(value)
    if math.isfinite(count) and count == math.floor(count) and count + more >= 1:
        return Meaning({setting: int(min(count, NEVER - more)) + more})
    return Meaning({setting: NEVER}, bug)


def _exactly(setting: str, bug: str, text: str, more: int = 0) -> Reading:
    return Reading(text, lambda value: _counted(value, bug, setting, more))


def _at_least(setting: str, rounded: Callable[[float], int], text: str) -> Reading:
    """Return the reading of a count that the original compares with `>=`."""

    def read(value: Any) -> Meaning:
        return Meaning({setting: rounded(min(max(real(value), 1.0), NEVER))})

    return Reading(f"`{setting}`; below 1 is 1{text}", read)


INTERVAL_EQUAL = _exactly("growth_interval", _NEVER_GROWS, "`growth_interval`; below 1 the scale never grows")


def _read_apex_window(value: Any) -> Meaning:
    if real(value) == 0:
        raise NoCounterpartError(
            "an overflow there halves the scale and doubles it again; use FixedScaling, which has the same effect"
        )
    return INTERVAL_EQUAL.read(value)


APEX_INTERVAL = Reading(INTERVAL_EQUAL.text, _read_apex_window)
INTERVAL_ONE_LATER = _exactly(
    "growth_interval", _NEVER_GROWS, "`growth_interval` = value + 1; below 0 the scale never grows", more=1
)
# https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/training/experimental/loss_scale.py#L346
INTERVAL_CUT = _at_least("growth_interval", math.floor, ", and a fraction is cut off")
HYSTERESIS_EQUAL = _exactly("hysteresis", _NEVER_BACKS_OFF, "`hysteresis`; below 1 the scale never backs off")
HYSTERESIS = number("hysteresis")
INTERVAL_MODULO = Reading(
    "`growth_interval`",
    lambda value: Meaning({"growth_interval": min(whole(value), NEVER)}),
)


def _read_floor(value: Any) -> Meaning:
    # The documentation of flax has this text for its default: jnp.finfo(jnp.float32).tiny, which is 2**-126.
    if value == "float32 tiny":
        return Meaning({"min_scale": SMALLEST_SCALE})
    return Meaning({"min_scale": max(real(value or 0.0), SMALLEST_SCALE)})


def _read_ceiling(value: Any) -> Meaning:
    return Meaning({"max_scale": min(real(value or LARGEST_SCALE), LARGEST_SCALE)})


def _read_bound(value: Any) -> Meaning:
    return Meaning({"min_scale": max(real(value), SMALLEST_SCALE)})


def _read_positive_bound(value: Any) -> Meaning:
    if real(value) <= 0:
        raise NoCounterpartError("it must be above 0, as there")
    return _read_bound(value)


MIN_SCALE = Reading("`min_scale`; below 2**-126 is 2**-126", _read_bound)
POSITIVE_MIN_SCALE = Reading("`min_scale`; above 0, below 2**-126 is 2**-126", _read_positive_bound)
FLOOR = Reading("`min_scale`; None or 0 is 2**-126", _read_floor)
MAX_SCALE = Reading("`max_scale`; 2**126 at most", _read_ceiling)


def _read_whole_floor(value: Any) -> Meaning:
    if whole(value) < 1:
        raise NoCounterpartError("it must be at least 1")
    return Meaning({"min_scale": float(whole(value))})


WHOLE_FLOOR = Reading("`min_scale`, a whole number", _read_whole_floor)


def _flag(value: Any) -> bool:
    # 0 and 1 are equal to False and True, and command lines write them.
    if value in (True, False):
        return bool(value)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise NoCounterpartError("it must be true or false")


REFILL_ON_FINITE = Reading(
    "`refill_on_finite`",
    lambda value: Meaning({"refill_on_finite": _flag(value)}),
)


def _read_enabled(value: Any) -> Meaning:
    return Meaning({} if _flag(value) else {"kind": "none"})


ENABLED = Reading("false: `NoScaling()`", _read_enabled)


def _read_dynamic(value: Any) -> Meaning:
    if not isinstance(value, bool):
        raise NoCounterpartError("it must be true or false")
    return Meaning({} if value else {"kind": "fixed"})


DYNAMIC = Reading("false: `FixedScaling` at the initial scale", _read_dynamic)


def fixed_unless(*dynamic: Any) -> Reading:
    """Return the reading of a key that holds a fixed scale, or one of the values that mean a dynamic scale."""

    def read(value: Any) -> Meaning:
        # False equals 0, which means dynamic for some tools; `real` refuses a bool.
        if value in dynamic and not isinstance(value, bool):
            return Meaning({})
        number = real(value)
        return Meaning({} if number in dynamic else {"kind": "fixed", "init_scale": number})

    words = " or ".join(repr(word) for word in dynamic)
    return Reading(f"{words}: dynamic; another number: `FixedScaling(number)`", read)


FIXED = Reading(
    "`FixedScaling(number)`",
    lambda value: Meaning({"kind": "fixed", "init_scale": real(value)}),
)


def left_to_the_state(name: str) -> Reading:
    """Return the reading of a counter among the constructor's arguments."""
    bug = f"is part of the state; pass it to state_from_tool, since a policy's run starts with {name}=0"
    return Reading("left to `state_from_tool`", lambda value: Meaning({}, bug if value else ""))
