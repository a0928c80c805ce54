"""The kinds of counters in records: each converts a saved scaler's counts to a field of the state."""

from typing import Any

from lossscale.dialects._readings import NEVER
from lossscale.dialects._record import Counter, NoCounterpartError

# Every conversion takes the policy first, and then the saved counts.


def count(names: str, *, optional: bool = False, equal: bool = False) -> Counter:
    """Return a counter that equals the field of the state.

    With `equal`, the original grows its scale only if the counter equals its interval.
    """

    def place(_: Any, value: int) -> int:
        return _at_least(0, value)

    return Counter("the same", (tuple(names.split()),), place, optional=optional, equal=equal)


def left(names: str, *, optional: bool = False) -> Counter:
    """Return a counter of the overflows left before the scale backs off; negative counts mean 0."""

    def place(_: Any, value: int) -> int:
        return max(value, 0)

    return Counter("the same", (tuple(names.split()),), place, optional=optional)


def left_to_one(names: str) -> Counter:
    """Return a counter of the overflows left, of a tool that backs off only if it equals 1, never below."""

    def place(_: Any, value: int) -> int:
        # The tool would count down from here without end, and compares with 1 only.
        return value if value >= 1 else NEVER

    return Counter("the same; below 1 the scale never backs off", (tuple(names.split()),), place, optional=True)


def used(names: str, *, optional: bool = False) -> Counter:
    """Return a counter of the overflows so far; the field of the state counts those left."""

    def place(policy: Any, used: int) -> int:
        return max(int(policy.hysteresis) - _at_least(0, used), 0)

    return Counter("`hysteresis` − it", (tuple(names.split()),), place, needs="hysteresis", optional=optional)


def _at_least(lowest: int, value: int) -> int:
    if value < lowest:
        raise NoCounterpartError(f"a count cannot be below {lowest}")
    return value


def _between(now: int, last: int) -> int:
    """Return the number of steps between two iterations."""
    if last >= now:
        raise NoCounterpartError("the last iteration must be before the present one")
    return now - last - 1


def _clean_steps(policy: Any, now: int, last: int) -> int:
    """Return the growth tracker after the finite steps between two iterations, given that full windows grew it."""
    clean = _between(now, last)
    cooldown = int(policy.cooldown)
    return clean - cooldown if clean < cooldown else (clean - cooldown) % int(policy.growth_interval)


def since_overflow(now: str, last: str, *, optional: bool = False) -> Counter:
    """Return a counter from the present iteration and that of the last overflow; growth changes neither."""
    text = "(now − last − 1 − `cooldown`) modulo `growth_interval`"
    names = (tuple(now.split()), tuple(last.split()))
    return Counter(text, names, _clean_steps, needs="growth_interval", optional=optional)
