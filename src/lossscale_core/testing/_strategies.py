"""Hypothesis strategies for policies and for the flags of a run; hypothesis is imported when they are called."""

from typing import TYPE_CHECKING, Any

from lossscale_core._base import KINDS, ScalingPolicy
from lossscale_core._policy import LIBRARY_KINDS
from lossscale_core._settings import BACKOFF_FACTOR, GROWTH_FACTOR, SCALE, Rule, rules_of

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

_USUAL = {GROWTH_FACTOR: (1.0009765625, 16.0), BACKOFF_FACTOR: (0.0625, 0.9990234375)}
"""Ranges of the factors that are narrower than the rules', so that a scale changes by a realistic amount."""
_SCALES = ("min_scale", "init_scale", "max_scale")


def policies(*kinds: str, powers_of_two: bool | None = None) -> "SearchStrategy[ScalingPolicy]":
    """Return a hypothesis strategy for valid policies. Needs hypothesis.

    Args:
        *kinds: The kinds of the policies; the library's four kinds if left out.
        powers_of_two: True for scales and factors that are powers of two, with which every framework agrees bit for
            bit; False for any numbers; None for half of each.

    Returns:
        A strategy that generates policies.

    Raises:
        ValueError: A kind is unknown.
        ModuleNotFoundError: hypothesis is not installed.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is not a kind of policy; pass some of {', '.join(KINDS)}")
    st = _hypothesis()
    choices: Any = st.booleans() if powers_of_two is None else st.just(powers_of_two)
    drawn: SearchStrategy[ScalingPolicy] = st.tuples(st.sampled_from(kinds or LIBRARY_KINDS), choices).flatmap(
        lambda pair: _policies_of_kind(st, KINDS[pair[0]], pair[1])
    )
    return drawn


def overflow_traces(max_steps: int = 200) -> "SearchStrategy[list[bool]]":
    """Return a hypothesis strategy for the flags that `simulate` takes. Needs hypothesis.

    Args:
        max_steps: The largest number of flags.

    Returns:
        A strategy that generates lists of bools, with several equal flags in a row.

    Raises:
        ModuleNotFoundError: hypothesis is not installed.
    """
    st = _hypothesis()
    # Runs of equal flags, since independent flags almost never reach a growth interval.
    runs = st.lists(st.tuples(st.booleans(), st.integers(1, max(1, max_steps // 4))), max_size=20)
    drawn: SearchStrategy[list[bool]] = runs.map(
        lambda parts: [flag for flag, length in parts for _ in range(length)][:max_steps]
    )
    return drawn


def _hypothesis() -> Any:
    try:
        from hypothesis import strategies
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "strategies for policies and traces need hypothesis; run: pip install hypothesis", name=error.name
        ) from error
    return strategies


def _policies_of_kind(st: Any, policy_type: Any, powers_of_two: bool) -> Any:
    rules = {field.name: rule for field, rule in rules_of(policy_type)}
    values = {name: _values(st, rule, powers_of_two) for name, rule in rules.items() if name not in _SCALES}
    scale = _values(st, SCALE, powers_of_two)
    names = [name for name in _SCALES if name in rules]
    scales = st.lists(scale, min_size=len(names), max_size=len(names)).map(
        lambda drawn: dict(zip(names, sorted(drawn), strict=True))
    )
    return st.tuples(scales, st.fixed_dictionaries(values)).map(lambda parts: policy_type(**parts[0], **parts[1]))


def _values(st: Any, rule: Rule, powers_of_two: bool) -> Any:
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
