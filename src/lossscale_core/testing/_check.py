"""A check of the rules that the `update` of any policy keeps."""

import importlib.util
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lossscale_core._config import PolicyLike, as_policy
from lossscale_core._messages import shown
from lossscale_core._settings import LARGEST_COUNT, LARGEST_SCALE, SMALLEST_SCALE
from lossscale_core._state import ScaleState
from lossscale_core.testing._simulation import simulate

_FLAGS = [False, False, True, False, True, True, False, False, False, *[True] * 6, False] * 5
_COUNTERS = ("growth_tracker", "steps", "skipped_steps", "overflow_streak")


def check_policy(policy: PolicyLike) -> None:
    """Check that a policy keeps the rules of `ScalingPolicy`, over 80 steps from its first state and from full counts.

    Each field keeps its dtype and its shape; `steps`, `skipped_steps` and `overflow_streak` count; a full counter stays
    full; `update` is pure; and host scalars, NumPy arrays, arrays without a truth value, as while a function is traced,
    and arrays of array-api-strict, if it is installed, have the same states, bit for bit. Over 300 overflows, and over
    5000 finite steps, the loss scale stays from 2**-126 to 2**126: there its reciprocal is a normal float32 number.

    Args:
        policy: Anything that `as_policy` accepts.

    Raises:
        AssertionError: A rule is broken; the message names the field, the step and the rule.
        PolicyError: `policy` is not a policy.
    """
    checked: Any = as_policy(policy)
    start = checked.init_state()
    is_state = getattr(start, "_fields", ())[:6] == ScaleState._fields
    _require(is_state, f"init_state returned {shown(start)}; return a NamedTuple that begins as ScaleState")
    dtypes = dict.fromkeys(ScaleState._fields, "int32") | {"loss_scale": "float32"}
    for name, value in start._asdict().items():
        dtype = dtypes.get(name, "float32 or int32")
        good = isinstance(value, np.generic) and value.dtype.name in dtype
        _require(good, f"{name} of init_state is {shown(value)}; return a NumPy scalar of {dtype}")
    full = start._replace(**dict.fromkeys(_COUNTERS, np.int32(LARGEST_COUNT - 1)))
    for first, moment in ((start, "step"), (full, "step with full counters")):
        expected = list(_run(checked, first, f"on the host after {moment}", None, lambda value: value))
        counts = {name: int(getattr(first, name)) for name in _COUNTERS[1:]}
        for step, (flag, state) in enumerate(zip(_FLAGS, expected, strict=True), 1):
            if flag:
                counts["overflow_streak"] = 0
            counted = ["steps"] if flag else list(counts)
            counts |= {name: min(counts[name] + 1, LARGEST_COUNT) for name in counted}
            for name, count in counts.items():
                _require(state[name] == count, f"{name} is {state[name]} after {moment} {step}, but must be {count}")
            _require(state["growth_tracker"] > -(2**30), f"growth_tracker wraps around at {moment} {step}")
        for where, xp, convert in _namespaces():
            states = _run(checked, first, f"on {where} after {moment}", xp, convert)
            for step, (state, right) in enumerate(zip(states, expected, strict=True), 1):
                for name, value in state.items():
                    text = f"{name} is {value} on {where} after {moment} {step}, but {right[name]} on the host"
                    _require(np.array_equal(value, right[name], equal_nan=True), text)
    for finite, steps, what in ((False, 300, "overflows"), (True, 5000, "finite steps")):
        with np.errstate(all="ignore"):
            scales = simulate(checked, [finite] * steps).loss_scale_after
        for step, scale in enumerate(scales, 1):
            text = f"loss_scale is {scale:g} after {step} {what} in a row; keep it from 2**-126 to 2**126"
            _require(SMALLEST_SCALE <= scale <= LARGEST_SCALE, text)


def _run(
    policy: Any, state: Any, when: str, xp: Any, convert: Callable[[Any], Any]
) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    """Yield the values after each step. Raises `AssertionError` unless `update` is pure and keeps each type."""
    state = state._make(map(convert, state))
    for step, flag in enumerate(_FLAGS, 1):
        before, given = _values(state), flag if xp is None else convert(np.bool_(flag))
        try:
            with np.errstate(all="ignore"):
                after, again = (policy.update(state, given, xp=xp) for _ in range(2))
        except Exception as error:
            hint = "use operators and select(..., xp=xp)"
            raise AssertionError(f"update raised {error!r} {when} {step}; {hint}") from error
        text = f"update returned {shown(after)} {when} {step}; return the type of the state"
        _require(type(after) is type(state), text)
        values, other = _values(after), _values(again)
        for name, value in before.items():
            kind, found = (f"{each.dtype} of shape {each.shape}" for each in (value, values[name]))
            _require(found == kind, f"{name} is {found} {when} {step}, but must stay {kind}")
            text = f"{name} is not computed from the state and the flag alone {when} {step}; make update pure"
            for each, again_each in ((other[name], values[name]), (value, _values(state)[name])):
                _require(np.array_equal(each, again_each, equal_nan=True), text)
        yield values
        state = after


def _values(state: Any) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.array(getattr(value, "traced", value)) for name, value in state._asdict().items()}


def _namespaces() -> Iterator[tuple[str, Any, Callable[[Any], Any]]]:
    yield "NumPy arrays", np, np.asarray
    yield "traced arrays", _Traced, _Traced
    if importlib.util.find_spec("array_api_strict"):
        import array_api_strict

        yield "array-api-strict", array_api_strict, array_api_strict.asarray


class _Traced:
    """A NumPy array without a truth value, as arrays have while a function is traced, and its own namespace."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, traced: Any) -> None:
        self.traced = np.asarray(getattr(traced, "traced", traced))
        self.dtype, self.shape = self.traced.dtype, self.traced.shape

    def __bool__(self) -> bool:
        raise TypeError("a traced array has no truth value")

    @classmethod
    def where(cls, condition: Any, x: Any, y: Any) -> "_Traced":
        """Return x or y; a plain number takes the dtype of the other one."""
        return cls(np.where(*(getattr(each, "traced", each) for each in (condition, x, y))))


def _applied(function: Callable[..., Any]) -> Callable[..., _Traced]:
    return lambda *operands: _Traced(function(*(getattr(each, "traced", each) for each in operands)))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor"):
    _function = getattr(operator, _name)
    setattr(_Traced, f"__{_name.strip('_')}__", _applied(_function))
    setattr(_Traced, f"__r{_name.strip('_')}__", _applied(lambda x, y, function=_function: function(y, x)))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "invert"):
    setattr(_Traced, f"__{_name}__", _applied(getattr(operator, _name)))


def _require(holds: Any, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
