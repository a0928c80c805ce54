"""Hypothesis strategies for `lossscale_core.testing`; a separate module, since the package does not need hypothesis."""

from typing import Any

from hypothesis import strategies as st

from lossscale_core._base import KINDS, ScalingPolicy
from lossscale_core._settings import BACKOFF_FACTOR, GROWTH_FACTOR, SCALE, Rule, rules_of

_USUAL = {GROWTH_FACTOR: (1.0009765625, 16.0), BACKOFF_FACTOR: (0.0625, 0.9990234375)}
"""Ranges of the factors that are narrower than the rules', so that a scale changes by a realistic amount."""
_SCALES = ("min_scale", "init_scale", "max_scale")


def policies_of(kinds: tuple[str, ...], powers_of_two: bool | None) -> st.SearchStrategy[ScalingPolicy]:
    """Return a strategy for policies of `kinds`, with powers of two only, with any numbers, or (None) with both."""
    choices = st.booleans() if powers_of_two is None else st.just(powers_of_two)
    return st.tuples(st.sampled_from(kinds), choices).flatmap(
        lambda drawn: _policies_of_kind(KINDS[drawn[0]], drawn[1])
    )


def runs_of_flags(max_steps: int) -> st.SearchStrategy[list[bool]]:
    """Return a strategy for runs of equal flags, since independent flags almost never reach a growth interval."""
    runs = st.tuples(st.booleans(), st.integers(1, max(1, max_steps // 4)))
    joined = st.lists(runs, max_size=20).map(lambda parts: [flag for flag, length in parts for _ in range(length)])
    return joined.map(lambda flags: flags[:max_steps])


def _policies_of_kind(policy_type: Any, powers_of_two: bool) -> st.SearchStrategy[ScalingPolicy]:
    rules = {field.name: rule for field, rule in rules_of(policy_type)}
    values = {name: _values(rule, powers_of_two) for name, rule in rules.items() if name not in _SCALES}
    scale = _values(SCALE, powers_of_two)
    names = [name for name in _SCALES if name in rules]
    scales = st.lists(scale, min_size=len(names), max_size=len(names)).map(
        lambda drawn: dict(zip(names, sorted(drawn), strict=True))
    )
    return st.tuples(scales, st.fixed_dictionaries(values)).map(lambda parts: policy_type(**parts[0], **parts[1]))


def _values(rule: Rule, powers_of_two: bool) -> st.SearchStrategy[Any]:
    exponents = {SCALE: (-126, 126), GROWTH_FACTOR: (1, 8), BACKOFF_FACTOR: (-8, -1)}
    if powers_of_two and rule in exponents:
        return st.integers(*exponents[rule]).map(lambda exponent: 2.0**exponent)
    if rule.type is bool:
        return st.booleans()
    if rule.type is int:
        counts = st.integers(int(rule.minimum), 12)
        return st.none() | counts if rule.optional else counts
    low, high = _USUAL.get(rule, (rule.minimum, rule.maximum))
    # A setting that float32 cannot hold would round in the state, and compare unequal there.
    return st.floats(low, high, width=32)
