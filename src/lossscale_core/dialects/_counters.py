"""The counters that records are made of: where a saved scaler's counts are placed under a policy of ours."""

from typing import Any

from lossscale_core.dialects._readings import NEVER
from lossscale_core.dialects._record import Counter

# In all of these the first argument is the policy, and the others are what was saved.


def count(names: str, *, optional: bool = False, equal: bool = False) -> Counter:
    """Return a counter that is ours under another name; a tolerance below 0 is used up, as 0 is.

    `equal` says that the original grows its scale only where the counter equals its interval.
    """
    place = lambda _, value: max(int(value), 0)  # noqa: E731
    return Counter("the same", (tuple(names.split()),), place, optional=optional, equal=equal)


def left_to_one(names: str) -> Counter:
    """Return a count of overflows left, of a tool that backs off where it equals 1: from below 1 it never does."""

    def place(_: Any, value: float) -> int:
        return int(value) if value >= 1 else NEVER

    return Counter("the same; below 1 the scale never backs off", (tuple(names.split()),), place, optional=True)


def used(names: str, *, optional: bool = False) -> Counter:
    """Return a count of overflows so far, where ours counts those left."""

    def left(policy: Any, used: float) -> int:
        return max(int(policy.hysteresis) - int(used), 0)

    return Counter("`hysteresis` − it", (tuple(names.split()),), left, needs="hysteresis", optional=optional)


def _clean_steps(policy: Any, now: float, last: float) -> int:
    """Return the tracker after the finite steps between two iterations, of which each window grew the scale."""
    clean = int(now) - int(last) - 1
    cooldown = int(getattr(policy, "cooldown", 0))
    return clean - cooldown if clean < cooldown else (clean - cooldown) % int(policy.growth_interval)


def since_overflow(now: str, last: str, *, optional: bool = False) -> Counter:
    """Return a pair of iteration numbers, the present one and that of the last overflow; growth leaves both alone."""
    text = "(now − last − 1 − `cooldown`) modulo `growth_interval`"
    names = (tuple(now.split()), tuple(last.split()))
    return Counter(text, names, _clean_steps, needs="growth_interval", optional=optional)


def since_change(now: str, last: str, *, optional: bool = False) -> Counter:
    """Return a pair of iteration numbers, the present one and that of the last overflow or growth."""
    names = (tuple(now.split()), tuple(last.split()))
    return Counter("now − last − 1", names, lambda _, now, last: int(now) - int(last) - 1, optional=optional)
