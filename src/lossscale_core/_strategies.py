"""Hypothesis strategies behind `lossscale_core.testing`; apart, because hypothesis is no dependency of the package."""

from typing import Any

from hypothesis import strategies as st

from lossscale_core._config import KINDS
from lossscale_core._policy import ScalingPolicy
from lossscale_core._settings import (
    BACKOFF_FACTOR,
    COUNT,
    COUNT_OR_NONE,
    COUNT_OR_ZERO,
    FLAG,
    GROWTH_FACTOR,
    LARGEST_SCALE,
    SCALE,
    SHARE,
    SMALLEST_SCALE,
    rules_of,
)

_SCALES = ("min_scale", "init_scale", "max_scale")


def policies_of(kinds: tuple[str, ...], powers_of_two: bool | None) -> st.SearchStrategy[ScalingPolicy]:
    """Return valid policies of `kinds`, all with powers of two or none in particular; None mixes both sorts."""
    sorts = st.booleans() if powers_of_two is None else st.just(powers_of_two)
    return st.tuples(st.sampled_from(kinds), sorts).flatmap(lambda drawn: _policies_of_kind(KINDS[drawn[0]], drawn[1]))


def runs_of_flags(max_steps: int) -> st.SearchStrategy[list[bool]]:
    """Return flags in runs, since single random flags almost never reach a growth interval."""
    runs = st.tuples(st.booleans(), st.integers(1, max(1, max_steps // 4)))
    joined = st.lists(runs, max_size=20).map(lambda parts: [flag for flag, length in parts for _ in range(length)])
    return joined.map(lambda flags: flags[:max_steps])


def _policies_of_kind(policy_type: Any, powers_of_two: bool) -> st.SearchStrategy[ScalingPolicy]:
    rules = {field.name: rule for field, rule in rules_of(policy_type)}
    values = {name: _values(rule, powers_of_two) for name, rule in rules.items() if name not in _SCALES}
    scale = _values(SCALE, powers_of_two)
    if "min_scale" in rules:
        scales = st.lists(scale, min_size=3, max_size=3).map(
            lambda three: dict(zip(_SCALES, sorted(three), strict=True))
        )
    else:
        scales = st.fixed_dictionaries({"init_scale": scale} if "init_scale" in rules else {})
    return st.tuples(scales, st.fixed_dictionaries(values)).map(lambda parts: policy_type(**parts[0], **parts[1]))


def _values(rule: Any, powers_of_two: bool) -> st.SearchStrategy[Any]:
    small_counts = {COUNT: st.integers(1, 12), COUNT_OR_ZERO: st.integers(0, 12)}
    exponents = {SCALE: (-126, 126), GROWTH_FACTOR: (1, 8), BACKOFF_FACTOR: (-8, -1)}
    floats = {
        SCALE: st.floats(SMALLEST_SCALE, LARGEST_SCALE, width=32),
        GROWTH_FACTOR: st.floats(1.0009765625, 16.0, width=32),
        BACKOFF_FACTOR: st.floats(0.0625, 0.9990234375, width=32),
        SHARE: st.floats(0.0, 1.0, width=32),
        FLAG: st.booleans(),
        COUNT_OR_NONE: st.none() | st.integers(1, 12),
    }
    if rule in small_counts:
        return small_counts[rule]
    if powers_of_two and rule in exponents:
        return st.integers(*exponents[rule]).map(lambda exponent: 2.0**exponent)
    return floats[rule]
