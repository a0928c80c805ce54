"""The counters that records are made of: where a saved scaler's counts are placed under a policy of ours."""

from typing import Any

from lossscale_core.dialects._readings import NEVER
from lossscale_core.dialects._record import Counter, NoCounterpartError

# In all of these the first argument is the policy, and the others are what was saved.


def count(names: str, *, optional: bool = False, equal: bool = False) -> Counter:
    """Return a counter that is ours under another name.

    `equal` says that the original grows its scale only where the counter equals its interval.
    """

    def place(_: Any, value: int) -> int:
        return _at_least(0, value)

    return Counter("the same", (tuple(names.split()),), place, optional=optional, equal=equal)


def left(names: str, *, optional: bool = False) -> Counter:
    """Return a count of overflows left until the scale falls; below 0 none is, as at 0."""

    def place(_: Any, value: int) -> int:
        return max(value, 0)

    return Counter("the same", (tuple(names.split()),), place, optional=optional)


def left_to_one(names: str) -> Counter:
    """Return a count of overflows left, of a tool that backs off where it equals 1: from below 1 it never does."""

    def place(_: Any, value: int) -> int:
        return value if value >= 1 else NEVER

    return Counter("the same; below 1 the scale never backs off", (tuple(names.split()),), place, optional=True)


def used(names: str, *, optional: bool = False) -> Counter:
    """Return a count of overflows so far, where ours counts those left."""

    def place(policy: Any, used: int) -> int:
        return max(int(policy.hysteresis) - _at_least(0, used), 0)

    return Counter("`hysteresis` − it", (tuple(names.split()),), place, needs="hysteresis", optional=optional)


def _at_least(lowest: int, value: int) -> int:
    if value < lowest:
        raise NoCounterpartError(f"a count cannot be below {lowest}")
    return value


def _between(now: int, last: int) -> int:
    """Return how many steps lie between two iterations."""
    if last >= now:
        raise NoCounterpartError("the last one must lie before the present one")
    return now - last - 1


def _clean_steps(policy: Any, now: int, last: int) -> int:
    """Return the tracker after the finite steps between two iterations, of which each window grew the scale."""
    clean = _between(now, last)
    cooldown = int(policy.cooldown)
    return clean - cooldown if clean < cooldown else (clean - cooldown) % int(policy.growth_interval)


def since_overflow(now: str, last: str, *, optional: bool = False) -> Counter:
    """Return a pair of iteration numbers, the present one and that of the last overflow; growth leaves both alone."""
    text = "(now − last − 1 − `cooldown`) modulo `growth_interval`"
    names = (tuple(now.split()), tuple(last.split()))
    return Counter(text, names, _clean_steps, needs="growth_interval", optional=optional)


def since_change(now: str, last: str, *, optional: bool = False) -> Counter:
    """Return a pair of iteration numbers, the present one and that of the last overflow or growth."""
    names = (tuple(now.split()), tuple(last.split()))
    return Counter("now − last − 1", names, lambda _, now, last: _between(now, last), optional=optional)
