"""Hypothesis strategies for policies and for the flags of a run, and flags in short."""

import re

from hypothesis import strategies as st

from lossscale_core._base import KINDS
from lossscale_core._settings import RULES, SCALE, rules_of

GROWTH_FACTOR, BACKOFF_FACTOR = RULES["growth_factor"], RULES["backoff_factor"]
LIBRARY_KINDS = ("none", "fixed", "dynamic")
_USUAL = {GROWTH_FACTOR: (1.0009765625, 16.0), BACKOFF_FACTOR: (0.0625, 0.9990234375)}
"""Ranges of the factors that are narrower than the rules', so that a scale changes by a realistic amount."""
_SCALES = ("min_scale", "init_scale", "max_scale")


def policies(*kinds):
    """Return a strategy for valid policies of these kinds, or of the library's.

    In half of the policies scales and factors are powers of two, with which every framework agrees bit for bit.
    """
    return st.tuples(st.sampled_from(kinds or LIBRARY_KINDS), st.booleans()).flatmap(
        lambda pair: _policies_of_kind(KINDS[pair[0]], pair[1])
    )


def overflow_traces(max_steps=200):
    """Return a strategy for the flags that `simulate` takes, at most `max_steps` of them."""
    # Runs of equal flags, since independent flags almost never reach a growth interval.
    runs = st.lists(st.tuples(st.booleans(), st.integers(1, max(1, max_steps // 4))), max_size=20)
    return runs.map(lambda parts: [flag for flag, length in parts for _ in range(length)][:max_steps])


def flags(runs):
    """Return the flags of a run such as "11F 150T": eleven overflows, and then 150 finite steps."""
    return [kind == "T" for count, kind in re.findall(r"(\d+)([TF])", runs) for _ in range(int(count))]


def _policies_of_kind(policy_type, powers_of_two):
    rules = {field.name: rule for field, rule in rules_of(policy_type)}
    values = {name: _values(rule, powers_of_two) for name, rule in rules.items() if name not in _SCALES}
    names = [name for name in _SCALES if name in rules]
    scales = st.lists(_values(SCALE, powers_of_two), min_size=len(names), max_size=len(names)).map(
        lambda drawn: dict(zip(names, sorted(drawn), strict=True))
    )
    return st.tuples(scales, st.fixed_dictionaries(values)).map(lambda parts: policy_type(**parts[0], **parts[1]))


def _values(rule, powers_of_two):
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
